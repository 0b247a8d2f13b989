"""ColBERT: loss and gradient equal sentence-transformers'; a run learns, exports, continues."""

import functools
import json

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.scoring import colbert_kd_scores, colbert_scores
import torch

import bert_jax
from bert_jax import config as config_lib
from bert_jax.data.inputs import Input
from bert_jax.data.late_inputs import DOCUMENT, QUERY, LateInputs
from bert_jax.errors import UserError
from bert_jax.evaluation import retrieval
from bert_jax.inference import forward
from bert_jax.interop import conversion
from bert_jax.labelled import packed_examples
from bert_jax.model.bert_config import BertConfig
from bert_jax.runs import run
from bert_jax.tasks import late_interaction
from bert_jax.tasks.late_interaction import LateInteraction
from tests import made_tasks
from tests.interop import test_late_folders, torch_bert

WIDTH = 8


def packed(rng, targets=None):
  """5 queries of up to 12 tokens with 3 documents each; some tokens do not count."""
  tokenizer = made_tasks.tokenizer()
  layout = LateInputs(expansion='fixed', expanded=12, skipped=('.', '?'))

  def texts(count):
    return [(' '.join(rng.choice([*made_tasks.WORDS, '.', '?'], rng.integers(1, 18))),)
            for _ in range(count)]

  queries = layout.make(texts(5), tokenizer, QUERY, 24)
  documents = layout.make(texts(15), tokenizer, DOCUMENT, 24)
  inputs, counts = ([x for e in range(5) for x in (of_query[e], *of_document[3 * e:3 * e + 3])]
                    for of_query, of_document in zip(queries, documents))
  features = packed_examples.Features(inputs, np.repeat(np.arange(5), 4), targets,
                                      [x.astype(np.int32) for x in counts])
  located = next(packed_examples.Batches(features, batch_size=6, pad_id=0).in_order())
  return located, inputs, counts


def padded(located, inputs, counts, values, chosen):
  """[n, T, D] of `values` [R, L, D] and the mask, for some inputs: what PyTorch takes."""
  length = max(len(inputs[i].ids) for i in chosen)
  vectors, mask = torch.zeros(len(chosen), length, WIDTH), torch.zeros(len(chosen), length)
  for n, i in enumerate(chosen):
    (row,), (slot,) = np.nonzero(located.index == i)
    start, size = located.batch.starts[row, slot], len(inputs[i].ids)
    vectors[n, :size] = values[row, start:start + size]
    mask[n, :size] = torch.tensor(counts[i], dtype=torch.float32)
  return vectors, mask.bool()


@pytest.mark.parametrize('distills', [False, True])
def test_the_loss_and_its_gradient_equal_sentence_transformers(distills):
  rng = np.random.default_rng(0)
  teacher = rng.normal(size=(5, 3)).astype(np.float32) if distills else None
  located, inputs, counts = packed(rng, teacher)
  values = rng.normal(size=(*located.batch.tokens.ids.shape, WIDTH)).astype(np.float32)
  task = LateInteraction(None, temperature=2.0, query_length=12, distills=distills)

  def loss(values):
    metrics = task.metrics(task.logits(lambda *_: values, located.batch), located.batch)
    return metrics['loss'][0] / metrics['loss'][1], metrics

  (ours, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(values))
  theirs = torch.tensor(values, requires_grad=True)
  numbers = np.arange(20).reshape(5, 4)
  queries, queries_mask = padded(located, inputs, counts, theirs, numbers[:, 0])
  documents, mask = padded(located, inputs, counts, theirs, numbers[:, 1:].reshape(-1))
  documents, mask = documents.reshape(5, 3, -1, WIDTH), mask.reshape(5, 3, -1)
  if distills:
    scores = colbert_kd_scores(queries, documents, queries_mask, mask)
    expected = 4 * torch.nn.functional.kl_div(
        torch.log_softmax(scores / 2, -1), torch.log_softmax(torch.tensor(teacher) / 2, -1),
        reduction='batchmean', log_target=True)
  else:
    scores = colbert_scores(queries, documents, queries_mask, mask)
    expected = torch.nn.functional.cross_entropy(scores / 2, 3 * torch.arange(5))
  expected.backward()
  np.testing.assert_allclose(ours, expected.item(), rtol=1e-5)
  np.testing.assert_allclose(gradient, theirs.grad, rtol=1e-5, atol=1e-6)
  assert metrics['loss'][1] == metrics['accuracy'][1] == 5  # not the padding


