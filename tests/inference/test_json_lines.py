"""predict on bad lines, after kills, and with broken weights."""

import io
import json
import shutil

from etils import epath
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bert_jax
from bert_jax.errors import Failed, UserError
from bert_jax.inference import json_lines, predictions
from bert_jax.interop import load as load_lib
from tests.interop import torch_bert


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('model')
  torch_bert.make('BertForPreTraining', folder, max_position_embeddings=64)
  return str(folder)


@pytest.fixture(scope='module')
def bert(folder):
  return bert_jax.from_pretrained(folder)


BAD = [
    b'\xef\xbb\xbf{"text": "w1 [MASK]", "id": 7}', b'', b'{"text": "w2"}', b'{"text"',
    b'{"text": "w3 [MASK]", "id": {"n": [1, null]}, "masks": 5, "error": "mine"}', b'[1]',
    b'{"text": 3, "id": "x"}', b'{"text": "w4 \xff [MASK]"}', b'{"text": "[MASK]", "id": NaN}',
    b'{"text": "[MASK]", "id": 1e999}', rb'{"text": "w5 \ud800[MASK]", "\udc00": "\ud83d\ude00"}',
    b'{"text": "' + b'w1 ' * 70 + b'[MASK]"}', b'{"text": "w6 [MASK]"}\r']


def test_a_bad_line_costs_only_its_own_answer(folder, bert, tmp_path):
  source, output = tmp_path / 'in.jsonl', tmp_path / 'out.jsonl'
  source.write_bytes(b'\n'.join(BAD))
  with pytest.raises(Failed, match='8 of 12 examples could not be answered: "error" says why in '):
    predictions.run('fill_mask', folder, str(source), str(output))
  answers = [json.loads(line) for line in output.read_text().splitlines()]
  errors = [(x.get('error') or '').removeprefix(f'{source}, ') for x in answers]
  assert [error.split(':')[0] for error in errors] == [
      '', 'line 3', 'line 4', '', 'line 6', 'line 7', 'line 8', 'line 9', 'line 10', '', 'line 12',
      '']
  for i, message in {1: "no [MASK] in 'w2'", 2: 'not JSON', 4: 'needs a JSON object with the text',
                     5: 'needs a JSON', 6: 'invalid UTF-8', 7: 'not JSON (Out of range float',
                     8: 'not JSON (Out of range float', 10: 'longer than the 64 positions'}.items():
    assert message in errors[i], errors[i]
  assert answers[0]['id'] == 7 and answers[5]['id'] == 'x'
  assert answers[3] == {'id': {'n': [1, None]}, 'input_masks': 5, 'input_error': 'mine',
                        'masks': bert.fill_mask('w3 [MASK]')}
  assert answers[9]['\ufffd'] == '\U0001f600'
  for i, text in ((0, 'w1 [MASK]'), (9, 'w5 \ufffd[MASK]'), (11, 'w6 [MASK]')):
    assert [c['token'] for c in answers[i]['masks'][0]['candidates']] == [
        c['token'] for c in bert.fill_mask(text)[0]['candidates']]
  assert sorted(p.name for p in tmp_path.iterdir()) == ['in.jsonl', 'out.jsonl']
  with pytest.raises(UserError, match='in.jsonl, line 3: no'):
    predictions.run('fill_mask', folder, str(source), str(tmp_path / 'strict.jsonl'), strict=True)
  assert sorted(p.name for p in tmp_path.iterdir()) == ['in.jsonl', 'out.jsonl']


def test_few_batches_for_one_bad_line(monkeypatch):
  """predict finds the bad line by bisection."""
  calls = []

  def answer(model, examples, options):
    del model, options
    calls.append(len(examples))
    if any(e['text'] == 'bad' for e in examples):
      raise UserError('bad')
    return [{'n': e['text']} for e in examples]

  text = ''.join(json.dumps({'text': 'bad' if i == 700 else str(i)}) + '\n' for i in range(1023))
  answers = []
  done = predictions.predict(
      predictions.LinePrediction(('text',), answer), None, io.BytesIO(text.encode()), 'in',
      answers.append, predictions.Options())
  assert done == (1023, 1) and len(calls) < 30
  assert [x.get('n') for x in answers] == [None if i == 700 else str(i) for i in range(1023)]


def with_weight(tmp_path, value):
  """A copy of a model with one weight changed."""
  torch_bert.make('BertForPreTraining', tmp_path / 'other', max_position_embeddings=64)
  path = tmp_path / 'other/model.safetensors'
  tensors = load_file(path)
  name = next(name for name in tensors if name.endswith('encoder.layer.1.output.LayerNorm.bias'))
  tensors[name][3] = value
  save_file(tensors, path, {'format': 'pt'})
  return str(tmp_path / 'other')


def killed_after(monkeypatch, count):
  """Ends a job as a kill would: after `count` answers, in the middle of the next one."""
  write, written = json_lines.write, []

  def dying(sink, answer):
    if len(written) == count:
      sink.write('{"embedding": [0.1, ')
      sink.flush()
      raise KeyboardInterrupt
    written.append(write(sink, answer))

  monkeypatch.setattr(json_lines, 'write', dying)


