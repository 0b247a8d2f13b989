"""ONNX: every member and task in onnxruntime, sizes, nodes, and mistakes."""

import collections
import json

from etils import epath
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

from bert_jax.data.tokenizers import older
from bert_jax.errors import UserError
from bert_jax.interop import (
  conversion,
  cross_layout,
  layout,
  sparse_layout,
)
from bert_jax.interop.onnx_export import folder, functions, trace
from bert_jax.interop.pretrained import Pretrained, head_groups
from bert_jax.interop.sentence_layout import Module, SentenceLayout
from bert_jax.model import architectures
from tests import made_tasks

SIZES = dict(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, max_positions=40)
OWN = {'albert': dict(embedding_size=16), 'electra': dict(embedding_size=16),
       'deberta-v2': dict(conv_kernel_size=3, position_buckets=8),
       'roberta': dict(type_vocab_size=1), 'xlm-roberta': dict(type_vocab_size=1),
       'modernbert': dict(num_layers=4, local_window=8, conv_reach=1)}
DENSE = Module('Dense', {'in_features': 64, 'out_features': 24,
                         'activation_function': 'torch.nn.modules.activation.Tanh'}, {})
LABELS = {'sequence_classification': ('no', 'yes', 'maybe'), 'question_answering': ('start', 'end'),
          'token_classification': ('B-PER', 'I-PER', 'O', 'B-LOC'), 'multiple_choice': ('0',)}
KINDS = ('encoder', 'masked_lm', 'embedder', 'sparse', 'reranker', *LABELS)


def make(member: str, kind: str, **sizes) -> Pretrained:
  """A random model; all parameters are away from 0 and 1."""
  tokenizer, rng = made_tasks.tokenizer(), np.random.default_rng(0)
  if member in ('mpnet', 'roberta', 'xlm-roberta', 'camembert'):  # their [PAD] has the id 1
    pad, unknown, *others = tokenizer.vocab
    tokenizer = older.wordpiece([unknown, pad, *others])
  config = architectures.ALL[member].config(
      architecture=member, vocab_size=tokenizer.vocab_size,
      **{**SIZES, **OWN.get(member, {}), **sizes})
  task = {'reranker': 'sequence_classification'}.get(kind, kind if kind in LABELS else '')
  labels = ('score',) if kind == 'reranker' else LABELS.get(kind, ())
  pooler = () if config.pooler_is_shared or member in ('distilbert', 'electra') else ('pooler',)
  groups = {'encoder': pooler, 'embedder': (), 'masked_lm': ('mlm',), 'sparse': ('mlm',),
            'next_sentence': (*pooler, 'nsp')}.get(kind) if not task else head_groups(config, task)
  if config.pooler_is_shared and not task:
    groups = {*groups, 'pooler'}
  abstract = nn.unbox(layout.abstract_params(config, groups, len(labels), task))
  params = jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), abstract)
  dense = DENSE._replace(tensors={
      'linear.weight': rng.normal(0, 0.2, (24, 64)).astype(np.float32),
      'linear.bias': rng.normal(0, 0.2, 24).astype(np.float32)})
  text_layout = {
      'embedder': SentenceLayout(('mean', 'max'), modules=(dense, Module('Normalize', {}, {})),
                                 max_len=40),
      'sparse': sparse_layout.SparseLayout(max_len=40),
      'reranker': cross_layout.CrossLayout(cross_layout.SIGMOID, max_len=40)}.get(kind)
  problem = 'single_label' if len(labels) > 1 and task == 'sequence_classification' else ''
  return Pretrained(config, params, tokenizer, task, labels, problem, text_layout=text_layout)


CELLS = [(member, kind) for member in architectures.ALL for kind in KINDS]
QUICK = {*(('bert', kind) for kind in KINDS), ('modernbert', 'embedder'), ('deberta-v2', 'encoder'),
         ('mpnet', 'masked_lm'), ('albert', 'sequence_classification'), ('electra', 'encoder')}


def test_a_head_for_pairs_without_a_masked_lm(tmp_path):
  """BertForNextSentencePrediction: the file has the head's logits."""
  model = make('bert', 'next_sentence')
  folder.save(model, epath.Path(tmp_path))
  names = functions.function(model).outputs
  assert names == ('last_hidden_state', 'seq_relationship_logits')
  assert len([*folder.compare(model, epath.Path(tmp_path))]) >= len(names)
  session = folder.session(epath.Path(tmp_path) / 'onnx/model.onnx')
  ids = np.array([[2, 7, 3]])
  tokens = {'input_ids': ids, 'token_type_ids': ids * 0, 'attention_mask': ids * 0 + 1}
  hidden, logits = session.run(names, tokens)
  params = model.params['params']
  pooled = np.tanh(hidden[:, 0] @ params['bert']['pooler']['kernel']
                   + params['bert']['pooler']['bias'])
  np.testing.assert_allclose(
      logits, pooled @ params['nsp']['kernel'] + params['nsp']['bias'], atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize('member, kind', [
    pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow) for cell in CELLS])
