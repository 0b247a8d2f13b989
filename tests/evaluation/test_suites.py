"""Evaluations: scores equal PyTorch's, hand-computed tables, resumption, mistakes."""

import gzip
import json
import math
import types

from etils import epath
import numpy as np
import pytest
import torch
import transformers

import bert_jax
from bert_jax.data.tokenizers import training
from bert_jax.errors import UserError
from bert_jax.evaluation import glue_suite, held_out_text, minimal_pairs, report, suites
from bert_jax.inference import json_lines
from bert_jax.interop import load, native
from bert_jax.labelled import glue as glue_lib
from bert_jax.labelled import table
from tests.interop import torch_bert


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  """(folder, PyTorch's model) of a random tiny BERT of 64 positions."""
  folder = tmp_path_factory.mktemp('model')
  theirs = torch_bert.make('BertForMaskedLM', folder, max_position_embeddings=64)
  return str(folder), theirs


def write_pairs(path, count: int):
  rng = np.random.default_rng(0)
  lines = []
  for i in range(count):
    words = [f'w{n}' for n in rng.integers(0, 900, rng.integers(3, 20))]
    other = [*words]
    other[int(rng.integers(len(words)))] = 'w901'
    lines.append(json.dumps({
        'sentence_good': ' '.join(words), 'sentence_bad': ' '.join(other),
        'UID': f'paradigm{i % 3}', 'linguistics_term': 'first' if i % 3 else 'second'}))
  path.write_bytes(gzip.compress(('\n'.join(lines) + '\n').encode()))
  return [json.loads(line) for line in lines]


def torch_score(theirs, ids: list[int], mask_id: int) -> float:
  copies = torch.tensor([ids] * (len(ids) - 2))
  places = torch.arange(1, len(ids) - 1)
  copies[torch.arange(len(copies)), places] = mask_id
  with torch.no_grad():
    logits = theirs(copies).logits[torch.arange(len(copies)), places]
  return torch.log_softmax(logits, -1)[torch.arange(len(copies)), torch.tensor(ids[1:-1])].sum(
      ).item()


@pytest.mark.medium
def test_pair_scores_equal_pytorch(model, tmp_path):
  folder, theirs = model
  lines = write_pairs(tmp_path / 'pairs.jsonl.gz', 200)
  suites.run(folder, 'minimal_pairs', str(tmp_path / 'pairs.jsonl.gz'),
             str(tmp_path / 'out.json'), {})
  scores = [json.loads(x) for x in (tmp_path / 'out.pairs.jsonl').read_text().splitlines()]
  bert, right = bert_jax.from_pretrained(folder), {}
  for line, score in zip(lines, scores, strict=True):
    good, bad = (torch_score(theirs, list(bert.row(line[f'sentence_{x}']).ids),
                             bert.tokenizer.mask_id) for x in ('good', 'bad'))
    assert abs(score['good'] - good) < 1e-4 and abs(score['bad'] - bad) < 1e-4
    for name in (f'{line["linguistics_term"]}: {line["UID"]}', 'all'):
      right.setdefault(name, []).append(good > bad)
  written = json.loads((tmp_path / 'out.json').read_text())
  rows = {row['pairs of']: row for row in written['rows']}
  assert set(rows) == {*right, 'first', 'mean of the paradigms'}
  assert written['rows'][-1]['pairs of'] == 'all'
  for name, of in right.items():
    p = np.mean(of)
    assert rows[name]['pairs'] == len(of) and rows[name]['accuracy'] == pytest.approx(p)
    assert rows[name]['standard error'] == pytest.approx(math.sqrt(p * (1 - p) / len(of)))
  assert (tmp_path / 'out.md').read_text().count('\n') == 2 + len(rows)
  assert (tmp_path / 'out.png').read_bytes().startswith(b'\x89PNG')


