"""Evaluations: scores equal PyTorch's, hand-computed tables, resumption, mistakes."""

import json
import math
import types

from etils import epath
import numpy as np
import pytest
import torch

import bert_jax
from bert_jax.data.tokenizers import training
from bert_jax.errors import UserError
from bert_jax.evaluation import glue_suite, held_out_text, report, suites
from bert_jax.inference import json_lines
from bert_jax.interop import load, native
from bert_jax.labelled import glue as glue_lib
from bert_jax.labelled import table


def test_white_space_between_sentences_is_no_token():
  """Training reads sentences, and a byte-level BPE has entries for line ends and tabs."""
  tokenizer = training.train('bpe', lambda: ['The mat. The dog.'] * 9, 300, False)
  bert = types.SimpleNamespace(tokenizer=tokenizer)
  lines, spaces = (list(held_out_text._pieces(bert, [text], 32))
                   for text in ('The mat.\n\t The  dog.\n', 'The mat. The dog.'))
  assert lines == spaces and '\u010a' not in tokenizer.tokens(lines[0])


def test_the_loss_of_a_text_equals_pytorch(model, tmp_path):
  folder, theirs = model
  words = [f'w{n}' for n in np.random.default_rng(1).integers(0, 900, 150)]
  text = ' '.join(words[:100]) + '\n\n' + ' '.join(words[100:])
  (tmp_path / 'text.txt').write_text(text)
  bert = bert_jax.from_pretrained(folder)
  result = held_out_text.evaluate(bert, str(tmp_path / 'text.txt'),
                                  epath.Path(tmp_path / 'out.json'), rate=0.2, max_len=32)
  pieces = list(held_out_text._pieces(bert, iter(text.split('\n\n')), 32))
  assert [len(piece) for piece in pieces] == [30, 30, 30, 10, 30, 20]
  total = count = 0
  for batch, positions, targets, is_real in held_out_text._batches(bert, pieces, 32, 0.2, 0):
    for row, piece in enumerate(pieces):
      n = len(piece) + 2
      chosen = positions[row][is_real[row] > 0]
      assert len(set(chosen)) == len(chosen) == round(0.2 * len(piece))
      with torch.no_grad():
        logits = theirs(torch.tensor(batch.ids[row:row + 1, :n].astype(np.int64))).logits[0]
      gold = torch.tensor(targets[row][is_real[row] > 0].astype(np.int64))
      assert (batch.ids[row][chosen] == bert.tokenizer.mask_id).all()
      assert gold.tolist() == [piece[i - 1] for i in chosen]
      total -= torch.log_softmax(logits[torch.tensor(chosen)], -1)[
          torch.arange(len(chosen)), gold].sum().item()
      count += len(chosen)
  assert result.facts['loss'] == pytest.approx(total / count, abs=1e-5)
  loss = {unit: (number, nat) for unit, number, nat, _ in result.rows}
  assert loss['word'] == (150, pytest.approx(total / count))  # each word is a token here
  size = len(text.replace('\n\n', '').encode())
  assert loss['byte'] == (size, pytest.approx(total / count * 150 / size))


def test_a_killed_text_evaluation_resumes(model, tmp_path, monkeypatch):
  bert = bert_jax.from_pretrained(model[0])
  words = [f'w{n}' for n in np.random.default_rng(1).integers(0, 900, 300)]
  (tmp_path / 'text.txt').write_text(' '.join(words))
  monkeypatch.setattr(held_out_text, '_BATCH_TOKENS', 64)  # two rows of 32: five batches

  def evaluate(name):
    return held_out_text.evaluate(bert, str(tmp_path / 'text.txt'),
                                  epath.Path(tmp_path / f'{name}.json'), max_len=32)

  whole, write, written = evaluate('whole'), json_lines.write, []

  def killed_at_the_third(sink, line):
    written.append(line)
    if len(written) == 3:
      raise KeyboardInterrupt
    write(sink, line)

  monkeypatch.setattr(json_lines, 'write', killed_at_the_third)
  with pytest.raises(KeyboardInterrupt):
    evaluate('out')
  assert evaluate('out') == whole
  assert len(written) == 3 + 3  # the lost third batch and the two after it, not the first two
  assert (tmp_path / 'out.batches.jsonl').read_text() == (
      tmp_path / 'whole.batches.jsonl').read_text()


def test_a_perplexity_that_overflows_is_none():
  assert held_out_text._exp(1.0) == math.e and held_out_text._exp(1000.0) is None


def test_tables():
  result = report.Report({}, ('name', 'score', 'n'), [['a', 0.51234, 1200], ['bb', None, 3]],
                         'score')
  assert report.text(result) == 'name   score      n\na     0.5123  1,200\nbb         -      3'
  assert report.markdown(result).splitlines()[2] == '| a | 0.5123 | 1,200 |'
  # matplotlib must not parse a name with two dollar signs as math.
  named = result._replace(rows=[['$\\no_formula$', 0.5, 1]])
  assert report._picture(named).startswith(b'\x89PNG')


