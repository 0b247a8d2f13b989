"""Compares a tokenizer with the files of a folder, read by the tokenizers library.

Our own reader alone would only agree with itself.
"""

from collections.abc import Callable, Iterator, Sequence
import importlib.util
import random
import unicodedata

from etils import epath
import tokenizers

from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizers.base import SPACE, SPECIAL_TOKENS, Offsets, Tokenizer
from bert_jax.data.tokenizers.library import LibraryTokenizer
from bert_jax.data.tokenizers.spiece import SentencePiece
from bert_jax.errors import UserError, require

_Reader = Callable[..., Offsets]  # 1 or 2 texts -> (ids, offsets), with special tokens
_FOLDERS = ('', 'tokenizer', '0_Transformer')  # where the tokenizer of a model may be
# Strings on which tokenizers are known to differ.
HOSTILE = (
    '', ' ', 'Hello, world!', 'HELLO hello HeLLo', 'unaffable embeddings',
    "don't can't it's",
    'naïve café São Tomé Ångström', 'e\u0301 vs \u00e9', 'İstanbul ŞIK ıI', 'ΑΒΓ αβγ ς Σ',
    'Привет, мир', 'שלום עולם', 'مرحبا بالعالم', 'नमस्ते दुनिया', 'สวัสดีชาวโลก',
    '日本語とカタカナ',
    '中文字符 and English', '𠀀𠀁 rare', '안녕하세요 세계', '😀 👩\u200d👩\u200d👧 🇩🇪',
    'a\u200bb\u200dc\ufeffd', 'tab\tnew\nline\r\n', 'nul\x00bell\x07esc\x1b',
    'soft\u00adhyphen', 'non\u00a0breaking\u2003spaces\u3000wide', 'x' * 101, 'word' * 60,
    '3.14159 1,000,000 50% $9.99 €5', '@user #tag http://a.b/c?d=e&f=g', '…—–‘’“”«»',
    ' '.join(SPECIAL_TOKENS), '##ing ## #', 'ﬁ ﬂ ½ ² ™', '\ufffd', 'ǅ ß ẞ',
    '`code` ~tilde~ ^caret^ |pipe| <tag>', '。、！？（）', 'ａｂｃ１２３',
    "``quoted'' ''x`` ```y'''", '9,9 10, 1,2,3 5,,', 'unit\x1cseparator\x85next',
)


def hostile(tokenizer: Tokenizer) -> list[str]:
  """Returns about 200 strings on which two tokenizers are likely to differ.

  They are HOSTILE, variants of entries, and special and added tokens inside words.
  """
  rng = random.Random(0)
  # Without the marks of subwords, which are not a part of the text.
  words = [entry.strip('#\u0120' + SPACE) for entry in rng.sample(
      tokenizer.vocab, min(70, tokenizer.vocab_size))]
  strings = [*HOSTILE]
  for word, other in zip(words, words[1:]):
    strings += [
        rng.choice((f'{word} {other}', f'{word}{other}', f'{word},{other}', word.upper(),
                    f'  {word}  {other} ', unicodedata.normalize('NFD', word.title()))),
        f' {other.lower()}-{word}']
  # Libraries differ in the whitespace around special tokens, and in their case.
  for token in _tokens_of_texts(tokenizer)[:12]:
    strings += [f'a {token} b', f'a{token}b', f'{token}s', f'  {token}  {token}',
                token.upper(), f'{token}{token.lower()}']
  return list(dict.fromkeys(strings))


def _tokens_of_texts(tokenizer: Tokenizer) -> list[str]:
  """Returns the entries that are never split in a text: special and added tokens."""
  if isinstance(tokenizer, SentencePiece):
    return []
  added = tokenizer.library.get_added_tokens_decoder().values()
  return list(dict.fromkeys([*tokenizer.tokens([tokenizer.mask_id]), *map(str, added)]))


def _own_file(directory: epath.Path, source: Tokenizer) -> _Reader | None:
  """Reads the tokenizer.json of a folder with the library alone; None = no such file.

  Raises:
    UserError: its entries, scores or merges differ from `source`.
  """
  path = directory / 'tokenizer.json'
  if not path.exists():
    return None
  library = tokenizers.Tokenizer.from_file(str(path))
  if isinstance(source, LibraryTokenizer):
    # Strings cannot cover a hundred thousand entries.
    ours, theirs = (x.model.__getstate__() for x in (source.library, library))
    require(ours == theirs,
            f'{path} differs from the source in its entries, scores or merges')
  # A file may set truncation and padding, which are not a part of tokenization.
  library.no_truncation()
  library.no_padding()

  def read(*texts):
    encoding = library.encode(*texts)
    return encoding.ids, encoding.offsets

  return read


