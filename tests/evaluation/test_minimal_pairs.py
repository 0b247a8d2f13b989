"""Minimal pairs: scores equal PyTorch's and BabyLM's, hand-computed tables, resumption."""

import gzip
import json
import math

import numpy as np
import pytest
import torch
import transformers

import bert_jax
from bert_jax.errors import UserError
from bert_jax.evaluation import minimal_pairs, suites
from tests.interop import torch_bert


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