def write_task(rows: int, seed: int):
  """A task like SST-2: the word w1 is positive, w2 negative."""
  rng = np.random.default_rng(seed)
  lines = ['sentence\tlabel']
  for _ in range(rows):
    label = int(rng.integers(2))
    words = [f'w{n}' for n in rng.integers(10, 900, 5)]
    words[int(rng.integers(5))] = f'w{2 - label}'
    lines.append(f'{" ".join(words)}\t{label}')
  return '\n'.join(lines) + '\n'


@pytest.fixture
def glue(tmp_path):
  """A folder of GLUE with one task."""
  data = tmp_path / 'glue' / 'SST-2'
  data.mkdir(parents=True)
  (data / 'train.tsv').write_text(write_task(60, 0))
  (data / 'dev.tsv').write_text(write_task(20, 1))
  return data.parent


def test_glue_chooses_on_a_part_of_train_and_reports_dev(model, glue, tmp_path, monkeypatch):
  apart = {('model', 1e-3): (0.6, 0.8), ('model', 1e-5): (0.7, 0.6),  # of seeds 0 and 1
           ('twin', 1e-3): (0.5, 0.5), ('twin', 1e-5): (0.5, 0.6)}
  dev = {('model', 1e-3): (0.5, 0.7), ('model', 1e-5): (0.9, 0.9),  # better, but not chosen
         ('twin', 1e-3): (0.9, 0.9), ('twin', 1e-5): (0.25, 0.5)}

  def fine_tune(task, source, files, recipe, rate, seed, workdir):
    name = 'twin' if source.endswith('twin') else 'model'
    assert task == 'sst2' and files.dev == str(glue / 'SST-2/dev.tsv')
    return apart[name, rate][seed], dev[name, rate][seed]

  monkeypatch.setattr(glue_suite, '_fine_tune', fine_tune)
  (tmp_path / 'out.runs/model').mkdir(parents=True)  # left by a kill at the beginning
  options = {'seeds': 2, 'rates': (1e-3, 1e-5), 'twin': True, 'max_len': 64}
  suites.run(model[0], 'glue', str(glue), str(tmp_path / 'out.json'), options)
  row, mean = json.loads((tmp_path / 'out.json').read_text())['rows']
  assert (row['task'], row['score']) == ('sst2', 'accuracy')
  assert (row['model'], row['model, rate']) == (pytest.approx(0.6), 1e-3)
  assert row['model, deviation'] == pytest.approx(0.1 * 2 ** 0.5)
  assert (row['twin'], row['twin, rate']) == (pytest.approx(0.375), 1e-5)
  assert mean['model'] == row['model'] and mean['twin'] == row['twin']
  split = tmp_path / 'out.runs/data/sst2'
  train, rest = ((split / f'{name}.tsv').read_text().splitlines()[1:]
                 for name in ('train', 'apart'))
  assert len(train) == 54 and len(rest) == 6
  assert sorted(train + rest) == sorted((glue / 'SST-2/train.tsv').read_text().splitlines()[1:])
  with pytest.raises(UserError, match='out.runs holds the runs of another model, recipe'):
    suites.run(model[0], 'glue', str(glue), str(tmp_path / 'out.json'), {**options, 'most': 10})
  assert (split / 'train.tsv').read_text().splitlines()[1:] == train
  (glue / 'SST-2/dev.tsv').write_text((glue / 'SST-2/dev.tsv').read_text() + 'w1 good\t1\n')
  suites.run(model[0], 'glue', str(glue), str(tmp_path / 'out.json'), options)  # none has begun
  (tmp_path / 'out.runs/sst2-model/0.001-0').mkdir(parents=True)
  (tmp_path / 'out.runs/sst2-model/0.001-0/run.json').write_text('{}')
  (glue / 'SST-2/dev.tsv').write_text((glue / 'SST-2/dev.tsv').read_text() + 'w2 good\t1\n')
  with pytest.raises(UserError, match='holds scores of sst2 from before its files in .* changed'):
    suites.run(model[0], 'glue', str(glue), str(tmp_path / 'out.json'), options)
  with pytest.raises(UserError, match='--max_len=65 must be at least 8 and at most the 64'):
    suites.run(model[0], 'glue', str(glue), str(tmp_path / 'out.json'), options | {'max_len': 65})


