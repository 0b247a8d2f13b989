"""Members of the family equal transformers' PyTorch classes, and survive round trips."""

import functools
import json
import pathlib
import sys

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import torch
import transformers

from bert_jax.errors import UserError
from bert_jax.interop import families, huggingface, layout, verify
from bert_jax.model import architectures, heads
from bert_jax.tasks import sequence_classification
from tests.interop import torch_bert

_COMMON = {'vocab_size': 700, 'max_position_embeddings': 64}
_NO_DROPOUT = {'hidden_dropout_prob': 0.0, 'attention_probs_dropout_prob': 0.0}
# Two sizes each: (layers, width), and the options of the member.
FAMILIES = {
    'Albert': lambda n, d: transformers.AlbertConfig(
        **_COMMON, **_NO_DROPOUT, num_hidden_layers=n, hidden_size=d, num_attention_heads=4,
        intermediate_size=3 * d, embedding_size=d // 2, num_hidden_groups=n // 2, pad_token_id=0,
        hidden_act='gelu_new'),
    'Electra': lambda n, d: transformers.ElectraConfig(
        **_COMMON, **_NO_DROPOUT, num_hidden_layers=n, hidden_size=d, num_attention_heads=4,
        intermediate_size=3 * d, embedding_size=d if n == 2 else d // 2,
        hidden_act='gelu' if n == 2 else 'relu'),  # the head of the generator always has gelu
    'DistilBert': lambda n, d: transformers.DistilBertConfig(
        **_COMMON, n_layers=n, dim=d, n_heads=4, hidden_dim=3 * d, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, qa_dropout=0.0),
    # Like v3; and like v2, with its own projections for positions.
    'DebertaV2': lambda n, d: transformers.DebertaV2Config(
        **_COMMON, **_NO_DROPOUT, num_hidden_layers=n, hidden_size=d, num_attention_heads=4,
        intermediate_size=3 * d, relative_attention=True, position_biased_input=False,
        pos_att_type='p2c|c2p' if n == 2 else ['c2p', 'p2c'], share_att_key=n == 2,
        norm_rel_ebd='layer_norm' if n == 2 else 'none', position_buckets=16 if n == 2 else -1,
        initializer_range=0.1,  # so that positions affect the gradients
        conv_kernel_size=0 if n == 2 else 3, conv_act='gelu'),
    # One group of layers; and two groups, then two more layers.
    'ModernBert': lambda n, d: transformers.ModernBertConfig(
        **_COMMON, num_hidden_layers=4 if n == 2 else 9, global_attn_every_n_layers=3,
        hidden_size=d, num_attention_heads=4, intermediate_size=3 * d, local_attention=16,
        pad_token_id=0, cls_token_id=2, sep_token_id=3, bos_token_id=2, eos_token_id=3,
        hidden_activation='gelu' if n == 2 else 'silu')}  # the head always has gelu
SIZES = [(2, 64), (4, 128)]
HEADS = {'Albert': 'ForPreTraining', 'Electra': 'ForPreTraining', 'DistilBert': 'ForMaskedLM',
         'DebertaV2': 'ForMaskedLM', 'ModernBert': 'ForMaskedLM'}


def make(architecture: str, folder: pathlib.Path, layers=2, width=64, **fields):
  """A random model in evaluation mode, saved with a vocabulary; biases and norms away from 0."""
  title = next(name for name in FAMILIES if architecture.startswith(name))
  config = FAMILIES[title](layers, width)
  for name, value in fields.items():
    setattr(config, name, value)
  torch.manual_seed(0)
  model = getattr(transformers, architecture)(config).eval()
  with torch.no_grad():
    for name, tensor in model.named_parameters():
      if name.endswith('bias') or 'norm' in name.lower():
        tensor.add_(0.05 * torch.randn(tensor.shape))
  model.save_pretrained(str(folder))
  torch_bert.write_vocab(folder, 700)
  return model


def inputs(model, batch):
  results = torch_bert.inputs(batch)
  if model.config.model_type in ('distilbert', 'modernbert'):
    del results['token_type_ids']
  return results


