"""Tokenizers that the package `tokenizers` runs from a tokenizer.json.

The file says how a tokenizer normalizes and splits text, and which tokens it adds.
Examples are BERT's WordPiece, the byte-level BPE of RoBERTa and ModernBERT, and the
unigram models of XLM-R and DeBERTa. Truncation and padding are removed: bert_jax cuts and
pads rows itself.
"""

from collections.abc import Mapping, Sequence
import functools
import json
import re
from typing import Any

from etils import epath
import numpy as np
import tokenizers

from bert_jax.data.tokenizers import base, library_checks, pair_rule
from bert_jax.errors import require

_SPELLINGS = {
    'pad': ('<pad>', '[PAD]'),
    'unk': ('<unk>', '[UNK]'),
    'cls': ('<s>', '[CLS]', '<bos>'),
    'sep': ('</s>', '[SEP]', '<eos>'),
    'mask': ('<mask>', '[MASK]'),
}
MPNET = ('<pad>', '[UNK]', '<s>', '</s>', '<mask>')  # as in fairseq, except [UNK]
_BERTS_MODEL = {
    'type': 'WordPiece',
    'unk_token': '[UNK]',
    'continuing_subword_prefix': '##',
    'max_input_chars_per_word': 100,
}
# The flags of an added token that is a plain word, not a special token.
_WORD_FLAGS = {'special': False, 'single_word': True, 'lstrip': False, 'rstrip': False,
               'normalized': True}
# A text is simple if it has only these characters. BERT's normalizer lower-cases ASCII
# letters, puts spaces around Han characters, and leaves the others unchanged.
_SIMPLE = re.compile('[ -~\xa1-\xac\xae-\xbf\xd7\xf7\u2010-\u2027\u2030-\u205e'
                     '\u3001-\u3020\u3400-\u4dbf\u4e00-\u9fff\uff01-\uff0f'
                     '\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65]*')


@functools.cache
def _spaces_around_han() -> dict[int, str]:
  """The table for `str.translate` that puts spaces around Han characters."""
  return {code: f' {chr(code)} '
          for code in (*range(0x3400, 0x4dc0), *range(0x4e00, 0xa000))}


def template(
    cls: tuple[str, int],
    sep: tuple[str, int],
    pair: str = '{0}:0 $A:0 {1}:0 $B:1 {1}:1',
) -> tokenizers.processors.PostProcessor:
  """The post-processor that makes [CLS] A [SEP] from a text, and `pair` from two texts.

  In `pair`, {0} is [CLS] and {1} is [SEP].
  """
  return tokenizers.processors.TemplateProcessing(
      single=f'{cls[0]}:0 $A:0 {sep[0]}:0', pair=pair.format(cls[0], sep[0]),
      special_tokens=[cls, sep])


