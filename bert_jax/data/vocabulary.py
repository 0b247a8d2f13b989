"""Vocabularies: training from a corpus, extension by words, and vectors of their entries."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import io

from etils import epath
import numpy as np
from tokenizers import trainers

from bert_jax.data import bpe
from bert_jax.data.spiece import SentencePiece
from bert_jax.data.tokenizer import SPECIAL_TOKENS, Tokenizer, WordPiece
from bert_jax.errors import UserError, require, require_choice

KINDS = ('wordpiece', 'sentencepiece', 'bpe')


def _train_wordpiece(texts: Callable[[], Iterable[str]], vocab_size: int,
                     lowercase: bool) -> WordPiece:
  def entries(size, first):
    # Published vocabularies hold about 1,000 single characters; rarer ones become [UNK].
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=[*SPECIAL_TOKENS, *first], show_progress=False,
        limit_alphabet=max(vocab_size // 8, 100), min_frequency=2)
    untrained = WordPiece(SPECIAL_TOKENS, lowercase).library
    untrained.train_from_iterator(texts(), trainer)
    return sorted(set(untrained.get_vocab()) - set(SPECIAL_TOKENS))

  # The trainer numbers the pieces inside words in the order of a hash table, and breaks ties
  # between equally frequent pairs by these numbers: another vocabulary every time. The alphabet
  # does not depend on them. Given first and sorted, it makes the rest reproducible.
  inside = [e for e in entries(len(SPECIAL_TOKENS), ()) if e.startswith('##')]
  return WordPiece([*SPECIAL_TOKENS, *entries(vocab_size, inside)], lowercase)


def train(kind: str, texts: Callable[[], Iterable[str]], vocab_size: int,
          lowercase: bool) -> Tokenizer:
  """Trains a vocabulary of at most `vocab_size` entries, special tokens included.

  Args:
    kind: wordpiece, sentencepiece, or bpe for the byte-level one.
    texts: reads the sentences from the start each time it is called.
    lowercase: lower-case the text (and strip its accents, for WordPiece).

  Raises:
    UserError: an unknown kind, a size that cannot be, or too little text for it.
  """
  require_choice('data.tokenizer', kind, KINDS)
  require(vocab_size > len(SPECIAL_TOKENS),
          f'model.vocab_size={vocab_size} leaves no room beside the special tokens')
  if kind == 'wordpiece':
    return _train_wordpiece(texts, vocab_size, lowercase)
  if kind == 'bpe':
    return bpe.train(texts, vocab_size, lowercase)
  import sentencepiece  # other tokenisers do without it
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts()), model_writer=model, vocab_size=vocab_size,
        model_type='unigram', hard_vocab_limit=False, minloglevel=2, pad_id=0, unk_id=1, bos_id=-1,
        eos_id=-1, pad_piece='<pad>', unk_piece='<unk>',
        control_symbols=['[CLS]', '[SEP]', '[MASK]'],
        normalization_rule_name='nmt_nfkc_cf' if lowercase else 'nmt_nfkc',
        input_sentence_size=5_000_000, shuffle_input_sentence=False)
  except RuntimeError as e:
    raise UserError(f'SentencePiece cannot train {vocab_size} pieces on this corpus: {e}') from e
  return SentencePiece(model.getvalue())


def _read_lines(path: str, field: str) -> Iterator[str]:
  number = 0
  try:
    with epath.Path(path).open('rb') as file:
      for line in file:  # bytes end at \n alone; words may hold other line ends of Python
        number += 1
        yield line.decode('utf-8').rstrip('\r\n')
  except OSError as e:
    raise UserError(f'{field}={path} cannot be read: {e.strerror or e}') from e
  except UnicodeDecodeError as e:
    raise UserError(f'{field}={path}: invalid UTF-8 in line {number}') from e


def add_words(tokenizer: Tokenizer, path: str) -> tuple[Tokenizer, list[str]]:
  """Appends the words of a text file, one a line such as "covid-19", to a WordPiece vocabulary.

  Returns the extended tokeniser, and notes for the user. Raises UserError if there is no such file
  or no new word in it, for a line of several words, and for another kind of tokeniser.
  """
  require(isinstance(tokenizer, WordPiece),
          f'add_tokens={path} needs a WordPiece vocabulary, this is {tokenizer.kind}')
  known, words, skipped = set(tokenizer.vocab), [], 0
  for number, line in enumerate(_read_lines(path, 'add_tokens'), 1):
    word = tokenizer.clean(line)
    if not word:
      continue
    require(len(word.split()) == 1, f'{path}, line {number}: {line.strip()!r} is '
            f'{len(word.split())} words: an entry is one')
    require(len(word) <= 100, f'{path}, line {number}: a word of {len(word)} characters; '
            'WordPiece reads at most 100')
    if word in known:
      skipped += 1
    else:
      words.append(word)
      known.add(word)
  require(words, f'add_tokens={path} holds no word that the vocabulary does not have')
  notes = [f'{len(words)} words added to the vocabulary']
  if skipped:
    notes.append(f'{skipped} lines of {path} were left out: the vocabulary or a line before has '
                 'the word')
  return tokenizer.extended(words), notes


def read_word_vectors(path: str, entries: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
  """Reads the vectors of known words from word2vec's text format.

  Its lines are "word v1 v2 ... vD"; the first may be "count D". Raises UserError if the file is
  malformed, or has none of the words.

  Args:
    entries: the id of each requested word.

  Returns:
    ([n] ids, [n, D] float32 vectors).
  """
  vectors, width = {}, None
  for number, line in enumerate(_read_lines(path, 'embedding_init'), 1):
    word, *values = line.rstrip(' ').split(' ')
    if number == 1 and len(values) == 1 and word.isdigit():
      continue
    width = width or len(values)
    if len(values) != width:
      raise UserError(f'{path}, line {number}: {len(values)} numbers after the word, not {width}')
    if word in entries and entries[word] not in vectors:
      try:
        vector = np.array(values, np.float32)
      except ValueError as e:
        raise UserError(f'{path}, line {number}: no numbers after {word!r}: {e}') from e
      if not np.all(np.isfinite(vector)):
        raise UserError(f'{path}, line {number}: the vector of {word!r} is not finite')
      vectors[entries[word]] = vector
  require(vectors and width,
          f'embedding_init={path} has a vector for no entry of the vocabulary')
  return np.array(list(vectors)), np.stack(list(vectors.values()))
