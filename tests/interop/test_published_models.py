"""Models in folders like the published ones give PyTorch's vectors of texts; their exports."""

import functools
import json
import pathlib

from etils import epath
import numpy as np
import pytest
import torch
import transformers

import bert_jax
from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizers import reader
from bert_jax.errors import UserError
from bert_jax.interop import tokenizer_checks
from tests import published, published_files

_SIZES = {'num_hidden_layers': 1, 'hidden_size': 32, 'num_attention_heads': 2,
          'intermediate_size': 48, 'max_position_embeddings': 130,
          'vocab_size': published_files.ROWS}
_OPTIONS = {
    'modernbert': {'num_hidden_layers': 4, 'local_attention': 16, 'bos_token_id': 2,
                   'eos_token_id': 1, 'cls_token_id': 2, 'sep_token_id': 1},
    'albert': {'embedding_size': 16}, 'electra': {'embedding_size': 16},
    'deberta-v2': {'relative_attention': True, 'position_biased_input': False,
                   'pos_att_type': ['c2p', 'p2c'], 'norm_rel_ebd': 'layer_norm',
                   'share_att_key': True, 'position_buckets': 16},
    'distilbert': {'n_layers': 1, 'dim': 32, 'n_heads': 2, 'hidden_dim': 48}}
TEXTS = [published_files.TEXTS[0], 'Café [SEP] हिन्दी </s> 2,',
         ('A pair of texts.', '日本 <mask> [H] b')]


@functools.cache
def _model(model_type: str, pad_id: int):
  config = transformers.AutoConfig.for_model(
      model_type, **_SIZES | _OPTIONS.get(model_type, {}), pad_token_id=pad_id)
  torch.manual_seed(0)
  return transformers.AutoModel.from_config(config).eval()


def _write(name: str, folder: pathlib.Path):
  """Writes a folder with a random model, and returns the PyTorch model."""
  published.FOLDERS[name].write(folder)
  model_type, pad_id = published.FOLDERS[name].model_type, reader.load(str(folder)).pad_id
  theirs = _model(model_type, pad_id)
  theirs.save_pretrained(str(folder))
  return theirs


@pytest.mark.medium
@pytest.mark.parametrize('name', published.FOLDERS)
def test_vectors_equal_pytorch(tmp_path, name):
  theirs = _write(name, tmp_path)
  bert = bert_jax.from_pretrained(tmp_path)
  texts = [x for x in TEXTS if bert.tokenizer.parses_special or isinstance(x, tuple)
           or '[SEP]' not in x]
  hidden = bert.encode(texts).hidden
  for text, ours in zip(texts, hidden):
    parts = text if isinstance(text, tuple) else (text,)
    ids, _ = tokenizer_checks.with_special_tokens(bert.tokenizer, *parts)
    types = inputs_lib.join(bert.tokenizer, *bert.tokenizer.encode_batch(parts)).type_ids
    arguments = {'input_ids': torch.tensor([ids])}
    if getattr(theirs.config, 'type_vocab_size', 0) == 2:
      arguments['token_type_ids'] = torch.tensor([types])
    with torch.no_grad():
      expected = theirs(**arguments).last_hidden_state[0].numpy()
    np.testing.assert_allclose(ours[:len(ids)], expected, atol=2e-5)


def test_a_deberta_that_transformers_cannot_read_is_verified_alone(tmp_path, monkeypatch):
  def refuse(_):
    raise ImportError('protobuf is missing')
  monkeypatch.setattr(transformers.AutoTokenizer, 'from_pretrained', refuse)
  for name, holds in (('deberta-v2', True), ('bert-base-uncased', False)):
    folder = tmp_path / name
    published.FOLDERS[name].write(folder)
    (folder / 'config.json').write_text('{"model_type": "bert"}')
    source = reader.load(str(folder))
    if holds:
      lines = dict(tokenizer_checks.compare(source, source, epath.Path(folder)))
      assert lines['tokenization'].endswith('all equal, read by bert_jax alone')
    else:
      with pytest.raises(UserError, match='transformers cannot read .* protobuf is missing'):
        list(tokenizer_checks.compare(source, source, epath.Path(folder)))


def _flip(path: pathlib.Path, old: str, new: str):
  content = path.read_text()
  assert old in content, (path, old)
  path.write_text(content.replace(old, new, 1))


CHANGES = {
    'bert-base-uncased': [('tokenizer.json', '"lowercase": true', '"lowercase": false'),
                          ('tokenizer.json', '"fox"', '"fax"'),
                          ('tokenizer_config.json', '"do_lower_case": true',
                           '"do_lower_case": false'),
                          ('vocab.txt', '\nfox\n', '\nfax\n')],
    'graft': [('tokenizer.json', '"content": "graft", "single_word": false',
               '"content": "graft", "single_word": true')],
    'r-bert': [('tokenizer.json', '"[H]", "single_word"', '"[h]", "single_word"')],
    'modernbert': [('tokenizer.json', '"type": "NFC"', '"type": "NFD"'),
                   ('tokenizer.json', '"lstrip": true', '"lstrip": false')],
    'xlm-r': [('tokenizer.json', '"prepend_scheme": "always"', '"prepend_scheme": "never"'),
              ('tokenizer.json', '"type": "WhitespaceSplit"', '"type": "Whitespace"')],
    'roberta': [('tokenizer.json', '"add_prefix_space": false', '"add_prefix_space": true')],
    'nfc': [('tokenizer.json', '{"type": "Lowercase"}', '{"type": "StripAccents"}')],
}


@pytest.mark.parametrize('name, file, old, new', [
    (name, *change) for name, changes in CHANGES.items() for change in changes])
def test_verification_refuses_a_changed_file(tmp_path, name, file, old, new):
  _write(name, tmp_path / 'a')
  source = reader.load(str(tmp_path / 'a'))
  source.save(epath.Path(tmp_path / 'b'))
  config = json.loads((tmp_path / 'a/config.json').read_text())
  (tmp_path / 'b/config.json').write_text(json.dumps(config))
  lines = dict(tokenizer_checks.compare(source, reader.load(str(tmp_path / 'b')),
                                        epath.Path(tmp_path / 'b')))
  assert lines['tokenization'].endswith(
      'all equal, as tokenizer.json reads the folder, as transformers reads the folder')
  _flip(tmp_path / 'b' / file, old, new)
  with pytest.raises(UserError, match='differ|entry'):
    # Both models are the source, so only the folder's other readers can see the change.
    list(tokenizer_checks.compare(source, source, epath.Path(tmp_path / 'b')))
