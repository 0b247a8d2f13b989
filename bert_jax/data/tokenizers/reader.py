"""Reads a published tokenizer so that it gives the ids that its publisher meant.

A tokenizer.json has priority: the package `tokenizers` runs it. Without this file, the
older files are read, as in transformers' AutoTokenizer. If bert_jax cannot run a
tokenizer, a UserError names it.
"""

import math
from typing import Any

from etils import epath

from bert_jax.data.tokenizers import base, library, library_checks, older, spiece
from bert_jax.errors import require
from bert_jax.runtime import storage

_JSON = 'tokenizer.json'
_OLDER = {
    'vocab.txt': None,
    spiece.FILE: None,
    'sentencepiece.bpe.model': older.read_fairseq,
    'spm.model': older.read_deberta,
    'vocab.json': older.read_bpe,
}
# Tokenizer classes of transformers that read these files; each also has a form "...Fast".
_CLASSES = ('Bert', 'DistilBert', 'Electra', 'MPNet', 'Roberta', 'XLMRoberta',
            'Camembert', 'Albert', 'DebertaV2')
# For these classes (as `Folder.kind`), the _FLAGS in CONFIG override a tokenizer.json.
_REPLACE_FLAGS = ('bert', 'distilbert', 'electra', 'mpnet', 'layoutlm', 'mobilebert',
                  'squeezebert', 'funnel', 'splinter', 'lxmert')
# {flag of CONFIG: (setting of BERT's normalizer, default)}.
_FLAGS = {'do_lower_case': ('lowercase', True), 'strip_accents': ('strip_accents', None),
          'tokenize_chinese_chars': ('handle_chinese_chars', True)}
# Classes (as `Folder.kind`) that give the model no segment ids.
_WITHOUT_SEGMENTS = ('distilbert', 'mpnet', 'roberta', 'xlmroberta', 'camembert')
# Programs that split a text into words before the vocabulary is looked up.
_WORD_SPLITTERS = {'mecab': 'MeCab', 'sudachi': 'Sudachi', 'jumanpp': 'Juman++'}
_SHORTEST = 8  # the smallest plausible model_max_length


def longest_input(directory: epath.Path) -> float:
  """The number of tokens to which transformers cuts an input; inf if CONFIG has none.

  Raises:
    UserError: `model_max_length` is not a number, or is too small for a text.
  """
  path = directory / base.CONFIG
  longest = storage.read_json_if_any(path).get('model_max_length')
  if longest is None:
    return math.inf
  require(isinstance(longest, int | float) and longest >= _SHORTEST,
          f'{path} has model_max_length={longest!r}: it must be a number, at least '
          f'{_SHORTEST}')
  return longest


def check_cut(directory: epath.Path):
  """Raises UserError if transformers cuts a long text at its start, not at its end."""
  name = f'{base.CONFIG}: truncation_side'
  side = storage.read_json_if_any(directory / base.CONFIG).get('truncation_side')
  # tokenizer.json decides only if the config does not have this field.
  if side is None:
    cut = storage.read_json_if_any(directory / _JSON).get('truncation')
    name = f'{_JSON}: truncation.direction'
    side = cut.get('direction') if isinstance(cut, dict) else None
  require(str(side).lower() != 'left',
          f'{directory}/{name}={side!r}: bert_jax cuts a long text at its end, not at its '
          "start: if your texts are short, change the field to 'right'")


def gives_segments(directory: epath.Path) -> bool:
  """Returns False if transformers gives both texts of a pair segment id 0.

  transformers 4 and 5 differ for the class PreTrainedTokenizerFast. This follows version
  4, from which most folders come: there the class gives segment ids.
  """
  folder = older.read_folder(directory)
  names = folder.settings.get('model_input_names')
  if names is None:
    return folder.is_generic or folder.kind not in _WITHOUT_SEGMENTS
  return 'token_type_ids' in names


def load(path: str | epath.Path, lowercase: bool | None = None) -> base.Tokenizer:
  """Loads a folder, or one of its files: tokenizer.json, vocab.txt, vocab.json, *.model.

  Args:
    path: a vocab.json needs its merges.txt in the same folder. A config.json in that
      folder gives the rows of the embedding table, which may be more than the entries.
    lowercase: for WordPiece. False = text keeps its capitals whatever the files say.
      Otherwise the files decide. If they do not say, True = lower-case, and None =
      lower-case unless the vocabulary is cased.

  Raises:
    UserError: the vocabulary is missing, bert_jax cannot run its tokenizer, or it is
      cased and `lowercase` is True.
  """
  storage.check('data.vocab', str(path))
  path = epath.Path(path)
  directory = path if path.is_dir() else path.parent
  is_whole = path.is_dir() or path.name == _JSON
  folder = older.read_folder(directory) if is_whole else older.Folder({}, '', {})
  if path.is_dir():
    path = _tokenizer_file(path, folder)
  tokenizer = _read(path, folder, lowercase)
  splits_special = folder.settings.get(base.PARSES)
  # Models with markers, such as "[H]", expect them in texts unless the config forbids it.
  if splits_special is False or (tokenizer.markers and not splits_special):
    tokenizer = tokenizer.parsing(True)
  rows = storage.read_json_if_any(directory / 'config.json').get(
      'vocab_size', folder.settings.get(base.ROWS))
  return tokenizer.padded(rows) if isinstance(rows, int) else tokenizer


