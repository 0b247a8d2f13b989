"""Parts of the tokenizer files of published models; `tests.published` puts them together.

The small vocabularies cover some sentences in ten languages.
"""

from collections.abc import Callable, Iterable, Mapping
import functools
import io
import json
import pathlib
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import normalizers
from transformers.utils import sentencepiece_model_pb2_new

TEXTS = (
    'The quick brown fox jumps over the lazy dog. Grafts and graft 1,000 (covid-19).',
    'Über Straßen und Bäche: naïve Café, garçon, señor, São Tomé.',
    'Perché così? La città è più bella, però costa € 50.',
    '中国人民在北京的大学里学习。今天天气很好！', 'カタカナとひらがな、日本語の文章です。',
    '안녕하세요 세계 한국어 문장', 'Привет, мир! Это тест.', 'مرحبا بالعالم رابط',
    'हिन्दी में नमस्ते दुनिया', 'สวัสดีชาวโลก', 'CAPITAL Letters and lower ones; e-mail@host.org')
BERTS = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]')
FAIRSEQS = ('<s>', '<pad>', '</s>', '<unk>', '<mask>')
ROWS = 1024  # of every model's table
Json = dict[str, Any]


# ---- parts of a tokenizer.json ------------------------------------------------------------------


def token(content: str, i: int, special: bool = True, **flags: bool) -> Json:
  return {'id': i, 'content': content, 'single_word': False, 'lstrip': False, 'rstrip': False,
          'normalized': not special, 'special': special, **flags}


def state(part: Any) -> Json | None:
  """A part of the library, in the form of a file."""
  return part and json.loads(part.__getstate__())


def template(cls: str, sep: str, ids: Mapping[str, int], pair: str | None = None) -> Json:
  pair = pair or f'{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1'
  return state(tokenizers.processors.TemplateProcessing(
      single=f'{cls}:0 $A:0 {sep}:0', pair=pair, special_tokens=[(x, ids[x]) for x in (cls, sep)]))


def robertas(ids: Mapping[str, int], add_prefix_space: bool = False) -> Json:
  return state(tokenizers.processors.RobertaProcessing(
      ('</s>', ids['</s>']), ('<s>', ids['<s>']), True, add_prefix_space))


def cut(length: int, pad: str, pad_id: int, fixed: bool) -> Json:
  return {'truncation': {'direction': 'Right', 'max_length': length, 'strategy': 'LongestFirst',
                         'stride': 0},
          'padding': {'strategy': {'Fixed': length} if fixed else 'BatchLongest',
                      'direction': 'Right', 'pad_to_multiple_of': None, 'pad_id': pad_id,
                      'pad_type_id': 0, 'pad_token': pad}}


def write(folder: pathlib.Path, files: Mapping[str, Any]):
  """Writes texts as they are, lists as lines, bytes, and objects as JSON."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in files.items():
    if isinstance(content, bytes):
      (folder / name).write_bytes(content)
      continue
    if isinstance(content, list):
      content = '\n'.join(content) + '\n'
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


# ---- vocabularies -------------------------------------------------------------------------------


@functools.cache
def entries(cased: bool, special: tuple[str, ...] = BERTS) -> list[str]:
  """A WordPiece vocabulary: characters, their continuations, and some words."""
  texts = TEXTS if cased else tuple(
      normalizers.BertNormalizer(lowercase=True).normalize_str(x) for x in TEXTS)
  characters = sorted({c for text in texts for c in text if not c.isspace()})
  words = sorted({word for text in texts for word in text.split() if word.isalpha()})
  known = [*special, *characters, *(f'##{c}' for c in characters),
           *(w for w in words if len(w) > 1 and not ('\u3040' < w[0] < '\ua000'))]
  return list(dict.fromkeys([*known, '##s', '##ing', 'covid', '##-19']))


def wordpiece(cased: bool = False, special: tuple[str, ...] = BERTS, unk: str = '[UNK]',
              normalizer: Json | None | str = 'berts', pre_tokenizer: Any = None,
              post_processor: Callable[[Mapping[str, int]], Json] | None = None,
              added: Iterable[Json] = (), vocab: list[str] | None = None, **more: Any) -> Json:
  """The content of a tokenizer.json with a WordPiece; the defaults are BERT's."""
  vocab = vocab or entries(cased, special)
  ids = {entry: i for i, entry in enumerate(vocab)}
  if normalizer == 'berts':
    normalizer = state(normalizers.BertNormalizer(lowercase=not cased))
  around = post_processor or (lambda ids: template('[CLS]', '[SEP]', ids))
  return {'version': '1.0', 'truncation': None, 'padding': None,
          'added_tokens': [*(token(x, ids[x]) for x in special), *added],
          'normalizer': normalizer,
          'pre_tokenizer': pre_tokenizer or {'type': 'BertPreTokenizer'},
          'post_processor': around(ids),
          'decoder': {'type': 'WordPiece', 'prefix': '##', 'cleanup': True},
          'model': {'type': 'WordPiece', 'unk_token': unk, 'continuing_subword_prefix': '##',
                    'max_input_chars_per_word': 100, 'vocab': ids}, **more}