class LibraryTokenizer(base.Tokenizer):
  """The tokenizer that a tokenizer.json describes."""

  def __init__(self, settings: Mapping[str, Any], where: Any = 'tokenizer.json',
               named: Mapping[str, str] = {}, markers: Sequence[str] = ()):
    """Reads the content of a tokenizer.json.

    Args:
      settings: the content.
      where: its origin, for messages.
      named: special tokens in other files of the folder, {'cls_token': '[CLS]', ...}.
      markers: additional special tokens, such as "[H]", which are never split.

    Raises:
      UserError: the library refuses the file, a special token is missing, or ids have
        large gaps.
    """
    # Only keys that the file has are cleared: a new key would change the digest.
    self._settings = {**settings,
                      **dict.fromkeys({'truncation', 'padding'} & settings.keys())}
    model = settings.get('model')
    require(isinstance(model, dict) and 'vocab' in model,
            f'{where} has no model with a vocabulary')
    if isinstance(model['vocab'], dict):
      library_checks.check_ids(model['vocab'], where)
    library_checks.check_template(settings.get('post_processor'), where)
    with library_checks.as_user_error(f'{where} is not a tokenizer'):
      self._parsing = tokenizers.Tokenizer.from_str(json.dumps(self._settings))
      ids = self._parsing.get_vocab(with_added_tokens=True)
      for token in self._added:
        # The library numbers added tokens itself, without gaps.
        require(ids[token['content']] == token['id'],
                f'{where} adds {token["content"][:50]!r} as entry {token["id"]}, which '
                f'would be entry {ids[token["content"]]}: there are gaps between its ids')
    library_checks.check_unknown(model, where)
    self.markers = tuple(markers)
    ids = self._find_roles(ids, named, where)
    self.kind = type(self._parsing.model).__name__.lower()
    library_checks.check_ids(ids, where)
    entry_of = {i: entry for entry, i in ids.items()}
    self.vocab = [entry_of.get(i, f'[unused{i}]') for i in range(max(entry_of) + 1)]
    self.entries = len(self.vocab)
    with library_checks.as_user_error(f'{where} is not a tokenizer'):
      self.around = self._around_texts()
    if self.kind == 'bpe':
      # RoBERTa's file adds no space: it treats each text as the start of a document.
      self.before_word = ' '
    normalizer, splitter = self._parsing.normalizer, self._parsing.pre_tokenizer
    self.splits_as_bert = (
        isinstance(normalizer, tokenizers.normalizers.BertNormalizer)
        and isinstance(splitter, tokenizers.pre_tokenizers.BertPreTokenizer))
    self.lowercase = normalizer.lowercase if self.splits_as_bert else None

  @property
  def _added(self) -> list[dict[str, Any]]:
    return self._settings.get('added_tokens') or []

  def _find_roles(self, ids: Mapping[str, int], named: Mapping[str, str],
                  where: Any) -> Mapping[str, int]:
    """Sets the id of each special token, and adds special tokens that the file lacks.

    Other files of the folder may name a token; otherwise its usual names are tried.
    transformers adds missing tokens in the same way. Returns the id of every entry.
    """
    special = {x['content'] for x in self._added if x['special']}
    ends, roles = {'cls': named.get('bos_token'), 'sep': named.get('eos_token')}, {}
    for role, spellings in _SPELLINGS.items():
      # Special tokens come first: in Gemma's vocabulary, <s> is the HTML tag.
      names = [named.get(f'{role}_token'), *(x for x in spellings if x in special),
               *spellings, ends.get(role)]
      roles[role] = next((name for name in names if name in ids), None)
    roles['mask'] = roles['mask'] or named.get('mask_token')
    for role, name in roles.items():
      require(name, f'{where} has no {" or ".join(_SPELLINGS[role])}: BERT needs it')
    known = {x['content'] for x in self._added}
    # A mask token and markers may be new entries. Other named tokens must have an id.
    missing = [
        x for x in dict.fromkeys([*roles.values(), *named.values(), *self.markers])
        if x not in known and (x in ids or x in self.markers or x == roles['mask'])
    ]
    if missing:
      self._parsing.add_special_tokens(
          [tokenizers.AddedToken(x, normalized=False, special=True) for x in missing])
      self._settings['added_tokens'] = json.loads(self._parsing.to_str())['added_tokens']
      ids = self._parsing.get_vocab(with_added_tokens=True)
    for role, name in roles.items():
      setattr(self, f'{role}_id', ids[name])
    # Corpus text never encodes to these tokens. Other special tokens may also be words.
    self._never_text = {*roles.values(), *ends.values()} | {
        x for spellings in _SPELLINGS.values() for x in spellings if x in special}
    return ids

  def _around_texts(self) -> base.Around:
    """The special tokens of the post-processor; [CLS] A [SEP] B [SEP] if it adds none."""
    library = self._parsing
    if not library.num_special_tokens_to_add(is_pair=False):
      # BERT needs to see where texts end. The rule goes into `_settings`, which `save`
      # writes.
      ends = ((self.vocab[i], i) for i in (self.cls_id, self.sep_id))
      own = self._settings.get('post_processor')
      rule = json.loads(template(*ends).__getstate__())
      self._settings['post_processor'] = rule if not own else {
          'type': 'Sequence', 'processors': [own, rule]}
      return base.Around.berts(self.cls_id, self.sep_id)
    # A post-processor has no list of its tokens: encode a known word and look around it.
    word = next(
        x for x in ('a', *self.vocab)
        if library.encode([x], is_pretokenized=True, add_special_tokens=False).ids)
    one, two = (library.encode(*[[word]] * n, is_pretokenized=True) for n in (1, 2))
    only, first, second = (
        [i for i, number in enumerate(encoding.sequence_ids) if number == n]
        for encoding, n in ((one, 0), (two, 0), (two, 1)))
    return base.Around(
        (tuple(one.ids[:only[0]]), tuple(one.ids[only[-1] + 1:])),
        (tuple(two.ids[:first[0]]), tuple(two.ids[first[-1] + 1:second[0]]),
         tuple(two.ids[second[-1] + 1:])))

  @functools.cached_property
  def _plain(self) -> tokenizers.Tokenizer:
    """The library's object for a corpus, where special tokens are text, except markers.

    `encode_special_tokens` is not enough: a unigram model has "<s>" among its pieces.
    """
    unused = {x for x in self.vocab if x.endswith('NOTUSED')}  # CamemBERT
    hidden, model = self._never_text | unused, self._settings['model']
    vocab = model['vocab']
    is_unigram = isinstance(vocab, list)
    pieces = {piece for piece, _ in vocab} if is_unigram else vocab
    # An entry with a space matches no text. The unknown token keeps its name: the model
    # looks it up.
    names = {x: f'{x} ' for x in hidden if x in pieces and x != model.get('unk_token')}
    if is_unigram:
      vocab = [[names.get(piece, piece), score] for piece, score in vocab]
    else:
      vocab = {names.get(entry, entry): i for entry, i in vocab.items()}
    added = [x | {
        'content': names.get(x['content'], x['content']),
        'special': ((x['special'] or x['content'] in hidden)
                    and x['content'] not in self.markers),
    } for x in self._added]
    plain = tokenizers.Tokenizer.from_str(json.dumps(
        self._settings | {'model': model | {'vocab': vocab}, 'added_tokens': added}))
    plain.encode_special_tokens = True
    return plain

  @property
  def library(self) -> tokenizers.Tokenizer:
    """The object of the package `tokenizers`."""
    return self._parsing if self.parses_special else self._plain

  @functools.cached_property
  def _without_normalizer(self) -> tokenizers.Tokenizer | None:
    """The library's object without its normalizer; None if texts need the normalizer."""
    if not self.can_extend or not all(x['special'] for x in self._added):
      return None
    bare = tokenizers.Tokenizer(self._plain.model)
    bare.pre_tokenizer = self._plain.pre_tokenizer
    return bare

  def _normalized(self, text: str) -> str | None:
    """Normalizes a simple text as BERT does; returns None for other texts."""
    if not _SIMPLE.fullmatch(text):
      return None
    if not text.isascii() and self._parsing.normalizer.handle_chinese_chars:
      text = text.translate(_spaces_around_han())
    return text.lower() if self.lowercase else text

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    def ids(library, texts):
      return [e.ids for e in library.encode_batch_fast(texts, add_special_tokens=False)]

    if self.parses_special or self.markers or not self._without_normalizer:
      return ids(self.library, list(texts))
    # The library's normalizer tracks character offsets, which takes a third of the
    # encoding time.
    normalized = [self._normalized(text) for text in texts]
    others = iter(ids(self._plain, [x for x, simple in zip(texts, normalized)
                                    if simple is None]))
    simple_ids = iter(ids(self._without_normalizer,
                          [x for x in normalized if x is not None]))
    return [next(others) if simple is None else next(simple_ids) for simple in normalized]

  def encode_with_offsets(self, texts: Sequence[str]) -> list[base.Offsets]:
    encodings = self.library.encode_batch(list(texts), add_special_tokens=False)
    return [(e.ids, e.offsets) for e in encodings]

  def encode_with_words(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
    """Encodes texts and marks the tokens that start a word of the pre-tokenizer.

    For vocabularies whose entries do not show where a word starts; see `word_starts`.

    Returns:
      (token ids, [tokens] bool: True where a word starts) of each text.
    """
    encodings = self.library.encode_batch(list(texts), add_special_tokens=False)
    words = ([-1 if word is None else word for word in e.word_ids] for e in encodings)
    return [(e.ids, np.diff(word_of_token, prepend=-2) != 0)
            for e, word_of_token in zip(encodings, words)]

  def word_starts(self) -> np.ndarray:
    inside = self._settings['model'].get('continuing_subword_prefix')
    if self.kind == 'wordlevel' or inside:
      return np.array([not (inside and entry.startswith(inside)) for entry in self.vocab])
    space = '\u0120' if self.is_bytewise else base.SPACE  # the space before a word
    return np.array([entry.startswith(space) for entry in self.vocab])

  @property
  def is_bytewise(self) -> bool:
    return 'ByteLevel' in json.dumps(
        [self._settings.get(x) for x in ('normalizer', 'pre_tokenizer')])

  @property
  def can_extend(self) -> bool:
    """True for BERT's WordPiece, the only kind that `extended` can add entries to."""
    return self.splits_as_bert and self.kind == 'wordpiece'

  def extended(self, words: Sequence[str]) -> 'LibraryTokenizer':
    """Returns a WordPiece tokenizer with `words` as additional, last entries."""
    split = self._parsing.pre_tokenizer.pre_tokenize_str
    # The pre-tokenizer would split "covid-19". Added tokens are matched before it runs.
    whole = [word for word in words if len(split(self.normalized(word).strip())) > 1]
    vocab = {entry: i for i, entry in enumerate([*self.vocab, *words])}
    added = [{'id': vocab[word], 'content': word, **_WORD_FLAGS} for word in whole]
    settings = self._settings | {
        'model': self._settings['model'] | {'vocab': vocab},
        'added_tokens': [*self._added, *added],
    }
    return LibraryTokenizer(settings, named=self._named,
                            markers=self.markers).parsing(self.parses_special)

  def with_special(self, marks: Sequence[str]) -> 'LibraryTokenizer':
    entries = set(self.vocab)
    marked = [next((x for x in (mark, mark.split(None, 1)[0]) if x in entries), None)
              for mark in marks if mark.strip()]
    added = {x['content']: x for x in self._added}
    for entry in filter(None, marked):
      added[entry] = {'id': self.vocab.index(entry), 'content': entry, **_WORD_FLAGS,
                      'special': True, 'single_word': False, 'normalized': False}
    settings = self._settings | {'added_tokens': sorted(added.values(),
                                                        key=lambda x: x['id'])}
    return LibraryTokenizer(settings, named=self._named,
                            markers=self.markers).parsing(self.parses_special)

  def lowercased(self) -> 'LibraryTokenizer':
    """Returns a copy that lowercases texts, but not the special tokens in them."""
    own = self._settings.get('normalizer')
    if self.splits_as_bert:
      # Left unset, BERT's normalizer removes accents exactly if it lowercases.
      new = own | {'lowercase': True, 'strip_accents': bool(own.get('strip_accents'))}
    else:
      new = {'type': 'Sequence', 'normalizers': [{'type': 'Lowercase'}, *([own] if own else [])]}
    tokenizer = LibraryTokenizer(self._settings | {'normalizer': new}, named=self._named,
                                 markers=self.markers)
    return tokenizer.padded(self.vocab_size).parsing(self.parses_special)

  def normalized(self, text: str) -> str:
    """Applies the normalizer of the tokenizer.json: case, accents, spaces."""
    simple = self._normalized(text) if self.splits_as_bert else None
    return self._parsing.normalizer.normalize_str(text) if simple is None else simple

  @property
  def _words(self) -> list[str] | None:
    """The words that `extended` added; None if anything else differs from BERT's."""
    texts = [x for x in self._added if not x['special']]
    is_berts = (self.splits_as_bert and self._parsing.normalizer.clean_text
                and _BERTS_MODEL.items() <= self._settings['model'].items()
                and all(_WORD_FLAGS.items() <= x.items() for x in texts))
    return [x['content'] for x in texts] if is_berts else None

  def serialized(self) -> bytes:
    words = self._words
    if words is None or self.markers:
      settings = dict(self._settings)
      if self.kind == 'unigram' and '[CLS]' in self._never_text:
        # Digests of older records did not include the post-processor.
        settings['post_processor'] = None
      if 'post_processor' in settings:
        settings['post_processor'] = pair_rule.without_segments(
            settings['post_processor'], self.around, self.vocab)
      return json.dumps(settings, sort_keys=True).encode()
    normalizer = self._parsing.normalizer
    settings = [self.vocab[:self.entries], self.lowercase]
    others = [normalizer.strip_accents, normalizer.handle_chinese_chars]
    # Usual settings add nothing: the digests of existing records must not change.
    if others != [None, True] or words:
      settings += others
    named = tuple(self._named.values())
    is_usual = named in (base.SPECIAL_TOKENS, MPNET)
    settings += [words] * bool(words) + [named] * (not is_usual)
    return json.dumps(settings).encode()

  def save(self, directory: epath.Path, segments: bool | None = None):
    settings = dict(self._settings)
    if segments and 'post_processor' in settings:
      settings['post_processor'] = pair_rule.with_segments(
          settings['post_processor'], self.around, self.vocab)
    files = {'tokenizer.json': json.dumps(settings, ensure_ascii=False).encode()}
    config = {'tokenizer_class': 'PreTrainedTokenizerFast'}
    named = tuple(self._named.values())
    # These classes of transformers build the same tokenizer from vocab.txt and settings.
    name = {(base.SPECIAL_TOKENS, 1): 'BertTokenizer', (MPNET, 2): 'MPNetTokenizer'}.get(
        (named, len(self.around.two[1])))
    if name and self._words is not None:
      files['vocab.txt'] = ('\n'.join(self.vocab[:self.entries]) + '\n').encode()
      normalizer = self._parsing.normalizer
      config = {
          'tokenizer_class': name,
          'do_lower_case': self.lowercase,
          'strip_accents': normalizer.strip_accents,
          'tokenize_chinese_chars': normalizer.handle_chinese_chars,
      }
    if self.markers:
      config['additional_special_tokens'] = list(self.markers)
    self._save(directory, files, config, segments)
