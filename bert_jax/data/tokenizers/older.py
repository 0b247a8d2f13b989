"""Tokenizers in folders without a tokenizer.json.

Reads vocab.txt, vocab.json with merges.txt, and SentencePiece models. Each gives the
same ids as transformers' AutoTokenizer with the same files.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import functools
import json
import re
from typing import Any, NamedTuple

from etils import epath
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from bert_jax.data.tokenizers import base, library, library_checks, spiece
from bert_jax.data.tokenizers.library import LibraryTokenizer
from bert_jax.errors import UserError, require
from bert_jax.runtime import console, storage

# A vocabulary is cased if more than this share of its words have capitals. Lower-cased
# text never matches these entries.
_CASED_SHARE = 0.05
FLAGS = ('single_word', 'lstrip', 'rstrip', 'normalized', 'special')
_UNUSED = re.compile(r'\[unused\d+\]|.*NOTUSED')  # placeholders that no text uses
_BEGIN_PIECES = ['<unk>', '<s>', '</s>']  # of every fairseq model
# ([CLS], its id), ([SEP], its id) -> the post-processor that writes them around texts.
_Around = Callable[[tuple[str, int], tuple[str, int]], Any]


class Folder(NamedTuple):
  """The settings of a tokenizer in the small files of its folder."""

  settings: Mapping[str, Any]  # tokenizer_config.json, updated by special_tokens_map.json
  title: str  # the tokenizer's class, "BertTokenizer", or the model_type; '' = unknown
  added: Mapping[int, tokenizers.AddedToken]  # by id
  is_generic: bool = False  # transformers uses its tokenizer.json unchanged

  @property
  def kind(self) -> str:
    """The tokenizer's class without its ending: bert, xlmroberta, debertav2."""
    return re.sub('(tokenizer)?(fast)?$', '', re.sub('[-_]', '', self.title.lower()))

  @property
  def named(self) -> dict[str, str]:
    """The special tokens that the files name: {'cls_token': '[CLS]', ...}."""
    names = [f'{role}_token' for role in (*base.ROLES, 'bos', 'eos')]
    return {x: str(token(self.settings[x])) for x in names if self.settings.get(x)}

  @property
  def markers(self) -> list[str]:
    """Additional special tokens, such as "[H]"; raises UserError for a malformed list."""
    extra = []
    # transformers has used both names, for lists and for dicts.
    for name in ('additional_special_tokens', 'extra_special_tokens'):
      tokens = self.settings.get(name) or []
      require(isinstance(tokens, list | dict),
              f'{base.CONFIG} has {name}={tokens!r}, which is not a list of tokens')
      extra += tokens.values() if isinstance(tokens, dict) else tokens
    return [x for x in dict.fromkeys(str(token(x)) for x in extra)
            if x not in self.named.values() and not _UNUSED.fullmatch(x)]

  def flag(self, name: str, default: bool | None) -> bool | None:
    """A boolean setting; raises UserError if it is neither true nor false."""
    value = self.settings.get(name, default)
    require(isinstance(value, bool | None),
            f'{base.CONFIG} has {name}={value!r}, which is neither true nor false')
    return value


def token(description: Any) -> tokenizers.AddedToken:
  """Makes the added token that a string or a JSON object describes."""
  if isinstance(description, str):
    return tokenizers.AddedToken(description, normalized=False, special=True)
  with library_checks.as_user_error(f'{description!r} is not a token'):
    return tokenizers.AddedToken(
        description['content'], **{x: description[x] for x in FLAGS if x in description})


def read_folder(directory: epath.Path) -> Folder:
  """Reads the small files of a folder; raises UserError if one of them is malformed."""
  config, names, added, model = (
      storage.read_json_if_any(directory / name) for name in (
          base.CONFIG, 'special_tokens_map.json', 'added_tokens.json', 'config.json'))
  titles = [str(x or '') for x in (config.get('tokenizer_class'),
                                   model.get('tokenizer_class'), model.get('model_type'))]
  # The base classes "PreTrainedTokenizer..." do not tell which tokenizer a folder has.
  title = next((x for x in titles if x and not x.startswith('PreTrained')), '')
  # Newer folders list added tokens, with their flags, in the config. transformers then
  # ignores the two older files.
  decoder = config.get('added_tokens_decoder')
  # transformers never uses the class that a ModernBERT's folder names.
  is_generic = ((titles[0] or titles[1]).startswith('PreTrained')
                or titles[2] == 'modernbert')
  folder = Folder(config if decoder else {**config, **names}, title, {}, is_generic)
  with library_checks.as_user_error(f'{directory} has added tokens that are malformed'):
    if decoder:
      tokens = {int(i): token(x) for i, x in decoder.items()}
    else:
      special = {*folder.named.values(), *folder.markers}
      tokens = {int(i): tokenizers.AddedToken(x, special=x in special,
                                              normalized=x not in special)
                for x, i in added.items()}
  return folder._replace(added=dict(sorted(tokens.items())))


