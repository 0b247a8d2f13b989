"""Folders like the published ones, compared with the library of their files."""

import importlib
import json
import shutil

from etils import epath
import pytest
import tokenizers
import transformers
from transformers.utils import sentencepiece_model_pb2_new

from bert_jax.data.tokenizers import reader
from bert_jax.errors import UserError
from bert_jax.interop import tokenizer_checks
from tests import published, published_files

LATIN = 'abcdefghijklmnopqrstuvwxyz ABC 0123456789 .,;:!?-()[]<>/"\'`'


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  """All folders by their names."""
  root = tmp_path_factory.mktemp('folders')
  for name, folder in published.FOLDERS.items():
    folder.write(root / name)
    config = {'model_type': folder.model_type, 'vocab_size': published_files.ROWS}
    (root / name / 'config.json').write_text(json.dumps(config))
  return root


@pytest.fixture(scope='module', autouse=True)
def _protobuf():
  """The class in the package sentencepiece requires a newer protobuf than others allow."""
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(importlib.import_module('transformers.convert_slow_tokenizer'),
                    'import_protobuf', lambda *_: sentencepiece_model_pb2_new)
    yield


def _reference(folder):
  """A folder as its own library reads it: (text, [text]) -> (ids, offsets)."""
  if not (folder / 'tokenizer.json').exists() or folder.name in published.CHANGED:
    # A cased vocabulary without settings is cased, as in its authors' TensorFlow loader.
    cased = {'do_lower_case': False} if folder.name == 'clinicalbert' else {}
    library = transformers.AutoTokenizer.from_pretrained(str(folder), **cased).backend_tokenizer
  else:
    library = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  library.no_truncation()
  library.no_padding()

  def read(*texts):
    encoding = library.encode(*texts)
    return encoding.ids, encoding.offsets

  read.library = library
  return read


# SentencePiece itself is the reference for a spiece.model: see test_spiece.py.
BY_LIBRARY = [name for name in published.FOLDERS if name != 'albert']


def test_at_least_forty_folders_have_ten_different_rules(folders):
  rules = set()
  for name in published.FOLDERS:
    path = folders / name / 'tokenizer.json'
    if path.exists():
      content = json.loads(path.read_text())
      rules.add(json.dumps([content['normalizer'], content['pre_tokenizer']]))
  assert len(published.FOLDERS) >= 40 and len(rules) >= 10, len(rules)


@pytest.mark.parametrize('name', BY_LIBRARY)
def test_ids_and_offsets_equal_the_library(folders, name, tmp_path):
  folder = folders / name
  ours, read = reader.load(str(folder)), _reference(folder)
  texts = [*tokenizer_checks.hostile(ours), *published_files.TEXTS]
  assert len(texts) >= 160 and ours.vocab_size == published_files.ROWS
  assert tokenizer_checks.differences(ours, read, texts) == []
  # Text stays text in a corpus; a unigram model alone would find "<s>" among its pieces.
  read.library.encode_special_tokens = True
  corpus, roles = ours.parsing(False), ('<s>', '</s>', '<pad>', '<unk>', '<mask>', '[CLS]', '[SEP]',
                                        '[PAD]', '[UNK]', '[MASK]')
  plain = [x for x in texts
           if not any(m.lower() in x.lower() for m in (*ours.markers, *roles))]
  assert len(plain) > 80
  for text in plain:
    expected = read.library.encode(text, add_special_tokens=False).ids
    assert corpus.encode_batch([text]) == [expected], text
  for text in roles:
    assert not {ours.cls_id, ours.sep_id, ours.pad_id, ours.mask_id} & {
        *corpus.encode_batch([f'a {text}b'])[0]}
  # The export equals the folder.
  shutil.copytree(folder, tmp_path / 'copy')
  for path in (tmp_path / 'copy').iterdir():
    path.unlink()
  ours.save(epath.Path(tmp_path / 'copy'))
  exported, again = _reference(tmp_path / 'copy'), reader.load(str(tmp_path / 'copy'))
  assert tokenizer_checks.differences(ours, exported, texts) == []
  assert again.vocab == ours.vocab and again.encode_batch(texts) == ours.encode_batch(texts)
  assert again.parses_special == ours.parses_special and again.serialized() == ours.serialized()


@pytest.mark.parametrize('name', published.REFUSED)
def test_unsupported_tokenizers_are_refused_by_name(tmp_path, name):
  published.REFUSED[name].write(tmp_path / name)
  with pytest.raises(UserError, match=name):
    reader.load(str(tmp_path / name))
