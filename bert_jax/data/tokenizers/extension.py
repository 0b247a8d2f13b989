"""Extends a vocabulary with words, and reads word vectors for its entries."""

from collections.abc import Iterator, Mapping

from etils import epath
import numpy as np

from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.data.tokenizers.library import LibraryTokenizer
from bert_jax.errors import UserError, require


def _read_lines(path: str, field: str) -> Iterator[str]:
  number = 0
  try:
    with epath.Path(path).open('rb') as file:
      # A binary file splits only at \n. str.splitlines would split inside some words.
      for line in file:
        number += 1
        yield line.decode('utf-8').rstrip('\r\n')
  except OSError as e:
    raise UserError(f'{field}={path} cannot be read: {e.strerror or e}') from e
  except UnicodeDecodeError as e:
    raise UserError(f'{field}={path}: invalid UTF-8 in line {number}') from e


def add_words(tokenizer: Tokenizer, path: str) -> tuple[Tokenizer, list[str]]:
  """Appends words to a WordPiece vocabulary.

  Args:
    tokenizer: the tokenizer to extend.
    path: a text file with one word, such as "covid-19", on each line.

  Returns:
    (the extended tokenizer, notes for the user).

  Raises:
    UserError: the file does not exist or has no new word, a line has several words, or
      the tokenizer is not WordPiece.
  """
  require(isinstance(tokenizer, LibraryTokenizer) and tokenizer.can_extend,
          f'add_tokens={path} needs a WordPiece vocabulary, this is {tokenizer.kind}')
  known, words, skipped = set(tokenizer.vocab), [], 0
  for number, line in enumerate(_read_lines(path, 'add_tokens'), 1):
    # Texts are normalized before the lookup: an entry in another form would never match.
    word = tokenizer.normalized(line).strip()
    if not word:
      continue
    require(len(word.split()) == 1,
            f'{path}, line {number}: {line.strip()!r} has {len(word.split())} words: '
            'give one word on each line')
    require(len(word) <= 100,
            f'{path}, line {number}: a word of {len(word)} characters; WordPiece reads '
            'at most 100')
    if word in known:
      skipped += 1
    else:
      words.append(word)
      known.add(word)
  require(words, f'add_tokens={path} has no word that is not yet in the vocabulary')
  notes = [f'{len(words)} words added to the vocabulary']
  if skipped:
    notes.append(f'{skipped} lines of {path} were left out: the vocabulary or a line '
                 'before has the word')
  return tokenizer.extended(words), notes


def read_word_vectors(path: str,
                      entries: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
  """Reads the vectors of known words from word2vec's text format.

  Each line is "word v1 v2 ... vD"; the first line may be "count D".

  Args:
    path: the file.
    entries: the id of each requested word.

  Returns:
    ([n] ids, [n, D] float32 vectors).

  Raises:
    UserError: the file is malformed, or has none of the words.
  """
  vectors, width = {}, None
  for number, line in enumerate(_read_lines(path, 'embedding_init'), 1):
    # GloVe has words with spaces, such as ". . .".
    word, *values = (line.rstrip(' ').rsplit(' ', width) if width else
                     line.rstrip(' ').split(' '))
    # fastText and word2vec write "count D" first, GloVe does not.
    if number == 1 and len(values) == 1 and word.isdigit():
      continue
    width = width or len(values)
    require(len(values) == width,
            f'{path}, line {number}: {len(values)} numbers after the word, not {width}')
    # Only requested words are parsed: published files hold millions of others.
    if word in entries and entries[word] not in vectors:
      try:
        vector = np.array(values, np.float32)
      except ValueError as e:
        raise UserError(f'{path}, line {number}: no numbers after {word!r}: {e}') from e
      require(np.all(np.isfinite(vector)),
              f'{path}, line {number}: the vector of {word!r} is not finite')
      vectors[entries[word]] = vector
  require(vectors and width,
          f'embedding_init={path} has no vector for any entry of the vocabulary')
  return np.array(list(vectors)), np.stack(list(vectors.values()))