def _complete(library_object: tokenizers.Tokenizer, folder: Folder, path: epath.Path,
              defaults: Mapping[str, str | tokenizers.AddedToken],
              around: _Around) -> LibraryTokenizer:
  """Adds the tokens of a folder to a library object, in the order of transformers.

  Args:
    library_object: changed in place.
    folder: its added tokens and its names of special tokens.
    path: the origin, for messages.
    defaults: the special token of each role that the folder does not name.
    around: makes the post-processor.
  """
  roles = {name: folder.named.get(name, str(default))
           for name, default in defaults.items()}
  for i, added in folder.added.items():
    added.special = added.special or str(added) in roles.values()
    library_object.add_tokens([added])
    require(library_object.token_to_id(str(added)) == i,
            f'{path}: {str(added)!r} is added as entry {i}, which would be entry '
            f'{library_object.token_to_id(str(added))}: there are gaps between its ids')
  known = {str(added) for added in folder.added.values()}
  # A default carries flags, such as lstrip of <mask>, that its plain name lacks.
  flags = [
      default if folder.settings.get(name) in (None, str(default))
      else token(folder.settings[name])
      for name, default in defaults.items()
  ]
  library_object.add_special_tokens(
      [x for x in (*flags, *map(token, folder.markers)) if str(x) not in known])
  library_object.post_processor = around(*(
      (roles[x], library_object.token_to_id(roles[x])) for x in ('cls_token', 'sep_token')
  ))
  return LibraryTokenizer(json.loads(library_object.to_str()), path, roles,
                          folder.markers)


def _named(*special: str | tokenizers.AddedToken) -> dict[str, Any]:
  """Maps names such as cls_token to `special`, which has the order of base.ROLES."""
  return dict(zip((f'{role}_token' for role in base.ROLES), special))


def _robertas(trim_offsets: bool, prefix_space: bool) -> _Around:
  """RoBERTa's post-processor: <s> A </s></s> B </s>."""
  return lambda cls, sep: processors.RobertaProcessing(sep, cls, trim_offsets,
                                                       prefix_space)


_MASK_WITH_SPACE = tokenizers.AddedToken('<mask>', lstrip=True, special=True,
                                         normalized=False)
_FAIRSEQ = _named('<pad>', '<unk>', '<s>', '</s>', '<mask>')


# ---- WordPiece ------------------------------------------------------------------------


def is_cased(vocab: Sequence[str]) -> bool:
  """True if a vocabulary comes from text with capitals."""
  words = [x for x in vocab if x not in base.SPECIAL_TOKENS and x.isalpha()]
  return sum(x != x.lower() for x in words) > _CASED_SHARE * len(words)


def wordpiece(
    vocab: Sequence[str],
    lowercase: bool = True,
    strip_accents: bool | None = None,
    split_chinese: bool = True,
    folder: Folder = Folder({}, '', {}),
    path: Any = 'vocab.txt',
) -> LibraryTokenizer:
  """BERT's tokenizer, equal to google-research/bert `tokenization.py`.

  It cleans a text, splits it at spaces, punctuation and Han characters, and cuts each
  word into the longest matching entries.

  Args:
    vocab: the entries in the order of their ids; the last one of duplicates counts.
    lowercase: lower-case the text.
    strip_accents: None = like `lowercase`, as published.
    split_chinese: each Han character is a separate word.
    folder: tokens to add, and the names of the special tokens.
    path: the origin of the entries, for messages.

  Raises:
    UserError: a special token is missing.
  """
  ids = {entry: i for i, entry in enumerate(vocab)}
  # MPNet has BERT's vocabulary with fairseq's special tokens.
  is_mpnet = folder.kind != 'bert' and all(x in ids for x in library.MPNET)
  special = _named(*library.MPNET[:-1], _MASK_WITH_SPACE) if is_mpnet else _named(
      *base.SPECIAL_TOKENS)
  names = [folder.named.get(name, str(default)) for name, default in special.items()]
  missing = [x for x in names
             if x not in ids and x not in map(str, folder.added.values())]
  require(not missing, f'{path}: the vocabulary has no {", ".join(missing)}: BERT needs '
          f'{", ".join(names)}, each on a separate line')
  t = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=names[1]))
  t.normalizer = normalizers.BertNormalizer(lowercase=lowercase,
                                            strip_accents=strip_accents,
                                            handle_chinese_chars=split_chinese)
  t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  t.decoder = tokenizers.decoders.WordPiece()
  return _complete(t, folder, path, special,
                   _robertas(True, False) if is_mpnet else library.template)