def test_max_sim_by_hand():
  queries = jnp.array([[[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]])
  counts = jnp.array([[True, True, False]])
  document = jnp.array([[0.5, -1.0], [-0.25, -0.5], [7.0, 7.0]])
  some = jnp.array([True, True, False])
  # The first token meets 0.5, the second -0.5: a negative best product counts too.
  assert late_interaction.max_sim(queries, counts, document, some)[0] == 0.5 - 0.5
  assert late_interaction.max_sim(queries, counts, document, some & False)[0] == -1e9


def test_hidden_tokens_see_the_text_but_are_not_seen(tmp_path):
  bert = bert_jax.from_pretrained(made_tasks.model(tmp_path))
  texts = [('w1 w2',), ('w3',)]
  inputs, _ = LateInputs(expansion='fixed', expanded=9).make(texts, bert.tokenizer, QUERY, 64)

  def states(inputs):
    run = functools.partial(forward.hidden_states, bert.config, layers=(-1,))
    return bert.per_token(inputs, run)

  def shown(values, hidden):
    return values[:len(values) - hidden]

  plain = [Input(shown(*x[::2]), shown(*x[1:])) for x in inputs]
  assert [x.hidden for x in inputs] == [5, 6]
  for hidden, alone in zip(states(inputs), states(plain)):
    np.testing.assert_allclose(hidden[:len(alone)], alone, atol=2e-6)
  # Hidden tokens see the text: the same [MASK] in the same place differs between texts.
  first, second = states(inputs)
  assert np.abs(first[5] - second[5]).max() > 1e-2
  # Without `hidden` the other tokens see them.
  visible = states([x._replace(hidden=0) for x in inputs])[0]
  assert np.abs(visible[:4] - first[:4]).max() > 1e-2


def config_of(tmp_path, **fields):
  config = config_lib.finetuning('late_interaction')
  config.update_from_flattened_dict({
      'init_from': made_tasks.model(tmp_path / 'model'), 'max_len': 24, 'train_epochs': 16.0,
      'log_every': 1, 'optimizer.learning_rate': 3e-3, 'model.scan_unroll': 1, 'eval_every': 1000,
      'batch_size': 16, 'data.width': 16, 'data.query_length': 12,
      'data.negative_column': 'contrary',
      'data.train': made_tasks.pairs(tmp_path / 'train.jsonl', 128),
      'data.eval': made_tasks.pairs(tmp_path / 'eval.jsonl', 40, seed=1), **fields})
  return config


@pytest.mark.slow
def test_a_run_learns_exports_and_continues_from_the_export(tmp_path):
  config = config_of(tmp_path, **{'data.query_prompt': 'w1 '})
  run.run(config, str(tmp_path / 'run'))
  lines = [json.loads(x) for x in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
  right = [line['accuracy'] for line in lines if 'accuracy' in line]
  assert np.mean(right[-16:]) > 0.9 and np.mean(right[:8]) < 0.5
  assert lines[-1]['eval_spearman'] > 0.8
  bert = bert_jax.from_pretrained(str(tmp_path / 'run'))
  conversion.convert(str(tmp_path / 'run'), str(tmp_path / 'st'), 'sentence_transformers')
  theirs = MultiVectorEncoder(str(tmp_path / 'st'), device='cpu')
  texts = ['w1 w2 . w3', 'w4 ' * 40]
  for role, encode in ((QUERY, theirs.encode_query), (DOCUMENT, theirs.encode_document)):
    for ours, expected in zip(late_interaction.vectors(bert, texts, role),
                              encode(texts, convert_to_numpy=True), strict=True):
      np.testing.assert_allclose(ours, expected, atol=1e-5)
  # A run from the folder keeps its width, its lengths and its prompts.
  config.init_from, config.train_steps, config.train_epochs = str(tmp_path / 'st'), 1, 0.0
  config.optimizer.learning_rate = 1e-30
  config.data.width = config.data.query_length = 0
  config.data.query_prompt = 'auto'
  run.run(config, str(tmp_path / 'again'))
  again = bert_jax.from_pretrained(str(tmp_path / 'again'))
  assert again.late == bert.late and again.late.prompts == {'query': 'w1 '}
  for a, b in zip(late_interaction.vectors(again, texts, QUERY),
                  late_interaction.vectors(bert, texts, QUERY)):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_scores_of_a_teacher_are_read_and_checked(tmp_path):
  lines = [{'text': 'w1', 'text_pair': 'w1 w2', 'contrary': 'w3', 'scores': [3, -1.5]},
           {'text': 'w4', 'text_pair': 'w4 w2', 'contrary': 'w5', 'scores': [2, 0]}]
  path = tmp_path / 'scored.jsonl'
  path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  config = config_of(tmp_path, **{'data.scores_column': 'scores', 'data.train': str(path)})
  files = late_interaction.LateFiles
  assert [e.score for e in files.read(str(path), config.data, 'train', [])] == [(3, -1.5), (2, 0)]
  for scores in ([1], 'high', [1, True], [1, None]):
    path.write_text(json.dumps(lines[0] | {'scores': scores}) + '\n')
    with pytest.raises(UserError, match=r"line 1: 'scores' is .*, not a list of 2 numbers"):
      list(files.read(str(path), config.data, 'train', []))


def test_the_min_expansions_read_queries_up_to_max_len(tmp_path):
  config = config_of(tmp_path, **{'data.query_expansion': 'min'})
  for expansion, length in (('min', 24), ('min_visible', 24), ('fixed', 12), ('none', 12)):
    config.data.query_expansion = expansion
    config.model.update({name: value for name, value in vars(BertConfig()).items()
                         if config.model.get(name) is None})
    assert late_interaction.LateFiles.make(config, [], []).task.query_length == length


def test_queries_of_a_model_without_a_length_stay_whole(tmp_path, capsys):
  config = config_of(tmp_path)
  config.data.query_length = 0
  fields = late_interaction.fields_if_unset(
      config.data, {}, LateInputs(expansion='none', document_length=300), {}, 8, 24, True)
  assert fields['data.query_length'] == 24


def test_the_masks_of_a_deberta_are_visible(tmp_path):
  config = config_of(tmp_path)
  config.data.query_expansion = 'auto'
  for can_hide, expansion in ((True, 'fixed'), (False, 'fixed_visible')):
    fields = late_interaction.fields_if_unset(config.data, {}, None, {}, 0, 24, can_hide)
    assert fields['data.query_expansion'] == expansion
  config.data.query_expansion = 'min'
  config.model.update(vars(BertConfig()) | {'architecture': 'deberta-v2'})
  with pytest.raises(UserError, match='query_expansion=min hides .*give min_visible or none'):
    late_interaction.LateFiles.make(config, [], [])


@pytest.mark.parametrize(('fields', 'message'), [
    ({'data.query_length': 30}, 'data.query_length=30 is above max_len=24'),
    ({'data.query_length': 2}, 'data.query_length=2 leaves no token for the text'),
    ({'data.text_pair_column': ''}, 'data.negative_column=contrary needs data.text_pair_column'),
    ({'data.text_pair_column': '', 'data.negative_column': ''},
     'data.text_pair_column is not set: a query needs a document'),
    ({'data.scores_column': 'scores', 'data.negative_column': ''},
     'without data.negative_column each query has one: give both'),
    ({'data.query_expansion': 'all'}, 'data.query_expansion'),
    ({'data.skipped_words': (1,)}, r'data.skipped_words=\(1,\) must be words')])
def test_mistakes(tmp_path, fields, message):
  with pytest.raises(UserError, match=message):
    run.run(config_of(tmp_path, **fields), str(tmp_path / 'run'))


def test_retrieval_ranks_by_max_sim(tmp_path):
  torch_bert.make('BertModel', tmp_path / 'bert')
  folder = test_late_folders.make(tmp_path / 'late', str(tmp_path / 'bert'), 128)
  data, rng = tmp_path / 'data', np.random.default_rng(0)
  (data / 'qrels').mkdir(parents=True)
  texts = [' '.join(f'w{i}' for i in rng.integers(0, 900, rng.integers(1, 40))) for _ in range(60)]

  def lines(rows):
    return ''.join(json.dumps({'_id': name, 'text': text}) + '\n' for name, text in rows)

  queries = [(f'q{i}', ' '.join(texts[i].split()[:3])) for i in range(5)]
  (data / 'queries.jsonl').write_text(lines(queries))
  (data / 'corpus.jsonl').write_text(lines([(f'd{i}', x) for i, x in enumerate(texts)]))
  (data / 'qrels/test.tsv').write_text('query-id\tcorpus-id\tscore\n' + ''.join(
      f'q{i}\td{i}\t1\n' for i in range(5)))
  bert = bert_jax.from_pretrained(folder)
  path = epath.Path(tmp_path / 'report.json')
  report = retrieval.evaluate(bert, str(data), path)
  theirs = MultiVectorEncoder(folder, device='cpu')
  scores = theirs.similarity(theirs.encode_query([text for _, text in queries]),
                             theirs.encode_document(texts)).numpy()
  hits = report.further[retrieval.RUN].splitlines()
  assert len(hits) == 5 * 60
  for i in range(5):
    mine = [line.split() for line in hits if line.startswith(f'q{i} ')]
    assert [name for _, _, name, *_ in mine] == [f'd{j}' for j in np.argsort(-scores[i])]
    np.testing.assert_allclose([float(x[4]) for x in mine], np.sort(scores[i])[::-1], rtol=1e-5)
  with pytest.raises(UserError, match='--precision has no effect here: a late-interaction model'):
    retrieval.evaluate(bert, str(data), path, precision='int8')