@functools.cache
def model_of(**options: Any) -> tuple[bytes, Any]:
  """A SentencePiece unigram model and its description."""
  buffer = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(TEXTS * 4), model_writer=buffer, vocab_size=700, minloglevel=2,
      hard_vocab_limit=False, character_coverage=1.0, **options)
  description = sentencepiece_model_pb2_new.ModelProto.FromString(buffer.getvalue())
  return buffer.getvalue(), description


def fairseq_model() -> tuple[bytes, Any]:
  return model_of(unk_id=0, bos_id=1, eos_id=2, pad_id=-1)


def alberts_model() -> tuple[bytes, Any]:
  return model_of(pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, pad_piece='<pad>', unk_piece='<unk>',
                  control_symbols=('[CLS]', '[SEP]', '[MASK]'))


def debertas_model(**options: Any) -> tuple[bytes, Any]:
  return model_of(pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece='[PAD]', bos_piece='[CLS]',
                  eos_piece='[SEP]', unk_piece='[UNK]', **options)


METASPACE = {'type': 'Metaspace', 'replacement': '\u2581', 'prepend_scheme': 'always',
             'split': True}
SPLIT_METASPACE = {'type': 'Sequence', 'pretokenizers': [{'type': 'WhitespaceSplit'}, METASPACE]}


def unigram(pieces: list[tuple[str, float]], unk: str, special: Mapping[str, Json], normalizer: Any,
            pre_tokenizer: Json, post_processor: Callable[[Mapping[str, int]], Json],
            **more: Any) -> Json:
  """The content of a tokenizer.json with a unigram model; `special` {name: flags}."""
  names = [piece for piece, _ in pieces]
  ids = {name: i for i, name in enumerate(names)}
  ids |= {x: len(names) + i for i, x in enumerate(x for x in special if x not in ids)}
  return {'version': '1.0', 'truncation': None, 'padding': None,
          'added_tokens': sorted((token(x, ids[x], **flags) for x, flags in special.items()),
                                 key=lambda x: x['id']),
          'normalizer': state(normalizer), 'pre_tokenizer': pre_tokenizer,
          'post_processor': post_processor(ids), 'decoder': METASPACE,
          'model': {'type': 'Unigram', 'unk_id': names.index(unk),
                    'vocab': [[piece, score] for piece, score in pieces],
                    'byte_fallback': False}, **more}


def pieces_of(description: Any) -> list[tuple[str, float]]:
  return [(x.piece, x.score) for x in description.pieces]


def xlm_r(normalizer: Callable[[bytes], Any] = normalizers.Precompiled,
          pre_tokenizer: Json = SPLIT_METASPACE, **more: Any) -> Json:
  _, description = fairseq_model()
  pieces = [*((x, 0.0) for x in FAIRSEQS[:4]), *pieces_of(description)[3:], ('<mask>', 0.0)]
  return unigram(
      pieces, '<unk>', {**{x: {} for x in FAIRSEQS[:4]}, '<mask>': {'lstrip': True}},
      normalizer(description.normalizer_spec.precompiled_charsmap), pre_tokenizer,
      lambda ids: template('<s>', '</s>', ids, '<s>:0 $A:0 </s>:0 </s>:0 $B:0 </s>:0'), **more)


def camembert() -> Json:
  _, description = fairseq_model()
  first = ['<s>NOTUSED', '<pad>', '</s>NOTUSED', '<unk>', '<unk>NOTUSED']
  pieces = [*((x, -100.0 * (x == '<unk>NOTUSED')) for x in first), *pieces_of(description)[1:],
            ('<mask>', 0.0)]
  special = {x: {} for x in (*first[:4], '<unk>NOTUSED', '<s>', '</s>')}
  return unigram(
      pieces, '<unk>', {**special, '<mask>': {'lstrip': True}},
      normalizers.Precompiled(description.normalizer_spec.precompiled_charsmap), SPLIT_METASPACE,
      lambda ids: template('<s>', '</s>', ids, '<s>:0 $A:0 </s>:0 </s>:0 $B:0 </s>:0'))