def read_wordpiece(path: epath.Path, folder: Folder,
                   lowercase: bool | None) -> LibraryTokenizer:
  """Reads a vocab.txt with one entry on each line.

  Args:
    path: the file.
    folder: its settings decide, unless `lowercase` is False.
    lowercase: False = keep capitals. True or None count if the folder has no setting:
      True = lower-case, None = lower-case unless the vocabulary is cased.

  Raises:
    UserError: the file is not a BERT vocabulary, or is cased and `lowercase` is True.
  """
  try:
    # Split at \n alone: published entries include characters that splitlines splits at.
    lines = path.read_bytes().decode('utf-8-sig').removesuffix('\n').split('\n')
  except OSError as e:
    raise UserError(f'data.vocab={str(path)!r} cannot be read: {e.strerror or e}') from e
  except UnicodeDecodeError as e:
    raise UserError(f'{path}: invalid UTF-8 at byte {e.start}: a vocabulary is a text '
                    'file with one entry on each line') from e
  vocab = [line.removesuffix('\r') for line in lines]
  if double := len(vocab) - len(set(vocab)):
    (entry, _), = collections.Counter(vocab).most_common(1)
    console.note(f'{path}: {double} lines repeat an entry, such as {entry!r}: the last one '
                 'counts')
  stated, cased = folder.flag('do_lower_case', None), is_cased(vocab)
  require(not (lowercase and stated is None and cased),
          f'{path} is a cased vocabulary (its words have capitals) and the text would be '
          'lower-cased: set data.lowercase=False')
  # The publisher's setting counts even if it looks wrong: the model was trained with it.
  if stated and cased and lowercase is not False:
    console.note(f'{path} has words with capitals, and its {base.CONFIG} lower-cases all '
                 'text')
  if lowercase is None or stated is False:
    lowercase = not cased if stated is None else stated
  return wordpiece(vocab, lowercase, folder.flag('strip_accents', None),
                   folder.flag('tokenize_chinese_chars', True), folder, path)


# ---- byte-level BPE --------------------------------------------------------------------


def byte_level(model: models.BPE, *, lowercase: bool,
               prefix_space: bool) -> tokenizers.Tokenizer:
  """The library object of RoBERTa's tokenizer, without special tokens."""
  t = tokenizers.Tokenizer(model)
  if lowercase:
    t.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
  t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
  t.decoder = tokenizers.decoders.ByteLevel()
  return t


def trained_byte_level(t: tokenizers.Tokenizer) -> LibraryTokenizer:
  """A trained tokenizer with RoBERTa's special tokens."""
  return _complete(t, Folder({}, '', {}), 'tokenizer.json',
                   _FAIRSEQ | {'mask_token': _MASK_WITH_SPACE}, _robertas(True, True))


def read_bpe(path: epath.Path, folder: Folder) -> LibraryTokenizer:
  """Reads the vocab.json and merges.txt of a byte-level BPE tokenizer, as in RoBERTa.

  Raises:
    UserError: a file is missing or malformed.
  """
  merges = path.parent / 'merges.txt'
  require(merges.exists(), f'{path}: a vocab.json needs its merges.txt next to it')
  library_checks.check_ids(storage.read_json(path), path)
  prefix_space = folder.flag('add_prefix_space', False)
  with library_checks.as_user_error(f'{path} and {merges} are not a BPE model'):
    t = byte_level(models.BPE.from_file(str(path), str(merges)), lowercase=False,
                   prefix_space=prefix_space)
  around = _robertas(folder.flag('trim_offsets', True), prefix_space)
  return _complete(t, folder, path, _FAIRSEQ, around)