def babylm_score(theirs, tokenizer, sentence: str, completion: str) -> float:
  """A sentence's score as BabyLM's pipeline defines it, from transformers' own parts."""
  encoded = tokenizer(sentence, return_offsets_mapping=True)
  start, total = len(sentence) - len(completion), 0.0
  for place, (_, end) in enumerate(encoded['offset_mapping']):
    if end > start:
      ids = torch.tensor([encoded['input_ids']])
      target, ids[0, place] = int(ids[0, place]), tokenizer.mask_token_id
      with torch.no_grad():
        total += torch.log_softmax(theirs(ids).logits[0, place], -1)[target].item()
  return total


def test_files_of_babylm(tmp_path):
  """BLiMP, its supplement and EWoK, with words of several pieces, as BabyLM scores them."""
  folder, data = tmp_path / 'model', tmp_path / 'data'
  data.mkdir()
  words = ['the', 'cat', 'dog', 'run', '##s', '##ning', 'sleep', 'un',
           '##like', '##ly', 'is', '.']
  entries = [*torch_bert.SPECIAL, *words]
  theirs = torch_bert.make('BertForMaskedLM', folder, vocab_size=len(entries),
                           max_position_embeddings=64)
  (folder / 'vocab.txt').write_text('\n'.join(entries) + '\n')
  tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
  rng = np.random.default_rng(1)
  text = lambda n: ' '.join(rng.choice(
      ['the', 'cat', 'dog', 'runs', 'running', 'unlikely', 'sleeps', 'Cat', 'is'], n)) + '.'
  blimp = [{'sentence_good': text(6), 'sentence_bad': text(6), 'UID': f'p{i % 2}',
            'linguistics_term': 'term', 'field': 'syntax'} for i in range(7)]
  supplement = [{'sentence_good': text(5), 'sentence_bad': text(7)} for _ in range(4)]
  ewok = [{'Domain': 'physics', 'Context1': text(4), 'Context2': text(4), 'Target1': text(3),
           'Target2': text(3), 'ContextType': 'direct'} for _ in range(6)]
  expected = []
  for name, lines in (('a_blimp', blimp), ('hypernym', supplement), ('physics', ewok)):
    (data / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    for line in lines:
      if name == 'physics':
        parts = [(f'{line["Context1"]} {line[x]}', f' {line[x]}') for x in ('Target1', 'Target2')]
      else:
        parts = [(line[x], line[x]) for x in ('sentence_good', 'sentence_bad')]
      expected.append((line.get('UID') or line.get('Domain') or name,
                       [babylm_score(theirs, tokenizer, *part) for part in parts]))
  suites.run(str(folder), 'minimal_pairs', str(data / '*.jsonl'), str(tmp_path / 'out.json'), {})
  scores = [json.loads(x) for x in (tmp_path / 'out.pairs.jsonl').read_text().splitlines()]
  for score, (uid, likelihoods) in zip(scores, expected, strict=True):
    assert score['UID'] == uid
    np.testing.assert_allclose([score['good'], score['bad']], likelihoods, atol=1e-4)
  written = json.loads((tmp_path / 'out.json').read_text())
  by_uid = {}
  for uid, (good, bad) in expected:
    by_uid.setdefault(uid, []).append(good > bad)
  assert set(by_uid) == {'p0', 'p1', 'hypernym', 'physics'}
  assert written['mean_of_paradigms'] == pytest.approx(np.mean([*map(np.mean, by_uid.values())]))
  assert written['accuracy'] == pytest.approx(np.mean([g > b for _, (g, b) in expected]))


def test_a_tie_is_wrong(model, tmp_path):
  (tmp_path / 'p.jsonl').write_text(json.dumps(
      {'sentence_good': 'w1 w2', 'sentence_bad': 'W1  w2', 'UID': 'u', 'linguistics_term': 't'}))
  suites.run(model[0], 'minimal_pairs', str(tmp_path / 'p.jsonl'), str(tmp_path / 'o.json'), {})
  assert json.loads((tmp_path / 'o.json').read_text())['accuracy'] == 0


def test_a_killed_evaluation_resumes(model, tmp_path, monkeypatch):
  folder, _ = model
  write_pairs(tmp_path / 'pairs.jsonl.gz', 30)
  monkeypatch.setattr(minimal_pairs, '_PAIRS_AT_ONCE', 8)
  arguments = (folder, 'minimal_pairs', str(tmp_path / 'pairs.jsonl.gz'))
  suites.run(*arguments, str(tmp_path / 'whole.json'), {})
  score, calls = minimal_pairs.pseudo_log_likelihoods, []

  def killed_at_the_third(bert, texts, contexts):
    calls.append(len(texts))
    if len(calls) == 3:
      raise KeyboardInterrupt
    return score(bert, texts, contexts)

  monkeypatch.setattr(minimal_pairs, 'pseudo_log_likelihoods', killed_at_the_third)
  with pytest.raises(KeyboardInterrupt):
    suites.run(*arguments, str(tmp_path / 'out.json'), {})
  suites.run(*arguments, str(tmp_path / 'out.json'), {})
  assert calls == [16, 16, 16, 16, 12]  # two windows were scored before the kill, two after
  assert (tmp_path / 'out.pairs.jsonl').read_text() == (tmp_path / 'whole.pairs.jsonl').read_text()


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


def test_a_sentence_that_is_too_long_is_refused_before_scoring(model, tmp_path):
  """Lengths are checked before anything is scored, so a killed job can still resume."""
  folder, _ = model
  pair = {'sentence_good': 'w1 w2', 'sentence_bad': 'w2 w1', 'UID': 'u', 'linguistics_term': 't'}
  path, out = tmp_path / 'pairs.jsonl', tmp_path / 'out.json'
  path.write_text(json.dumps(pair) + '\n' + json.dumps({**pair, 'sentence_bad': 'w1 ' * 63}) + '\n')
  (tmp_path / 'out.pairs.jsonl.partial').write_text('earlier')
  with pytest.raises(UserError, match='pairs.jsonl, line 2: sentence_bad has 63 tokens, this model '
                     'scores sentences of 1 to 62'):
    suites.run(folder, 'minimal_pairs', str(path), str(out), {})
  # A target that is only a zero-width space has no token, so its score would be 0.
  path.write_text(json.dumps(
      {'Domain': 'd', 'Context1': 'w1', 'Target1': 'w2', 'Target2': '\u200b'}))
  with pytest.raises(UserError, match='pairs.jsonl, line 1: Target2 has 0 tokens: leave the pair'):
    suites.run(folder, 'minimal_pairs', str(path), str(out), {})
  assert (tmp_path / 'out.pairs.jsonl.partial').read_text() == 'earlier'


def test_a_paradigm_belongs_to_its_phenomenon(model, tmp_path, monkeypatch):
  folder, _ = model
  monkeypatch.setattr(minimal_pairs, 'pseudo_log_likelihoods', lambda bert, texts, contexts:
                      np.array([{'w1': 1.0, 'w2': 0.0}[text] for text in texts]))
  pairs = [{'sentence_good': good, 'sentence_bad': bad, 'UID': 'same', 'linguistics_term': term}
           for good, bad, term in (('w1', 'w2', 'a'), ('w1', 'w2', 'b'), ('w2', 'w1', 'b'))]
  (tmp_path / 'p.jsonl').write_text('\n'.join(map(json.dumps, pairs)))
  suites.run(folder, 'minimal_pairs', str(tmp_path / 'p.jsonl'), str(tmp_path / 'o.json'), {})
  written = json.loads((tmp_path / 'o.json').read_text())
  accuracies = {row['pairs of']: row['accuracy'] for row in written['rows']}
  assert accuracies == {'a: same': 1, 'b: same': 0.5, 'mean of the paradigms': 0.75,
                        'all': pytest.approx(2 / 3)}


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