@pytest.mark.medium
def test_glue_fine_tunes_and_does_not_repeat_finished_runs(model, glue, tmp_path, monkeypatch):
  options = {'seeds': 1, 'rates': (3e-3,), 'epochs': 2.0, 'batch_size': 8, 'max_len': 16}
  arguments = (model[0], 'glue', str(glue), str(tmp_path / 'out.json'), options)
  suites.run(*arguments)
  workdir = tmp_path / 'out.runs/sst2-model/0.003-0'
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  best = max((line for line in lines if 'eval_accuracy' in line),
             key=lambda line: line['eval_accuracy'])
  dev, = (value for name, value in best.items() if name.startswith('eval_accuracy_'))
  report_before = (tmp_path / 'out.json').read_text()
  assert json.loads(report_before)['rows'][0]['model'] == dev
  monkeypatch.setattr(glue_suite.run, 'run', None)
  suites.run(*arguments)
  assert (tmp_path / 'out.json').read_text() == report_before
  with pytest.raises(UserError, match='out.runs holds the runs of another model, recipe'):
    suites.run(*arguments[:4], options | {'epochs': 3.0})


def test_mistakes(model, tmp_path):
  folder, _ = model
  good = tmp_path / 'pairs.jsonl'
  good.write_text('{"sentence_good": "a", "sentence_bad": "b", "UID": "u"}\n')
  (tmp_path / 'glue/CoLA').mkdir(parents=True)
  (tmp_path / 'glue/CoLA/train.tsv').write_text('x\t1\t\ta\n')
  (tmp_path / 'empty').mkdir()
  silent = tmp_path / 'silent.jsonl'
  silent.write_text('{"sentence_good": "a", "sentence_bad": " ", "UID": "u", '
                    '"linguistics_term": "t"}\n')
  out = str(tmp_path / 'out.json')
  for arguments, message in (
      ((folder, 'blimp', 'x', out, {}), '--suite=blimp is unknown: use minimal_pairs, masked_lm'),
      ((folder, '', 'x', out, {}), 'give --suite, one of'),
      ((folder, 'glue', '', out, {}), 'give --data'),
      ((folder, 'glue', 'x', 'out', {}), '--output=out must end in .json'),
      ((folder, 'minimal_pairs', 'x', out, {'rate': 0.2}), '--rate has no effect here'),
      ((folder, 'minimal_pairs', str(good), out, {}),
       f"{good}, line 1: no column 'linguistics_term'"),
      ((folder, 'minimal_pairs', str(silent), out, {}), f'{silent}, line 1: one of sentence_good'),
      ((folder, 'minimal_pairs', '/nowhere', out, {}), 'matches no file'),
      ((folder, 'masked_lm', str(good), out, {'rate': 1.5}), '--rate=1.5 must lie in'),
      ((folder, 'masked_lm', str(good), out, {'max_len': 65}), '--max_len=65 must be at least 8'),
      ((folder, 'glue', str(tmp_path / 'glue'), out, {}), 'CoLA lacks dev.tsv'),
      ((folder, 'glue', str(tmp_path / 'empty'), out, {}), 'holds no task of GLUE'),
      ((folder, 'glue', '/nowhere', out, {}), '--data=/nowhere is not a folder'),
      ((folder, 'glue', str(tmp_path / 'glue'), out, {'rates': ()}), '--rates is empty'),
      ((folder, 'glue', str(tmp_path / 'glue'), out, {'epochs': -1.0}), '--epochs=-1.0 must be'),
      ((folder, 'glue', str(tmp_path / 'glue'), out, {'rates': (0.0,)}), '--rates=0.0 must be'),
      ((folder, 'glue', 'tfds:glue', out, {'most': 8}), '--most=8 is for a folder of GLUE')):
    with pytest.raises(UserError, match=message.replace('(', r'\(')):
      suites.run(*arguments)
  headless = tmp_path / 'headless'
  native.save(glue_suite.twin_of(load.load(folder)), epath.Path(headless))
  with pytest.raises(UserError, match='this model has no masked-LM head'):
    suites.run(str(headless), 'minimal_pairs', str(good), out, {})


def test_glue_of_tfds_has_a_development_split_for_each_task(monkeypatch):
  """MNLI's is validation_matched."""
  asked = []

  def read(name, split):
    asked.append((name, split))
    return iter(())

  monkeypatch.setattr(table, 'read_tfds', read)
  for task, source in glue_suite.find_tasks('tfds:glue').items():
    files = glue_suite._divided(task, source, epath.Path('unused'), 0)
    for path, split in zip(files, ('train', 'validation', 'validation')):
      assert not list(glue_lib.read(path, glue_lib.find(f'glue/{task}'), split))
  assert len(asked) == 27
  assert {split for name, split in asked if name == 'glue/mnli'} == {'validation_matched'}
  assert {split for name, split in asked if name == 'glue/sst2'} == {'validation'}
  assert {name.partition('@')[2] for name, _ in asked} == {'', 'train[:90%]', 'train[90%:]'}