def close(ours, theirs, tolerance=5e-5):
  worst = np.max(np.abs(np.asarray(ours) - theirs.detach().numpy()))
  assert worst <= tolerance, worst


def outputs(params, config, batch):
  """Hidden states, and the logits of the heads, by group."""
  tree = params['params']
  encoder = architectures.make_encoder(config)
  hidden = encoder.apply({'params': tree['bert']}, batch, method='encode')
  results, module = {}, heads.BertForPreTraining(config)
  if 'mlm_bias' in tree:
    results['mlm'] = module.apply(params, hidden, batch.positions,
                                  method='mlm_logits')[..., :config.vocab_size]
  if 'nsp' in tree:
    results['nsp'] = module.apply(params, hidden, np.zeros((len(batch.ids), 1), np.int32),
                                  method='nsp_logits')[:, 0]
  if 'rtd' in tree:
    results['rtd'] = heads.ReplacedTokenHead(config).apply({'params': tree['rtd']}, hidden)
  return hidden, results


def cross_entropy(logits, labels):
  return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0].mean()


@pytest.mark.medium
@pytest.mark.parametrize('layers, width', SIZES)
@pytest.mark.parametrize('title, kind', [
    *HEADS.items(), ('Electra', 'ForMaskedLM')])
def test_hidden_states_logits_losses_and_gradients(tmp_path, title, kind, layers, width):
  theirs = make(title + kind, tmp_path, layers, width)
  model = huggingface.load(epath.Path(tmp_path))
  batch = verify.sample(model, 3, 64)  # to the last position
  real = batch.text_ids > 0
  tensors = inputs(theirs, batch)
  results = theirs(**tensors, output_hidden_states=True)
  theirs_by_group = {
      'Albert': lambda: {'mlm': results.prediction_logits, 'nsp': results.sop_logits},
      'Electra': lambda: {'rtd' if kind == 'ForPreTraining' else 'mlm': results.logits},
      'DistilBert': lambda: {'mlm': results.logits},
      'DebertaV2': lambda: {'mlm': results.logits},
      'ModernBert': lambda: {'mlm': results.logits}}[title]()
  hidden, logits = jax.jit(outputs, static_argnums=1)(model.params, model.config, batch)
  close(np.asarray(hidden)[real], results.hidden_states[-1][torch.tensor(real)])
  assert logits.keys() == theirs_by_group.keys()
  for name, x in logits.items():
    where = slice(None) if name == 'nsp' else torch.tensor(real)
    close(np.asarray(x)[where if name == 'nsp' else real], theirs_by_group[name][where])

  labels = {'mlm': np.where(real & (batch.ids % 3 == 0), batch.ids, -100),
            'nsp': np.array([0, 1, 1]), 'rtd': (batch.ids % 5 == 0).astype(np.int64)}

  def loss(params):
    total, results = 0.0, outputs(params, model.config, batch)[1]
    if 'mlm' in results:
      predicted = labels['mlm'] >= 0
      total += cross_entropy(results['mlm'][predicted], labels['mlm'][predicted])
    if 'nsp' in results:
      total += cross_entropy(results['nsp'], labels['nsp'])
    if 'rtd' in results:
      x, wrong = results['rtd'][real], labels['rtd'][real]
      total += jnp.mean(jnp.logaddexp(0, x) - x * wrong)
    return total

  named = {'AlbertForPreTraining': ('mlm', 'nsp'), 'ElectraForPreTraining': ('rtd',)}.get(
      title + kind, ('mlm',))
  words = {'nsp': 'sentence_order_label'}
  expected = theirs(**tensors, **{words.get(n, 'labels'): torch.tensor(labels[n], dtype=torch.long)
                                for n in named}).loss
  ours, gradient = jax.jit(jax.value_and_grad(loss))(model.params)
  assert abs(float(ours) - expected.item()) < 2e-5
  expected.backward()
  family = families.ALL[model.config.architecture]
  theirs_by_name = {family.canonical(name): x.grad.numpy() for name, x in theirs.named_parameters()
            if x.grad is not None}
  gradients = layout.to_tensors(gradient, model.config)
  assert gradients.keys() == theirs_by_name.keys()
  whole = np.sqrt(sum(np.sum(np.square(x)) for x in theirs_by_name.values()))
  for name, x in theirs_by_name.items():
    limit = 1e-3 * max(np.linalg.norm(x), whole / 1000)
    assert np.linalg.norm(gradients[name] - x) <= limit, name