def test_a_job_does_not_reuse_the_answers_of_another_job(tmp_path):
  path, about = epath.Path(tmp_path / 'out.jsonl'), tmp_path / 'out.jsonl.partial.json'
  job = json_lines.partial(path, {'input': 'a'})
  job.__enter__()  # and the job is killed
  assert about.exists()
  with json_lines.partial(path):  # another job, without a description
    assert not about.exists()
  job.gen.close()


def test_answers_with_every_kind_of_line_break(tmp_path):
  items = ['a\u2028b', 'c\x85d\x0ce', 'f\r\ng', 'h']
  answers, new = json_lines.write_all(
      epath.Path(tmp_path / 'out.jsonl'), {'of': 'a job'}, items, len(items), 3,
      lambda window: [{'text': text} for text in window])
  assert [answer['text'] for answer in answers] == items and new == 4


def test_a_model_that_was_moved_is_the_same(folder, tmp_path):
  shutil.copytree(folder, tmp_path / 'elsewhere')
  one, other = (load_lib.load(str(path)) for path in (folder, tmp_path / 'elsewhere'))
  assert json_lines.identity(one) == json_lines.identity(other)


def test_an_output_that_cannot_be_written_is_refused(folder, tmp_path):
  (tmp_path / 'in.jsonl').write_text('{"text": "w1"}\n')
  for output, message in ((tmp_path, 'is a folder: give a file'),
                          (tmp_path / 'in.jsonl' / 'out.jsonl', 'cannot be written')):
    with pytest.raises(UserError, match=message):
      predictions.run('embed', folder, str(tmp_path / 'in.jsonl'), str(output))


@pytest.mark.parametrize('changed', ['', 'input', 'options', 'model'])
def test_a_killed_job_resumes_if_nothing_changed(folder, tmp_path, monkeypatch, changed, capsys):
  source, output = tmp_path / 'in.jsonl', tmp_path / 'out.jsonl'
  texts = [f'w{i} ' * (1 + i % 9) for i in range(40)]
  source.write_text('not json\n' + ''.join(
      json.dumps({'text': text, 'id': i}) + '\n\n' for i, text in enumerate(texts)))
  with monkeypatch.context() as patch:
    killed_after(patch, 23)
    with pytest.raises(KeyboardInterrupt):
      predictions.run('embed', folder, str(source), str(output))
  assert not output.exists()
  partial = (tmp_path / 'out.jsonl.partial').read_bytes()
  assert partial.count(b'\n') == 23 and not partial.endswith(b'\n')
  options, model = predictions.Options('cls' if changed == 'options' else None), folder
  if changed == 'input':
    source.write_text(source.read_text() + '\n')
  if changed == 'model':
    model = with_weight(tmp_path, 0.5)
  examples = []
  ask = predictions._answers
  monkeypatch.setattr(predictions, '_answers', lambda *a: examples.extend(a[2]) or ask(*a))
  with pytest.raises(Failed, match='1 of 41 examples could not'):
    predictions.run('embed', model, str(source), str(output), options)
  assert len(examples) == (40 if changed else 18)  # of 41, of which 23 are written
  assert ('23 examples were answered before' in capsys.readouterr().err) is not bool(changed)
  answers = [json.loads(line) for line in output.read_text().splitlines()]
  assert 'error' in answers[0] and [x['id'] for x in answers[1:]] == list(range(40))
  np.testing.assert_allclose(
      [x['embedding'] for x in answers[1:]],
      bert_jax.from_pretrained(model).embed(texts, options.pooling), atol=1e-5)
  assert not list(tmp_path.glob('*partial*'))


def test_long_texts_are_scored_whole(bert):
  words = [f'w{i % 50}' for i in range(150)]
  with pytest.raises(UserError, match='152 tokens is longer than the 64 .* long=chunks'):
    bert.score(' '.join(words))
  short = bert.score(' '.join(words[:62]))
  assert short['surprisal'] == pytest.approx(sum(t['surprisal'] for t in short['tokens']))
  assert short['pseudo_perplexity'] == pytest.approx(np.exp(short['surprisal'] / 62))
  assert bert.score(' '.join(words[:62]), 'chunks') == short
  scored = bert.score(' '.join(words), 'chunks')
  assert [t['token'] for t in scored['tokens']] == words
  # A token far from both ends sees 31 tokens before it and 30 after it; others see their chunk.
  for i, start in ((100, 69), (31, 0), (10, 0), (149, 88)):
    masked = [*words[start:i], '[MASK]', *words[i + 1:start + 62]]
    (mask,) = bert.fill_mask(' '.join(masked), bert.config.vocab_size)
    (expected,) = (c['surprisal'] for c in mask['candidates'] if c['token'] == words[i])
    assert scored['tokens'][i]['surprisal'] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path, value):
  with pytest.raises(UserError, match=r'other: bert/.*bias holds NaN or infinity'):
    bert_jax.from_pretrained(with_weight(tmp_path, value))


@pytest.mark.parametrize('name', ['out.jsonl', 'out.npy'])
def test_answers_that_are_not_finite_are_refused(tmp_path, name):
  """Weights so large that their sum overflows."""
  model, source = with_weight(tmp_path, 3e38), tmp_path / 'in.jsonl'
  source.write_text('{"text": "w1"}\n')
  with pytest.raises(UserError, match='in.jsonl, line 1: the answer holds NaN or infinity'):
    predictions.run('embed', model, str(source), str(tmp_path / name))
  assert not list(tmp_path.glob('out*'))