def _tokenizer_file(directory: epath.Path, folder: older.Folder) -> epath.Path:
  """The tokenizer file of a folder; raises UserError if bert_jax can run none."""
  name = folder.title
  splitter = str(folder.settings.get('word_tokenizer_type', ''))
  require(splitter not in _WORD_SPLITTERS and folder.kind not in ('roformer', 'jieba'),
          f'{directory}: its {name} splits texts with '
          f'{_WORD_SPLITTERS.get(splitter, "jieba")}, which bert_jax does not run: use a '
          'model with another tokenizer')
  # If bert_jax saved a SentencePiece model, its tokenizer.json is only an approximation.
  is_ours = ('keep_accents' in folder.settings
             and folder.settings.get('tokenizer_class') == spiece.SAVED_AS)
  if is_ours and (directory / spiece.FILE).exists():
    return directory / spiece.FILE
  if (directory / _JSON).exists():
    return directory / _JSON
  # ModernBERT has no tokenizer class: `title` is its model_type.
  known = {'', 'modernbert', *map(str.lower, _CLASSES)}
  require(folder.kind in known and not folder.settings.get('auto_map'),
          f'{directory}: without a tokenizer.json its tokenizer is the Python class of '
          f'{name}, which bert_jax does not run: known are {", ".join(_CLASSES)}')
  path = next((directory / x for x in _OLDER if (directory / x).exists()), None)
  require(path,
          f'{directory} holds no vocabulary: none of {", ".join((_JSON, *_OLDER))}')
  return path


def _with_capitals(normalizer: Any) -> Any:
  """Returns a normalizer that keeps capitals."""
  if not isinstance(normalizer, dict):
    return normalizer
  steps = normalizer.get('normalizers')
  if normalizer.get('type') == 'Sequence' and isinstance(steps, list):
    steps = [_with_capitals(x) for x in steps if x != {'type': 'Lowercase'}]
    return normalizer | {'normalizers': steps}
  is_berts = normalizer.get('type') == 'BertNormalizer'
  return normalizer | ({'lowercase': False} if is_berts else {})


def _with_flags(normalizer: Any, folder: older.Folder) -> Any:
  """Returns BERT's normalizer with the flags of the config, as AutoTokenizer does."""
  is_berts = isinstance(normalizer, dict) and normalizer.get('type') == 'BertNormalizer'
  if folder.is_generic or folder.kind not in _REPLACE_FLAGS or not is_berts:
    return normalizer
  # A flag that is missing has its default, even if tokenizer.json states something else.
  return normalizer | {
      ours: default if (value := folder.flag(name, default)) is None else value
      for name, (ours, default) in _FLAGS.items()}


def _with_other_files(settings: dict[str, Any], folder: older.Folder) -> dict[str, Any]:
  """Returns a tokenizer.json with the settings that AutoTokenizer reads in other files.

  They are the added tokens that only the other files have and, for the class of RoBERTa,
  `add_prefix_space`: the default of the class replaces the value in tokenizer.json.
  """
  with library_checks.as_user_error(f'{_JSON} is not a tokenizer'):
    listed = settings.get('added_tokens') or []
    known = {x['content'] for x in listed}
    more = [{'id': i, 'content': str(x), **{flag: getattr(x, flag) for flag in older.FLAGS}}
            for i, x in folder.added.items() if str(x) not in known]
  changed = {'added_tokens': [*listed, *more]} if more else {}
  if folder.kind == 'roberta' and not folder.is_generic:
    space = bool(folder.flag('add_prefix_space', False))
    changed |= {part: rule | {'add_prefix_space': space}
                for part in ('pre_tokenizer', 'post_processor')
                if isinstance(rule := settings.get(part), dict) and 'add_prefix_space' in rule}
  return settings | changed


def _read(path: epath.Path, folder: older.Folder,
          lowercase: bool | None) -> base.Tokenizer:
  if path.suffix == '.model' and not _OLDER.get(path.name):
    return spiece.load(path)
  if _OLDER.get(path.name):
    return _OLDER[path.name](path, folder)
  if path.suffix != '.json':
    return older.read_wordpiece(path, folder, lowercase)
  settings = storage.read_json(path)
  if 'normalizer' in settings:  # a new key would change the digest
    settings['normalizer'] = _with_flags(settings['normalizer'], folder)
  if lowercase is False:
    settings['normalizer'] = _with_capitals(settings.get('normalizer'))
  return library.LibraryTokenizer(_with_other_files(settings, folder), path, folder.named,
                                  folder.markers)