def test_every_member_and_task(member, kind, tmp_path):
  model = folder.exported(make(member, kind))
  folder.save(model, epath.Path(tmp_path))
  compared = [line for name, line in folder.compare(model, epath.Path(tmp_path))
              if name == 'outputs']
  assert [line.partition(':')[0] for line in compared] == [
      *functions.function(model).outputs]
  onnx.checker.check_model(str(tmp_path / 'onnx/model.onnx'), full_check=True)
  assert (tmp_path / 'tokenizer_config.json').exists()
  assert json.loads((tmp_path / 'config.json').read_text())['model_type'] == member


def test_verification_refuses_another_model(tmp_path):
  model = make('bert', 'encoder')
  folder.save(model, epath.Path(tmp_path))
  model.params['params']['bert']['layers']['feed_forward']['up']['bias'][1, 3] += 0.1
  with pytest.raises(UserError, match='last_hidden_state differ by'):
    list(folder.compare(model, epath.Path(tmp_path)))


def test_the_graph_of_an_embedder_gives_our_vectors(tmp_path):
  """Pooling, dense layer and normalization of the graph equal those of the host."""
  model = make('bert', 'embedder')
  folder.save(model, epath.Path(tmp_path))
  ids = np.array([[2, 7, 9, 11, 3], [2, 8, 3, 0, 0]])
  mask = (ids > 0).astype(np.int64)
  hidden, vectors = folder.session(tmp_path / 'onnx/model.onnx').run(None, {
      'input_ids': ids, 'token_type_ids': 0 * ids, 'attention_mask': mask})
  rows = [hidden[0], hidden[1, :2 + 1]]
  pooled = np.stack([np.concatenate([x.mean(0), x.max(0)]) for x in rows])
  np.testing.assert_allclose(vectors, model.text_layout.finished(pooled), atol=2e-6)
  np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_the_graph_has_nodes_that_runtimes_fuse_and_quantize(tmp_path):
  folder.save(make('bert', 'masked_lm'), epath.Path(tmp_path))
  graph = onnx.load(str(tmp_path / 'onnx/model.onnx')).graph
  kinds = collections.Counter(node.op_type for node in graph.node)
  assert (kinds['LayerNormalization'], kinds['Softmax'], kinds['Erf']) == (2 * 2 + 2, 2, 3)
  weights = {x.name for x in graph.initializer}
  constant = sum(node.op_type == 'MatMul' and node.input[1] in weights for node in graph.node)
  assert constant == 2 * 4 + 1  # qkv, out, up, down of each layer, and one of the head
  # The table of the embeddings is stored once.
  large = [x for x in graph.initializer if list(x.dims) == [128, 32]]
  assert len(large) == 1
  axes = [[d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim]
          for x in (*graph.input, *graph.output)]
  assert axes == [['batch_size', 'sequence_length']] * 3 + [
      ['batch_size', 'sequence_length', made_tasks.tokenizer().vocab_size]]


def test_a_converted_function_equals_jax():
  """Sizes that are computed, constants that are folded, and broadcasts."""

  def function(ids):
    rows, length = ids.shape
    x = jnp.arange(length)[None] * ids + jnp.arange(3).sum()
    y = jnp.pad(x, ((0, 0), (1, 1)))[:, ::-1].reshape(rows * (length + 2))[1:]
    return (jnp.cumsum(y).astype(jnp.float32),)

  graph = trace.convert(function, {'ids': 'b, l'}, ('y',), longest=9, opset=18)
  import onnxruntime
  session = onnxruntime.InferenceSession(graph.SerializeToString())
  for shape in ((1, 1), (2, 5), (3, 9)):
    ids = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(session.run(None, {'ids': ids})[0],
                                  function(ids.astype(np.int32))[0])
  with pytest.raises(NotImplementedError, match='no node of ONNX for sort'):
    trace.convert(lambda x: (jnp.sort(x).astype(jnp.float32),), {'ids': 'b, l'}, ('y',),
                       longest=9, opset=18)


def test_mistakes(tmp_path, monkeypatch):
  source, out = made_tasks.model(tmp_path / 'model'), str(tmp_path / 'out')
  for opset, message in ((17, r'--opset=17 must lie in \[18'), (99, '--opset=99 must lie in')):
    with pytest.raises(UserError, match=message):
      conversion.convert(source, out, 'onnx', opset=opset)
  with pytest.raises(UserError, match='--opset has no effect here'):
    conversion.convert(source, out, 'huggingface', opset=18)
  monkeypatch.setattr(folder.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match='needs onnx, which is not installed: pip install onnx'):
    conversion.convert(source, out, 'onnx')
  assert not (tmp_path / 'out').exists()


def test_the_command_writes_a_folder(tmp_path):
  source = made_tasks.model(tmp_path / 'model')
  conversion.convert(source, str(tmp_path / 'out'), 'onnx')
  names = {str(path.relative_to(tmp_path / 'out')) for path in (tmp_path / 'out').rglob('*')}
  assert names >= {'config.json', 'onnx/model.onnx', 'vocab.txt', 'README.md'}
  assert 'model.safetensors' not in names
