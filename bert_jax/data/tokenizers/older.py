"""Folders without a tokenizer.json: vocab.txt, vocab.json with merges.txt, SentencePiece models.

Each becomes the object that transformers' AutoTokenizer makes of the same files.
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

from bert_jax.data.tokenizers import base, library, spiece
from bert_jax.data.tokenizers.library import LibraryTokenizer
from bert_jax.errors import UserError, require
from bert_jax.runtime import console, storage

# A cased vocabulary read in lower case would turn every capitalized word into pieces or [UNK].
_CASED_SHARE = 0.05  # of the words, from which a vocabulary is cased
_FLAGS = ('single_word', 'lstrip', 'rstrip', 'normalized', 'special')
_BEGIN_PIECES = ['<unk>', '<s>', '</s>']  # of every model of fairseq


class Folder(NamedTuple):
  """The settings of a tokenizer in the small files of its folder."""

  settings: Mapping[str, Any]  # tokenizer_config.json, and special_tokens_map.json over it
  title: str  # the tokenizer's class, "BertTokenizer", or the model_type; '' = nothing says it
  added: Mapping[int, tokenizers.AddedToken]  # by their ids

  @property
  def kind(self) -> str:
    """The class without its ending: bert, xlmroberta, debertav2."""
    return re.sub('(tokenizer)?(fast)?$', '', re.sub('[-_]', '', self.title.lower()))

  @property
  def named(self) -> dict[str, str]:
    """{'cls_token': '[CLS]', ...}."""
    names = [f'{role}_token' for role in (*base.ROLES, 'bos', 'eos')]
    return {x: str(token(self.settings[x])) for x in names if self.settings.get(x)}

  @property
  def markers(self) -> list[str]:
    """Special tokens that stand for something in a text, such as "[H]"."""
    extra = []
    for name in ('additional_special_tokens', 'extra_special_tokens'):
      tokens = self.settings.get(name) or []
      require(isinstance(tokens, list | dict), f'{base.CONFIG} has {name}={tokens!r}, which is no '
              'list of tokens')
      extra += tokens.values() if isinstance(tokens, dict) else tokens
    return [x for x in dict.fromkeys(str(token(x)) for x in extra)
            if x not in self.named.values() and not base.is_unused(x)
            and not x.endswith('NOTUSED')]

  def flag(self, name: str, default: bool | None) -> bool | None:
    """A setting that is true or false; raises UserError if it is neither."""
    value = self.settings.get(name, default)
    require(isinstance(value, bool | None),
            f'{base.CONFIG} has {name}={value!r}, which is neither true nor false')
    return value


def token(description: Any) -> tokenizers.AddedToken:
  """The added token that a string or a JSON object describes."""
  if isinstance(description, str):
    return tokenizers.AddedToken(description, normalized=False, special=True)
  with library.library_errors(f'{description!r} is no token'):
    return tokenizers.AddedToken(description['content'],
                                 **{x: description[x] for x in _FLAGS if x in description})


def read_folder(directory: epath.Path) -> Folder:
  """Reads the small files; raises UserError where one of them is malformed."""
  config, names, added, model = (storage.read_json_if_any(directory / name) for name in (
      base.CONFIG, 'special_tokens_map.json', 'added_tokens.json', 'config.json'))
  decoder = config.get('added_tokens_decoder')
  titles = [str(x or '') for x in (config.get('tokenizer_class'), model.get('tokenizer_class'),
                                   model.get('model_type'))]
  title = next((x for x in titles if x and not x.startswith('PreTrained')), '')
  folder = Folder(config if decoder else {**config, **names}, title, {})
  with library.library_errors(f'{directory} has added tokens that are malformed'):
    if decoder:
      tokens = {int(i): token(x) for i, x in decoder.items()}
    else:
      special = {*folder.named.values(), *folder.markers}
      tokens = {int(i): tokenizers.AddedToken(x, special=x in special, normalized=x not in special)
                for x, i in added.items()}
  return folder._replace(added=dict(sorted(tokens.items())))


def _complete(library_object: tokenizers.Tokenizer, folder: Folder, path: epath.Path,
              defaults: Mapping[str, str | tokenizers.AddedToken],
              around: Callable[[tuple[str, int], tuple[str, int]], Any]) -> LibraryTokenizer:
  """Adds the tokens of a folder to an object of the library, in the order of transformers.

  Args:
    defaults: the special token of each role where the folder names none.
    around: makes the post-processor of [CLS] and [SEP], each with its id.
  """
  roles = {name: folder.named.get(name, str(default)) for name, default in defaults.items()}
  for i, added in folder.added.items():
    added.special = added.special or str(added) in roles.values()
    library_object.add_tokens([added])
    require(library_object.token_to_id(str(added)) == i,
            f'{path}: {str(added)!r} is added as entry {i}, which would be entry '
            f'{library_object.token_to_id(str(added))}: there are gaps between its ids')
  known = {str(added) for added in folder.added.values()}
  flags = [default if folder.settings.get(name) in (None, str(default))
           else token(folder.settings[name]) for name, default in defaults.items()]
  library_object.add_special_tokens(
      [x for x in (*flags, *map(token, folder.markers)) if str(x) not in known])
  library_object.post_processor = around(*(
      (roles[x], library_object.token_to_id(roles[x])) for x in ('cls_token', 'sep_token')))
  return LibraryTokenizer(json.loads(library_object.to_str()), path, roles, folder.markers)


def _named(pad: str, unk: str, cls: str, sep: str, mask: str | tokenizers.AddedToken) -> dict:
  return dict(zip((f'{role}_token' for role in base.ROLES), (pad, unk, cls, sep, mask)))


_MASK_WITH_SPACE = tokenizers.AddedToken('<mask>', lstrip=True, special=True, normalized=False)
_FAIRSEQ = _named('<pad>', '<unk>', '<s>', '</s>', '<mask>')


# ---- WordPiece ----------------------------------------------------------------------------------


def is_cased(vocab: Sequence[str]) -> bool:
  """True if a vocabulary was made from text with capitals."""
  words = [x for x in vocab if x not in base.SPECIAL_TOKENS and x.isalpha()]
  return sum(x != x.lower() for x in words) > _CASED_SHARE * len(words)


def wordpiece(vocab: Sequence[str], lowercase: bool = True, strip_accents: bool | None = None,
              split_chinese: bool = True, folder: Folder = Folder({}, '', {}),
              path: Any = 'vocab.txt') -> LibraryTokenizer:
  """BERT's own: clean, split at spaces, punctuation and Han characters, longest match first.

  Equal to google-research/bert `tokenization.py`.

  Args:
    vocab: the entries in the order of their ids; of a double one the last counts.
    strip_accents: None = like `lowercase`, as published.
    split_chinese: each Han character is a word of its own.
    folder: tokens that are added, and names of the special ones.
    path: the origin of the entries, for messages.

  Raises:
    UserError: a special token is missing.
  """
  ids = {entry: i for i, entry in enumerate(vocab)}
  is_mpnet = folder.kind != 'bert' and all(x in ids for x in library.MPNET)
  special = _named(*library.MPNET[:-1], _MASK_WITH_SPACE) if is_mpnet else _named(
      *base.SPECIAL_TOKENS)
  names = [folder.named.get(name, str(default)) for name, default in special.items()]
  missing = [x for x in names if x not in ids and x not in map(str, folder.added.values())]
  require(not missing, f'{path}: the vocabulary has no {", ".join(missing)}: BERT needs '
          f'{", ".join(names)}, each on a line of its own')
  t = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=names[1]))
  t.normalizer = normalizers.BertNormalizer(
      lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=split_chinese)
  t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  t.decoder = tokenizers.decoders.WordPiece()

  def around(cls, sep):
    return (processors.RobertaProcessing(sep, cls, True, False) if is_mpnet
            else library.template(cls, sep))

  return _complete(t, folder, path, special, around)


def read_wordpiece(path: epath.Path, folder: Folder, lowercase: bool | None) -> LibraryTokenizer:
  """Reads a vocab.txt, one entry a line.

  Args:
    path: the file.
    folder: its settings, which count more than `lowercase`.
    lowercase: None = unless the vocabulary is cased.

  Raises:
    UserError: it is no vocabulary of BERT, or a cased one that is to be read in lower case.
  """
  try:
    # Split at \n alone: published vocabularies hold other characters that Python calls line ends.
    lines = path.read_bytes().decode('utf-8-sig').removesuffix('\n').split('\n')
  except OSError as e:
    raise UserError(f'data.vocab={str(path)!r} cannot be read: {e.strerror or e}') from e
  except UnicodeDecodeError as e:
    raise UserError(f'{path}: invalid UTF-8 at byte {e.start}: a vocabulary is a text file with '
                    'one entry a line') from e
  vocab = [line.removesuffix('\r') for line in lines]
  if double := len(vocab) - len(set(vocab)):
    (entry, _), = collections.Counter(vocab).most_common(1)
    console.note(f'{path}: {double} entries are there twice, such as {entry!r}: the last one '
                 'counts')
  says, cased = folder.flag('do_lower_case', None), is_cased(vocab)
  require(not (lowercase and says is None and cased), f'{path} is a cased vocabulary (its words '
          'have capitals) and the text would be lower-cased: set data.lowercase=False')
  if says and cased and lowercase is not False:
    console.note(f'{path} has words with capitals, and its {base.CONFIG} lower-cases all text')
  if lowercase is None or says is False:
    lowercase = not cased if says is None else says
  return wordpiece(vocab, lowercase, folder.flag('strip_accents', None),
                   folder.flag('tokenize_chinese_chars', True), folder, path)


# ---- byte-level BPE -----------------------------------------------------------------------------


def byte_level(model: models.BPE, *, lowercase: bool, prefix_space: bool) -> tokenizers.Tokenizer:
  """RoBERTa's tokenizer without special tokens."""
  t = tokenizers.Tokenizer(model)
  if lowercase:
    t.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
  t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
  t.decoder = tokenizers.decoders.ByteLevel()
  return t


