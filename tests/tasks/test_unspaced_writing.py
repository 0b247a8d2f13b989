"""Writing without spaces gets the tags of transformers' pipeline, for every token."""

import json

import pytest
import torch
import transformers

import bert_jax
from bert_jax.data.tokenizers import training
from bert_jax.tasks import token_classification
from tests.interop import torch_bert

# Thai, Lao, Khmer, Burmese, Japanese; with Latin words, digits and punctuation among them.
TEXTS = ['สมชายจากกรงเทพ', 'นายทองรอแม', 'ລາວໄປນາ', 'កងទព', 'ကကဟန', 'これはペンです。',
         'カタカナと ひらがな', 'ｶﾀｶﾅ', 'anna รอ bonn', 'สมชายanna7', 'anna', 'นาย สมชาย ชน ใจ', '',
         'anna - สม, ชาย!',
         # With marks above, below and around letters, each a token of its own.
         'สมชายอยู่กรุงเทพ', 'ຂ້ອຍຮັກລາວ', 'ខ្ញុំស្រឡាញ់ភ្នំពេញ', 'ရန်ကုန်မြို့']
PREFIXED = ('O', 'B-PER', 'I-PER', 'B-LOC', 'I-LOC')
PLAIN = ('O', 'PER', 'LOC')


def make(folder, labels):
  """A tagger whose tags differ from token to token, with letters as its vocabulary."""
  letters = sorted({c for text in TEXTS for c in text if not c.isspace()} - set('-,!'))
  letters = [x for c in letters for x in (c, f'##{c}')] + ['anna', 'bonn', '##anna', '-', ',', '!']
  names = [*torch_bert.SPECIAL, *letters, *(['สม', '##ชาย', '##กรุง', '##เทพ', 'これは'])]
  model = torch_bert.make(
      'BertForTokenClassification', folder, vocab_size=len(names), num_labels=len(labels),
      hidden_size=32, max_position_embeddings=64, initializer_range=0.5,
      id2label=dict(enumerate(labels)), label2id={x: i for i, x in enumerate(labels)})
  (folder / 'vocab.txt').write_text('\n'.join(names) + '\n')
  (folder / 'tokenizer_config.json').write_text(json.dumps(
      {'do_lower_case': False, 'tokenizer_class': 'BertTokenizer', 'strip_accents': False}))
  return model


def theirs(folder, texts):
  tagger = transformers.pipeline('token-classification', str(folder), device='cpu',
                                 aggregation_strategy='simple', dtype=torch.float32)
  return [[(x['start'], x['end'], x['entity_group'], pytest.approx(float(x['score']), abs=1e-4))
           for x in tagger(text)] if text else [] for text in texts]


def ours(folder, texts):
  return [[(x['start'], x['end'], x['label'], x['probability']) for x in answer['entities']]
          for answer in token_classification.tag(bert_jax.from_pretrained(str(folder)), texts)]


def test_tags_equal_the_pipeline_of_transformers(tmp_path):
  make(tmp_path, PREFIXED)
  expected = theirs(tmp_path, TEXTS)
  assert ours(tmp_path, TEXTS) == expected
  assert len(expected[0]) > 1 and len({x[2] for of_text in expected for x in of_text}) == 2


def test_plain_tags_of_one_stretch_are_joined(tmp_path):
  """Words with spaces between them keep an entity each, as for parts of speech."""
  make(tmp_path, PLAIN)
  stretches = [text for text in TEXTS if text and not set(text) & set(' 。-,!') and text != 'ｶﾀｶﾅ']
  assert ours(tmp_path, stretches) == theirs(tmp_path, stretches)
  joined = token_classification._joined
  unit = token_classification.Unit
  units = [unit([1], 0, 1, continues) for continues in (False, True, True, True, False, True)]
  assert joined(units, ['A', 'A', 'A', 'O', 'A', 'B']) == ['B-A', 'I-A', 'I-A', 'O', 'A', 'B']
  assert joined(units, ['O', 'A', 'B-A', 'A', 'A', 'A']) == ['O', 'A', 'B-A', 'A', 'B-A', 'I-A']


def test_a_long_stretch_is_read_to_its_end(tmp_path):
  """Windows cut between its tokens, so text beyond the model's length has tags too."""
  make(tmp_path, ('B-PER', 'I-PER'))
  text = 'สมชา' * 24  # 96 letters in 95 tokens; the model reads 62
  units, = token_classification.find_units(
      [text], bert_jax.from_pretrained(str(tmp_path)).tokenizer)
  assert len(units) == 95 and units[-1].end == 96
  assert ours(tmp_path, [text])[0][-1][1] == 96


@pytest.mark.parametrize('kind, size', [('wordpiece', 90), ('sentencepiece', 60), ('bpe', 300)])
def test_the_units_of_a_stretch_have_the_tokens_of_its_text(kind, size):
  text = 'สมชายจากกรงเทพ'
  t = training.train(kind, lambda: [text * 3, 'รอ ' + text], size, True)
  (first, *rest), = token_classification.find_units([f'รอ{text}'], t)
  assert not first.continues and rest and all(unit.continues for unit in rest)
  pieces = [i for unit in (first, *rest) for i in unit.pieces]
  assert pieces == t.encode_batch([f'{t.before_word}รอ{text}'])[0]
  assert rest[-1].end == 16 and all(0 <= unit.start < unit.end for unit in (first, *rest))
  assert sum(len(unit.pieces) > 1 for unit in (first, *rest)) <= 1


def test_the_token_of_the_space_joins_the_next():
  """A SentencePiece model may have a piece of its own for the beginning of a word."""
  t = training.train('sentencepiece', lambda: ['ab ' * 9 + 'กขค' * 3], 16, True)
  units, = token_classification.find_units(['กข'], t)
  assert [(unit.start, unit.end) for unit in units] == [(0, 1), (1, 2)]
  assert [len(unit.pieces) for unit in units] == [2, 1]
  assert t.encode_batch([' กข'])[0] == [i for unit in units for i in unit.pieces]
