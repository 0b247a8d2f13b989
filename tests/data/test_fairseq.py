"""The tokenizers of XLM-R and CamemBERT give the ids of transformers and SentencePiece."""

import importlib
import io
import json
import pathlib
import random

from etils import epath
import pytest
import sentencepiece
import transformers
from transformers.utils import sentencepiece_model_pb2_new

from bert_jax.data import inputs
from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import UserError
from bert_jax.interop import tokenizer_checks

_SENTENCES = (
    "the quick brown fox Ångström naïve café été où garçon don't 3.14 1,000", 'Привет мир שלום',
    'مرحبا بالعالم नमस्ते สวัสดี 日本語 カタカナ 中文字符 안녕하세요', '😀 🇩🇪 ½ ™ … “quoted” e\u0301 ﬁ')
_WORDS = ' '.join(_SENTENCES).split()
SPECIAL = ['<s>', 'a <mask> b', '</s><pad>', 'x<unk>y', '<s>NOTUSED </s>NOTUSED', ' <mask>',
           '[CLS] a [SEP] [MASK]']
HOSTILE = [*tokenizer_checks.HOSTILE, ' ' * 300, 'a' + ' ' * 40 + 'b', '\x01\x02\x7f\x9f',
           'a\u0000b\ufffec', '\u2581a \u2581\u2581', 'ﷺ', '\u202eabc\u202c',
           '🏴󠁧󠁢󠁥󠁮󠁧󠁿 👨‍👩‍👧‍👦', '\ud7ff\ue000', 'q' * 3000]


def texts(count: int = 300) -> list[str]:
  rng = random.Random(0)
  return [' '.join(rng.choices(_WORDS, k=9)) for _ in range(count)]


def train(folder: pathlib.Path, tokenizer_class: str,
          **options) -> sentencepiece.SentencePieceProcessor:
  """A small model in the published layout: <unk>, <s>, </s>, then the pieces."""
  folder.mkdir(parents=True, exist_ok=True)
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(texts()), model_writer=model, minloglevel=2, **{
          'vocab_size': 200, 'character_coverage': 1.0, 'hard_vocab_limit': False, **options})
  (folder / 'sentencepiece.bpe.model').write_bytes(model.getvalue())
  (folder / 'tokenizer_config.json').write_text(json.dumps({'tokenizer_class': tokenizer_class}))
  return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


CLASSES = {'XLMRobertaTokenizer': (transformers.XLMRobertaTokenizer, 1),
           'CamembertTokenizer': (transformers.CamembertTokenizer, 4)}


@pytest.fixture(scope='module', params=CLASSES)
def published(request, tmp_path_factory):
  """(SentencePiece's processor, transformers' tokenizer, ours, the offset of the ids)."""
  folder = tmp_path_factory.mktemp('published')
  processor = train(folder, request.param)
  kind, offset = CLASSES[request.param]
  with pytest.MonkeyPatch.context() as patched:
    # The class of the sentencepiece package requires one exact version of protobuf.
    # A function of the package has the module's name.
    module = importlib.import_module('transformers.convert_slow_tokenizer')
    patched.setattr(module, 'import_protobuf', lambda: sentencepiece_model_pb2_new)
    theirs = kind.from_pretrained(str(folder))
  return processor, theirs, tokenizer_reader.load(folder), offset


def test_ids_equal_transformers(published):
  _, theirs, ours, _ = published
  assert ours.vocab_size == len(theirs)
  assert ours.vocab == theirs.convert_ids_to_tokens(range(len(theirs)))
  for role in ('pad', 'unk', 'cls', 'sep', 'mask'):
    assert getattr(ours, f'{role}_id') == getattr(theirs, f'{role}_token_id'), role
  for text in [*HOSTILE, *texts(30)]:
    assert ours.encode_batch([text])[0] == theirs(text, add_special_tokens=False).input_ids, text
  for text in ('the [MASK] fox', '[MASK]quick [MASK].'):  # a user asks for a mask
    expected = theirs(text.replace('[MASK]', '<mask>'), add_special_tokens=False).input_ids
    assert ours.encode_with_masks(text) == expected and ours.mask_id in expected
  first, second = ours.encode_batch(['the quick', 'brown fox'])
  assert inputs.join(ours, first, second).ids == theirs('the quick', 'brown fox').input_ids


def test_special_tokens_in_a_corpus_are_text(published):
  processor, _, ours, offset = published
  special = set(tokenizer_base.special_ids(ours)) - {ours.unk_id}
  for text in SPECIAL:
    expected = [i + offset if i else ours.unk_id for i in processor.encode(text)]
    ids = ours.encode_batch([text])[0]
    assert ids == expected and not special & set(ids), text


def test_offsets_and_starts(published):
  _, _, ours, _ = published
  text = 'the  quick café ﬁ 中文字符'
  (ids, spans), = ours.encode_with_offsets([text])
  assert ids == ours.encode_batch([text])[0]
  starts = ours.word_starts()[ids]
  assert sum(starts) == 5 and starts[0]
  assert [text[a] for (a, _), starts_word in zip(spans, starts) if starts_word] == [*'tqcﬁ中']


def test_tokenizer_json_gives_the_same_ids(published, tmp_path):
  _, theirs, ours, _ = published
  theirs.save_pretrained(str(tmp_path / 'theirs'))
  ours.save(epath.Path(tmp_path / 'ours'))
  assert not (tmp_path / 'ours/sentencepiece.bpe.model').exists()
  saved = transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'ours'))
  for folder in ('theirs', 'ours'):
    again = tokenizer_reader.load(tmp_path / folder)
    assert again.vocab == ours.vocab and len(again.around.two[1]) == 2 and again.kind == 'unigram'
    assert tokenizer_base.special_ids(again) == tokenizer_base.special_ids(ours)
    # transformers 5 writes <s>NOTUSED as an ordinary piece of CamemBERT.
    strings = [x for x in (*HOSTILE, *SPECIAL) if folder == 'ours' or 'NOTUSED' not in x]
    assert again.encode_batch(strings) == ours.encode_batch(strings)
  for text in HOSTILE:
    assert saved(text).input_ids == theirs(text).input_ids


def test_config_json_alone_identifies_a_camembert(tmp_path):
  train(tmp_path, 'PreTrainedTokenizerFast')
  assert tokenizer_reader.load(tmp_path).vocab[:5] == ['<s>', '<pad>', '</s>', '<unk>', '\u2581']
  (tmp_path / 'config.json').write_text('{"model_type": "camembert"}')
  assert tokenizer_reader.load(tmp_path).vocab[:6] == [
      '<s>NOTUSED', '<pad>', '</s>NOTUSED', '<unk>', '<unk>NOTUSED', '<s>']


@pytest.mark.parametrize('options', [{'bos_id': 2, 'eos_id': 1}, {'model_type': 'bpe'}])
def test_a_sentencepiece_model_of_another_kind_is_refused(tmp_path, options):
  train(tmp_path, 'XLMRobertaTokenizer', **options)
  with pytest.raises(UserError, match='name a model of another kind spiece.model'):
    tokenizer_reader.load(tmp_path)
  (tmp_path / 'sentencepiece.bpe.model').write_bytes(b'no model')
  with pytest.raises(UserError, match='is not a SentencePiece model'):
    tokenizer_reader.load(tmp_path)