@pytest.mark.medium
@pytest.mark.parametrize('title, fields', [
    *((title, {}) for title in FAMILIES), ('ModernBert', {'classifier_pooling': 'mean'})])
def test_classifiers(tmp_path, title, fields):
  theirs = make(f'{title}ForSequenceClassification', tmp_path, num_labels=3, **fields)
  model = huggingface.load(epath.Path(tmp_path))
  assert model.task == 'sequence_classification' and len(model.labels) == 3
  batch = verify.sample(model, 3, 40)
  head = sequence_classification.BertForSequenceClassification(model.config, 3)
  logits = jax.jit(head.apply)(model.params, batch, np.zeros((3, 1), np.int32))
  close(np.asarray(logits)[:, 0], theirs(**inputs(theirs, batch)).logits)


@pytest.mark.medium
@pytest.mark.parametrize('architecture', [
    name for title in FAMILIES for family in families.ALL.values() if family.title == title
    for name in family.architectures])
def test_every_architecture_survives_a_round_trip(tmp_path, architecture):
  make(architecture, tmp_path / 'a')
  model = huggingface.load(epath.Path(tmp_path / 'a'))
  huggingface.save(model, epath.Path(tmp_path / 'b'))
  a, b = (load_file(str(tmp_path / d / 'model.safetensors')) for d in 'ab')
  assert a.keys() == b.keys()
  assert all(a[name].tobytes() == b[name].tobytes() for name in a)
  again, loading = getattr(transformers, architecture).from_pretrained(
      str(tmp_path / 'b'), output_loading_info=True)
  assert not loading['missing_keys'] and not loading['unexpected_keys']
  assert again.config.model_type == model.config.architecture
  results = dict(verify.compare(model, huggingface.load(epath.Path(tmp_path / 'b')),
                                epath.Path(tmp_path / 'b')))
  assert any('PyTorch' in what + value for what, value in results.items()), results


# Classes as people publish them, and the prefix of the encoder in their files.
UNKNOWN = {'Bert': ('BertForCL', 'bert.'), 'DistilBert': ('Retriever', 'distilbert.'),
           'Albert': ('AlbertForRanking', ''), 'Electra': ('RobertaForMaskedLM', ''),
           'DebertaV2': ('DebertaV2ForReward', 'deberta.'), 'ModernBert': ('ColBERT', 'model.')}


@pytest.mark.parametrize('title', UNKNOWN)
def test_an_unknown_class_is_read_as_its_encoder(tmp_path, capsys, title):
  name, prefix = UNKNOWN[title]
  folder, path = tmp_path / 'a', tmp_path / 'a/model.safetensors'
  theirs = (torch_bert if title == 'Bert' else sys.modules[__name__]).make(f'{title}Model', folder)
  own = {'mlp.dense.weight': np.ones((3, 3), np.float32), 'mlp.dense.bias': np.ones(3, np.float32)}
  if prefix:  # then this is not the encoder's pooler
    own['pooler.dense.weight'] = np.ones((3, 3), np.float32)
  save_file({prefix + key: x for key, x in load_file(str(path)).items()} | own, str(path),
            metadata={'format': 'pt'})
  config = json.loads((folder / 'config.json').read_text()) | {'architectures': [name]}
  (folder / 'config.json').write_text(json.dumps(config))
  model = huggingface.load(epath.Path(folder))
  error = capsys.readouterr().err
  assert f'the architecture {name} is unknown: it is read as {title}Model, without ' in error
  assert ', '.join(sorted(own)) in error and error.count('bert_jax: note: ') == 1
  theirs = transformers.AutoModel.from_pretrained(str(folder)).eval()
  batch = verify.sample(model, 3, 24)
  expected = theirs(**inputs(theirs, batch)).last_hidden_state
  real = batch.text_ids > 0
  hidden, _ = jax.jit(outputs, static_argnums=1)(model.params, model.config, batch)
  close(np.asarray(hidden)[real], expected[torch.tensor(real)])
  assert model.task == '' and set(model.groups) == ({'pooler'} & set(model.groups))
  huggingface.save(model, epath.Path(tmp_path / 'b'))
  huggingface.load(epath.Path(tmp_path / 'b'))
  assert 'bert_jax' not in capsys.readouterr().err
  _, loading = transformers.AutoModel.from_pretrained(
      str(tmp_path / 'b'), output_loading_info=True)
  assert not any(loading.values()), loading