def _by_transformers(directory: epath.Path) -> _Reader | None:
  """Reads the tokenizer of a folder with transformers.

  Returns:
    None = transformers is not installed, or has no reader for an older file.

  Raises:
    UserError: transformers cannot read a tokenizer.json.
  """
  if (not (directory / 'config.json').exists()
      or not importlib.util.find_spec('transformers')):
    return None
  import transformers
  transformers.utils.logging.set_verbosity_error()
  # Older files need other packages. If one is missing, the error may be of any class.
  try:
    theirs = transformers.AutoTokenizer.from_pretrained(str(directory))
  except Exception as e:
    require(not (directory / 'tokenizer.json').exists(),
            f'{directory}: transformers cannot read its tokenizer: '
            f'{" ".join(str(e).split()):.200}')
    return None

  def read(*texts):
    encoding = theirs(*texts, return_offsets_mapping=theirs.is_fast)
    return encoding['input_ids'], encoding.get('offset_mapping')

  return read


def with_special_tokens(tokenizer: Tokenizer, *texts: str) -> Offsets:
  """Returns ids and offsets of one text or two; special tokens have offsets (0, 0)."""
  encoded = tokenizer.encode_with_offsets(texts)
  joined = inputs_lib.join(tokenizer, *(ids for ids, _ in encoded))
  special = tokenizer.around.one if len(texts) == 1 else tokenizer.around.two
  spans = [(0, 0)] * len(special[0])
  for (_, of_text), behind in zip(encoded, special[1:]):
    spans += [*of_text, *[(0, 0)] * len(behind)]
  return list(joined.ids), spans


def differences(tokenizer: Tokenizer, read: _Reader, texts: Sequence[str]) -> list[str]:
  """Returns a line for each text or pair that `read` encodes differently."""
  parsing, different = tokenizer.parsing(True), []
  # Some pairs too: the special tokens between two texts differ between architectures.
  for text in (*((text,) for text in texts), *zip(texts[::5], texts[1::5])):
    (ours, spans), (theirs, offsets) = with_special_tokens(parsing, *text), read(*text)
    if ours != list(theirs):
      different.append(f'{" + ".join(map(repr, text))}: {ours} and {list(theirs)}')
    elif offsets is not None and spans != [tuple(x) for x in offsets]:
      different.append(
          f'the offsets of {" + ".join(map(repr, text))}: {spans} and {offsets}')
  return different


def compare(source: Tokenizer, copy: Tokenizer,
            directory: epath.Path) -> Iterator[tuple[str, str]]:
  """Compares the tokenizer in a folder with `source`.

  Args:
    source: the tokenizer that the folder should have.
    copy: the tokenizer of the folder, read by bert_jax.
    directory: the folder.

  Yields:
    (name, result) lines for the user.

  Raises:
    UserError: the tokenizers differ.
  """
  texts = hostile(source)
  # With and without special tokens in texts, which are two code paths.
  for parses in (False, True):
    encoded = (x.parsing(parses).encode_batch(texts) for x in (source, copy))
    for text, ours, theirs in zip(texts, *encoded):
      require(ours == theirs, f'the tokenizers differ at {text!r}: {ours} and {theirs}')
  folder = next((directory / name for name in _FOLDERS
                 if (directory / name / 'tokenizer_config.json').exists()), directory)
  compared = []
  for name, read in (('tokenizer.json', _own_file(folder, source.parsing(True))),
                     ('transformers', _by_transformers(folder))):
    different = differences(source, read, texts) if read else []
    if different and isinstance(source, SentencePiece):
      # The published fast tokenizers of ALBERT differ from SentencePiece for digits
      # before a comma.
      yield 'note', (f'{name} differs in {len(different)} of {len(texts)} strings: '
                     f'{different[0]}')
    elif different:
      raise UserError(f'{folder}: {name} differs at {different[0]}')
    compared += [name] * bool(read)
  vocab = folder / 'vocab.txt'
  # Strings cannot cover all entries.
  if vocab.exists():
    entries = vocab.read_text(encoding='utf-8').removesuffix('\n').split('\n')
    first = next((i for i, (ours, theirs) in enumerate(zip(source.vocab, entries))
                  if ours != theirs), None)
    require(first is None,
            f'{vocab}: entry {first} is {entries[first or 0]!r}, not '
            f'{source.vocab[first or 0]!r}')
  yield 'tokenization', (f'{len(texts)} hostile strings, all equal'
                         + (''.join(f', as {name} reads the folder' for name in compared)
                            or ', read by bert_jax alone'))
