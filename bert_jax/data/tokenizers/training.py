"""Trains a vocabulary from a corpus.

Training is reproducible: the same texts give the same vocabulary. The `tokenizers`
library alone does not ensure this: when it cuts an alphabet or numbers pieces, it breaks
ties in the order of a hash table.
"""

import bisect
import collections
from collections.abc import Callable, Iterable, Iterator
import io
import itertools

import tokenizers
from tokenizers import pre_tokenizers, trainers

from bert_jax.data.tokenizers import base, older
from bert_jax.data.tokenizers.library import LibraryTokenizer
from bert_jax.data.tokenizers.spiece import SentencePiece
from bert_jax.errors import UserError, require, require_choice

_Texts = Callable[[], Iterable[str]]
_ROBERTAS = ('<s>', '<pad>', '</s>', '<unk>', '<mask>')
_BYTES = 256  # entries of byte-level BPE before the first merge


def _entries(texts: Iterable[str], lowercase: bool, size: int, first: Iterable[str] = (),
             alphabet: Iterable[str] | None = None) -> list[str]:
  """Trains WordPiece; returns its entries, sorted, without the special tokens.

  Args:
    texts: the sentences.
    lowercase: lower-case them.
    size: the largest number of entries, special tokens included.
    first: entries that the trainer numbers first, after the special tokens.
    alphabet: the allowed characters; None = all.
  """
  options = {} if alphabet is None else {
      'initial_alphabet': list(alphabet), 'limit_alphabet': len(list(alphabet))}
  library = older.wordpiece(base.SPECIAL_TOKENS, lowercase).parsing(True).library
  library.train_from_iterator(texts, trainers.WordPieceTrainer(
      vocab_size=size, special_tokens=[*base.SPECIAL_TOKENS, *first], show_progress=False,
      min_frequency=2, **options))
  return sorted(set(library.get_vocab()) - set(base.SPECIAL_TOKENS))


def _train_wordpiece(texts: _Texts, vocab_size: int, lowercase: bool) -> LibraryTokenizer:
  counts = collections.Counter()
  clean = older.wordpiece(base.SPECIAL_TOKENS, lowercase).normalized

  def counted() -> Iterator[str]:
    for text in texts():
      counts.update(clean(text))
      yield text

  # The trainer numbers the pieces inside words in the order of a hash table, and breaks
  # ties between equally frequent pairs by these numbers. The alphabet does not depend on
  # them. So a first training finds the alphabet, and in the second training the sorted
  # alphabet fixes the numbers.
  singles = _entries(counted(), lowercase, len(base.SPECIAL_TOKENS))
  alphabet = sorted({single.removeprefix('##') for single in singles},
                    key=lambda character: (-counts[character], character))
  # The alphabet has an eighth as many characters as the vocabulary has entries, and at
  # least 100. In Chinese each character is a word, so the alphabet grows up to a third,
  # until it covers 99.95% of the text, as in SentencePiece. A character may have two
  # entries, x and ##x. Rarer characters become [UNK].
  covered = list(itertools.accumulate(counts[x] for x in alphabet))
  enough = bisect.bisect_left(covered, 0.9995 * covered[-1]) + 1 if covered else 0
  alphabet = alphabet[:max(min(enough, vocab_size // 3), vocab_size // 8, 100)]
  inside = [x for x in singles if x.startswith('##') and x[2:] in alphabet]
  entries = _entries(texts(), lowercase, vocab_size, inside, alphabet)
  return older.wordpiece([*base.SPECIAL_TOKENS, *entries], lowercase)


def _train_bpe(texts: _Texts, vocab_size: int, lowercase: bool) -> LibraryTokenizer:
  """Trains byte-level BPE (Radford et al. 2019); a space is added before each text."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  library = older.byte_level(tokenizers.models.BPE(), lowercase=lowercase,
                             prefix_space=True)
  library.train_from_iterator(texts(), trainers.BpeTrainer(
      vocab_size=vocab_size, min_frequency=2, special_tokens=list(_ROBERTAS),
      initial_alphabet=alphabet, show_progress=False))
  return older.trained_byte_level(library)


def _train_sentencepiece(texts: _Texts, vocab_size: int,
                         lowercase: bool) -> SentencePiece:
  import sentencepiece  # other tokenizers do not need it
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts()),
        model_writer=model,
        vocab_size=vocab_size,
        model_type='unigram',
        # A small corpus gives fewer pieces, which is not an error.
        hard_vocab_limit=False,
        minloglevel=2,
        # ALBERT's layout: <pad>, <unk>, then [CLS], [SEP] and [MASK].
        pad_id=0,
        unk_id=1,
        bos_id=-1,
        eos_id=-1,
        pad_piece='<pad>',
        unk_piece='<unk>',
        control_symbols=['[CLS]', '[SEP]', '[MASK]'],
        normalization_rule_name='nmt_nfkc_cf' if lowercase else 'nmt_nfkc',
        # A limit, because the trainer holds its sentences in memory. Without a shuffle,
        # training is reproducible.
        input_sentence_size=5_000_000,
        # The longest sentence of corpus.py has 16,384 characters of up to 4 bytes. The
        # default drops sentences above 4,192 bytes without a message.
        max_sentence_length=4 * 16_384,
        shuffle_input_sentence=False)
  except RuntimeError as e:
    raise UserError(
        f'SentencePiece cannot train {vocab_size} pieces on this corpus: {e}') from e
  return SentencePiece(model.getvalue())


_TRAINERS = {'wordpiece': _train_wordpiece, 'sentencepiece': _train_sentencepiece,
             'bpe': _train_bpe}


def check(kind: str, vocab_size: int):
  """Raises UserError for an unknown kind, or a size that it cannot have."""
  require_choice('data.tokenizer', kind, _TRAINERS)
  require(vocab_size > len(base.ROLES),
          f'model.vocab_size={vocab_size} leaves no room for entries besides the special '
          'tokens')
  # The trainers crash at sizes beyond 32 bits.
  require(vocab_size <= base.MOST_ROWS,
          f'model.vocab_size={vocab_size} must be at most {base.MOST_ROWS}')
  require(kind != 'bpe' or vocab_size >= _BYTES + len(_ROBERTAS),
          f'model.vocab_size={vocab_size} leaves no room for the {_BYTES} bytes and '
          f'{len(_ROBERTAS)} special tokens of data.tokenizer=bpe')


def train(kind: str, texts: _Texts, vocab_size: int, lowercase: bool) -> base.Tokenizer:
  """Trains a vocabulary of at most `vocab_size` entries, special tokens included.

  A WordPiece vocabulary keeps the 100 most frequent characters, which have up to 200
  entries, even if `vocab_size` is smaller.

  Args:
    kind: wordpiece, sentencepiece, or bpe (byte-level).
    texts: each call reads the sentences from the start.
    vocab_size: the largest number of entries.
    lowercase: lower-case the text (and strip its accents, for WordPiece).

  Raises:
    UserError: see `check`; or the text is too short.
  """
  check(kind, vocab_size)
  return _TRAINERS[kind](texts, vocab_size, lowercase)
