"""predict: JSON lines in, JSON lines or arrays out, in order, for any number of lines."""

import contextlib
import io
import json
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file

import bert_jax
from bert_jax import predict
from bert_jax.errors import UserError
from bert_jax.inference import predictions
from tests.interop import torch_bert


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('model')
  torch_bert.make('BertForPreTraining', folder, max_position_embeddings=64)
  return str(folder)


@pytest.fixture
def source(tmp_path):
  path = tmp_path / 'in.jsonl'
  path.write_text(''.join(json.dumps({'text': f'w{i} ' * (1 + i % 9)}) + '\n' for i in range(40)))
  return str(path)


def test_embeddings_keep_their_order_in_three_formats(folder, source, tmp_path):
  texts = [json.loads(line)['text'] for line in open(source)]
  expected = bert_jax.from_pretrained(folder).embed(texts, 'cls', normalize=True)
  options = predictions.Options('cls', True)
  for name in ('out.jsonl', 'out.npy', 'out.safetensors'):
    predictions.run('embed', folder, source, str(tmp_path / name), options)
  lines = [json.loads(line)['embedding'] for line in open(tmp_path / 'out.jsonl')]
  np.testing.assert_allclose(lines, expected, atol=1e-5)
  np.testing.assert_allclose(np.load(tmp_path / 'out.npy'), expected, atol=1e-5)
  tensors = load_file(str(tmp_path / 'out.safetensors'))
  np.testing.assert_allclose(tensors['embeddings'], expected, atol=1e-5)
  assert not list(tmp_path.glob('*.partial'))


def test_each_token_has_a_vector_and_its_offsets(folder, tmp_path):
  source, out = tmp_path / 'in.jsonl', tmp_path / 'out.jsonl'
  source.write_text(json.dumps({'text': 'Wörld W12, w7'}) + '\n')
  options = predictions.Options('none', layers=(0, -1))
  predictions.run('embed', folder, str(source), str(out), options)
  tokens = json.loads(out.read_text())['tokens']
  text = 'Wörld W12, w7'
  assert [(t['token'], text[t['start']:t['end']]) for t in tokens] == [
      ('[UNK]', 'Wörld'), ('w12', 'W12'), ('[UNK]', ','), ('w7', 'w7')]
  assert {len(t['vector']) for t in tokens} == {256}


def answers(folder, task, lines, options=predictions.Options(), strict=False):
  rows = []
  predictions.predict(predictions.TASKS[task], bert_jax.from_pretrained(folder),
                      io.BytesIO(lines.encode()), 'in', rows.append, options, strict)
  return rows


def test_the_first_answer_comes_at_once(folder):
  read = []

  class Lines:
    def __iter__(self):
      for i in range(20):
        read.append(i)
        yield json.dumps({'text': f'w{i} [MASK]'}).encode() + b'\n'

  counts = []
  bert = bert_jax.from_pretrained(folder)
  predictions.predict(predictions.TASKS['fill_mask'], bert, Lines(), 'in',
                      lambda answer: counts.append(len(read)), predictions.Options())
  assert counts[0] == 1 and len(counts) == 20


def test_a_bad_example_is_refused_by_its_line(folder):
  lines = ''.join(json.dumps({'text': text}) + '\n' for text in (
      'w1 [MASK]', 'w2 [MASK]', 'w3 [MASK]', 'w4', 'w5 [MASK]'))
  with pytest.raises(UserError, match=r"in, line 4: no \[MASK\] in 'w4'"):
    answers(folder, 'fill_mask', lines, strict=True)
  for lines, message in (
      ('', 'in holds no example'), ('\n\n', 'in holds no example'),
      ('{"text": 3}\n', "in, line 1: needs a JSON object with the text 'text'"),
      ('{"text": "a"}\n{"txt": "a"}\n', 'in, line 2: needs'),
      ('{"text"\n', 'in, line 1: not JSON')):
    with pytest.raises(UserError, match=message):
      answers(folder, 'embed', lines, strict=True)


def test_array_outputs_are_refused_without_one_vector_per_text(folder, source, tmp_path):
  for task, options in (('score', predictions.Options()), ('embed', predictions.Options('none'))):
    with pytest.raises(UserError, match='holds one vector a text'):
      predictions.run(task, folder, source, str(tmp_path / 'out.npy'), options)
  with pytest.raises(UserError, match='line 1'):
    bad = tmp_path / 'bad.jsonl'
    bad.write_text('nothing\n')
    predictions.run('embed', folder, str(bad), str(tmp_path / 'out.npy'))
  assert not list(tmp_path.glob('out*'))


def test_an_answer_outside_the_encoding_of_the_terminal_is_utf_8(folder, tmp_path, monkeypatch):
  source, sink = tmp_path / 'in.jsonl', io.BytesIO()
  source.write_text(json.dumps({'text': 'w1', 'id': '猫'}) + '\n')
  monkeypatch.setattr('sys.stdout', io.TextIOWrapper(sink, encoding='latin-1', write_through=True))
  predictions.run('embed', folder, str(source), None)
  assert json.loads(sink.getvalue().decode())['id'] == '猫'


@pytest.mark.parametrize('flag', sorted(predict._USED_BY.keys() - {'precision'}))
def test_each_flag_lists_exactly_the_tasks_that_read_it(flag):
  readers = set()
  for name, task in predictions.TASKS.items():

    class Recorded(predictions.Options):
      def __getattribute__(self, field, name=name):
        if field == flag:
          readers.add(name)
        return super().__getattribute__(field)

    for examples in [], [{'text': 'a'}]:
      # The mock model may fail later; only the fields that are read before count.
      with contextlib.suppress(Exception):
        task.answer(mock.MagicMock(), examples, Recorded())
  assert readers == set(predict._USED_BY[flag])