def trained_byte_level(t: tokenizers.Tokenizer) -> LibraryTokenizer:
  """A trained tokenizer with RoBERTa's special tokens."""
  return _complete(t, Folder({}, '', {}), 'tokenizer.json',
                   _FAIRSEQ | {'mask_token': _MASK_WITH_SPACE}, lambda cls, sep:
                   processors.RobertaProcessing(sep, cls, True, True))


def read_bpe(path: epath.Path, folder: Folder) -> LibraryTokenizer:
  """Reads a vocab.json with its merges.txt."""
  merges = path.parent / 'merges.txt'
  require(merges.exists(), f'{path}: a vocab.json needs its merges.txt beside it')
  library.check_ids(storage.read_json(path), path)
  prefix_space = folder.flag('add_prefix_space', False)
  with library.library_errors(f'{path} and {merges} are no BPE'):
    t = byte_level(models.BPE.from_file(str(path), str(merges)), lowercase=False,
                   prefix_space=prefix_space)
  trims = folder.flag('trim_offsets', True)
  return _complete(t, folder, path, _FAIRSEQ, lambda cls, sep: processors.RobertaProcessing(
      sep, cls, trims, prefix_space))


# ---- SentencePiece ------------------------------------------------------------------------------


def _pieces(path: epath.Path) -> tuple[Any, list[tuple[str, float]], bytes]:
  """(the processor of a unigram model, its pieces with their scores, its normalization)."""
  content, processor = spiece.read_model(path)
  normalization = spiece.character_map(content)
  require(normalization is not None, f'{path} is no unigram model, as XLM-R, CamemBERT and '
          f'DeBERTa have it: name a model of another kind {spiece.FILE}')
  return processor, [(processor.id_to_piece(i), processor.get_score(i))
                     for i in range(processor.get_piece_size())], normalization