# ---- SentencePiece ---------------------------------------------------------------------


def _pieces(path: epath.Path) -> tuple[Any, list[tuple[str, float]], bytes]:
  """Reads a unigram model.

  Returns:
    (its processor, its pieces with their scores, its normalization).
  """
  content, processor = spiece.read_model(path)
  normalization = spiece.character_map(content)
  require(normalization is not None,
          f'{path} is not a unigram model, which XLM-R, CamemBERT and DeBERTa have: name '
          f'a model of another kind {spiece.FILE}')
  pieces = [(processor.id_to_piece(i), processor.get_score(i))
            for i in range(processor.get_piece_size())]
  return processor, pieces, normalization


def read_fairseq(path: epath.Path, folder: Folder) -> LibraryTokenizer:
  """Reads the sentencepiece.bpe.model of XLM-R and CamemBERT.

  The ids differ from the model's: fairseq put its special tokens before the pieces, and
  <mask> after them (Conneau et al. 2020, https://arxiv.org/abs/1911.02116; Martin et al.
  2020, https://arxiv.org/abs/1911.03894).

  Raises:
    UserError: the file is not a unigram model of fairseq.
  """
  _, pieces, normalization = _pieces(path)
  require([piece for piece, _ in pieces[:3]] == _BEGIN_PIECES,
          f'{path} does not begin with {", ".join(_BEGIN_PIECES)}, as in XLM-R and '
          f'CamemBERT: name a model of another kind {spiece.FILE}')
  special = _FAIRSEQ
  if folder.kind == 'camembert':
    # CamemBERT has <s>, </s> and <unk> twice. It uses the <s> and </s> of the pieces.
    special = _FAIRSEQ | {'mask_token': _MASK_WITH_SPACE}
    entries = [('<s>NOTUSED', 0.0), ('<pad>', 0.0), ('</s>NOTUSED', 0.0), ('<unk>', 0.0),
               ('<unk>NOTUSED', -100.0), *pieces[1:]]
  else:
    entries = [('<s>', 0.0), ('<pad>', 0.0), ('</s>', 0.0), ('<unk>', 0.0), *pieces[3:]]
  t = tokenizers.Tokenizer(models.Unigram([*entries, ('<mask>', 0.0)], 3, False))
  if normalization:
    t.normalizer = normalizers.Precompiled(normalization)
  t.pre_tokenizer = pre_tokenizers.Sequence(
      [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(base.SPACE, 'always')])
  t.decoder = tokenizers.decoders.Metaspace(base.SPACE, 'always')
  return _complete(t, folder, path, special, functools.partial(
      library.template, pair='{0}:0 $A:0 {1}:0 {1}:0 $B:0 {1}:0'))


def read_deberta(path: epath.Path, folder: Folder) -> LibraryTokenizer:
  """Reads the spm.model of DeBERTa v2 and v3, which has no character map.

  Raises:
    UserError: the file is not a unigram model.
  """
  processor, pieces, _ = _pieces(path)
  t = tokenizers.Tokenizer(models.Unigram(pieces, processor.unk_id(), False))
  t.normalizer = normalizers.Sequence([
      *([normalizers.Lowercase()] if folder.flag('do_lower_case', False) else []),
      normalizers.Replace(tokenizers.Regex(r'\s{2,}|[\n\r\t]'), ' '), normalizers.NFC(),
      normalizers.Strip(left=False, right=True)])
  t.pre_tokenizer = pre_tokenizers.Sequence([
      *([pre_tokenizers.Punctuation()] if folder.flag('split_by_punct', False) else []),
      pre_tokenizers.Metaspace(base.SPACE, 'always')])
  t.decoder = tokenizers.decoders.Metaspace(base.SPACE, 'always')
  for i, (piece, score) in enumerate(pieces):
    is_special = processor.is_control(i) or processor.is_unknown(i)
    # A score of 0 is not a log frequency: the piece is user-defined.
    if is_special or (score == 0 and not processor.is_byte(i)):
      t.add_tokens([tokenizers.AddedToken(piece, normalized=False, special=is_special)])
  return _complete(t, folder, path, _named(*base.SPECIAL_TOKENS), library.template)