def deberta_v3() -> Json:
  _, description = debertas_model()
  steps = normalizers.Sequence([
      normalizers.Strip(), normalizers.Precompiled(
          description.normalizer_spec.precompiled_charsmap),
      normalizers.Replace(tokenizers.Regex(' {2,}'), ' ')])
  return unigram(pieces_of(description), '[UNK]', {x: {} for x in BERTS}, steps,
                 {'type': 'Sequence', 'pretokenizers': [METASPACE]},
                 lambda ids: template('[CLS]', '[SEP]', ids))


def albert() -> Json:
  _, description = alberts_model()
  steps = normalizers.Sequence([
      normalizers.Replace('``', '"'), normalizers.Replace("''", '"'), normalizers.NFKD(),
      normalizers.StripAccents(), normalizers.Lowercase(),
      normalizers.Precompiled(description.normalizer_spec.precompiled_charsmap)])
  special = {'<pad>': {}, '<unk>': {}, '[CLS]': {}, '[SEP]': {}, '[MASK]': {'lstrip': True}}
  return unigram(pieces_of(description), '<unk>', special, steps, SPLIT_METASPACE,
                 lambda ids: template('[CLS]', '[SEP]', ids))


def byte_level(special: tuple[str, ...], normalizer: Any = None, pre_tokenizer: Any = None,
               post_processor: Callable[[Mapping[str, int]], Json] = robertas,
               added: Callable[[int], Iterable[Json]] = lambda _: (),
               mask: Mapping[str, bool] = {}, **more: Any) -> Json:
  """The content of a tokenizer.json with a byte-level BPE."""
  library = tokenizers.Tokenizer(tokenizers.models.BPE())
  library.normalizer = normalizer
  library.pre_tokenizer = pre_tokenizer or tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False)
  library.decoder = tokenizers.decoders.ByteLevel()
  library.train_from_iterator(TEXTS * 4, tokenizers.trainers.BpeTrainer(
      vocab_size=400, special_tokens=list(special), show_progress=False,
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
  content = json.loads(library.to_str())
  ids = content['model']['vocab']
  return content | {
      'post_processor': post_processor(ids),
      'added_tokens': [*(token(x, ids[x], **(mask if 'mask' in x.lower() else {}))
                         for x in special), *added(len(ids))], **more}


def modern() -> Json:
  """ModernBERT's added tokens: runs of spaces and unused tokens are not special."""
  return byte_level(
      ('[UNK]', '[CLS]', '[SEP]', '[PAD]', '[MASK]'), normalizers.NFC(),
      post_processor=lambda ids: template('[CLS]', '[SEP]', ids,
                                          '[CLS]:0 $A:0 [SEP]:0 $B:0 [SEP]:0'),
      added=lambda n: [token('|||EMAIL_ADDRESS|||', n, False, normalized=True),
                       *(token(' ' * (9 - i), n + 1 + i, False, normalized=True)
                         for i in range(5)), token('[unused0]', n + 6, False, normalized=True)],
      mask={'lstrip': True})


def gemmas() -> Json:
  """The parts of mmBERT's file: spaces as pieces, bytes, added tokens that are not special."""
  special = ('<pad>', '<eos>', '<bos>', '<unk>', '<mask>')
  library = tokenizers.Tokenizer(tokenizers.models.BPE(
      unk_token='<unk>', fuse_unk=True, byte_fallback=True))
  library.normalizer = normalizers.Replace(' ', '\u2581')
  library.pre_tokenizer = tokenizers.pre_tokenizers.Split(' ', 'merged_with_previous')
  library.train_from_iterator(
      [space + word for text in TEXTS for word in text.split() for space in ('', ' ')],
      tokenizers.trainers.BpeTrainer(vocab_size=600, show_progress=False, special_tokens=[
          *special, *(f'<0x{i:02X}>' for i in range(256))]))
  content = json.loads(library.to_str())
  vocab = content['model']['vocab']
  more = [x for x in ('\n\n', '\u2581\u2581', '<s>', '</s>', '[multimodal]') if x not in vocab]
  return content | {
      'added_tokens': [*(token(x, vocab[x]) for x in special),
                       *(token(x, len(vocab) + i, False, normalized=False)
                         for i, x in enumerate(more))],
      'post_processor': template('<bos>', '<eos>', vocab, '<bos>:0 $A:0 <eos>:0 $B:0 <eos>:0')}