@pytest.mark.parametrize('window', [17, 1])
def test_attention_windows_of_any_size_equal_transformers(tmp_path, window):
  theirs = make('ModernBertModel', tmp_path / 'a', local_attention=window)
  model = huggingface.load(epath.Path(tmp_path / 'a'))
  batch = verify.sample(model, 3, 64)
  real = batch.text_ids > 0
  expected = theirs(**inputs(theirs, batch)).last_hidden_state[torch.tensor(real)]
  encoder, params = architectures.make_encoder(model.config), {
      'params': model.params['params']['bert']}
  encode, states = (jax.jit(functools.partial(encoder.apply, method=method))
                    for method in ('encode', 'states'))
  close(np.asarray(encode(params, batch))[real], expected)
  without_blocks = states(params, batch).hidden[-1]
  close(np.asarray(without_blocks)[real], expected)
  huggingface.save(model, epath.Path(tmp_path / 'b'))
  written = json.loads((tmp_path / 'b/config.json').read_text())
  assert written['local_attention'] == window


@pytest.mark.parametrize('name', families.ALL)
def test_missing_fields_have_the_defaults_of_transformers(name):
  family = families.ALL[name]
  known = transformers.CONFIG_MAPPING[name]()
  whole = known.to_dict()
  sizes = {theirs: getattr(known, theirs) for theirs, ours in family.fields.items()
           if ours in ('vocab_size', 'hidden_size', 'num_layers', 'num_heads', 'intermediate_size')}
  read = functools.partial(huggingface.config_from, path=epath.Path('config.json'), family=family)
  if name == 'deberta-v2':  # its defaults are an architecture that no checkpoint has
    for fields in (sizes, whole):
      with pytest.raises(UserError, match='relative_attention=False'):
        read(fields)
  else:
    assert read(sizes) == read(whole)


@pytest.mark.parametrize('title, fields, message', [
    ('Albert', {'inner_group_num': 2}, 'inner_group_num=2 is not what Albert has'),
    ('Albert', {'num_hidden_groups': 3}, 'not divisible by model.groups=3'),
    ('Electra', {'embedding_size': 32}, 'lacks tensors: embeddings.projection'),
    ('DistilBert', {'activation': 'mish'}, "activation='mish' is unknown"),
    ('DistilBert', {'dim': 32}, 'but its config needs'),
    ('ModernBert', {'layer_types': ['full_attention'] * 2 + ['sliding_attention'] * 2},
     'without a period'),
    ('ModernBert', {'local_attention': 2**33}, 'local_window is 8589934592: it can be at most'),
    ('ModernBert', {'hidden_size': 2**33}, 'hidden_size is 8589934592: it can be at most')])
def test_a_config_that_does_not_fit_is_refused(tmp_path, title, fields, message):
  make(f'{title}Model', tmp_path)
  model = transformers.AutoConfig.from_pretrained(str(tmp_path))
  for name, value in fields.items():
    setattr(model, name, value)
  model.save_pretrained(str(tmp_path))
  with pytest.raises(UserError, match=message):
    huggingface.load(epath.Path(tmp_path))