def read_fairseq(path: epath.Path, folder: Folder) -> LibraryTokenizer:
  """Reads the sentencepiece.bpe.model of XLM-R and CamemBERT, which have ids of their own.

  fairseq put its special tokens before the pieces, and <mask> after them (Conneau et al. 2020,
  https://arxiv.org/abs/1911.02116; Martin et al. 2020, https://arxiv.org/abs/1911.03894).
  """
  _, pieces, normalization = _pieces(path)
  require([piece for piece, _ in pieces[:3]] == _BEGIN_PIECES,
          f'{path} does not begin with {", ".join(_BEGIN_PIECES)}, as XLM-R and CamemBERT have it: '
          f'name a model of another kind {spiece.FILE}')
  special = _FAIRSEQ
  if folder.kind == 'camembert':
    # It met <s>, </s> and <unk> as pieces too; the first two it uses there.
    special = _FAIRSEQ | {'mask_token': _MASK_WITH_SPACE}
    first = [('<s>NOTUSED', 0.0), ('<pad>', 0.0), ('</s>NOTUSED', 0.0), ('<unk>', 0.0),
             ('<unk>NOTUSED', -100.0)]
    entries = [*first, *pieces[1:]]
  else:
    entries = [*((name, 0.0) for name in ('<s>', '<pad>', '</s>', '<unk>')), *pieces[3:]]
  t = tokenizers.Tokenizer(models.Unigram([*entries, ('<mask>', 0.0)], 3, False))
  if normalization:
    t.normalizer = normalizers.Precompiled(normalization)
  t.pre_tokenizer = pre_tokenizers.Sequence(
      [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(base.SPACE, 'always')])
  t.decoder = tokenizers.decoders.Metaspace(base.SPACE, 'always')
  return _complete(t, folder, path, special, functools.partial(
      library.template, pair='{0}:0 $A:0 {1}:0 {1}:0 $B:0 {1}:0'))


def read_deberta(path: epath.Path, folder: Folder) -> LibraryTokenizer:
  """Reads the spm.model of DeBERTa v2 and v3, which has no character map of its own."""
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
    # 0 is no logarithm of a frequency: the user has defined the piece.
    if is_special or (score == 0 and not processor.is_byte(i)):
      t.add_tokens([tokenizers.AddedToken(piece, normalized=False, special=is_special)])
  return _complete(t, folder, path, _named('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]'),
                   library.template)
