"""ModernBERT with mmBERT's tokenizer, read as published: BPE, byte fallback, <bos> and <eos>."""

import json
import pathlib

from etils import epath
import numpy as np
import pytest
import tokenizers
import torch
import transformers

from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.interop import conversion, huggingface, verify
from bert_jax.tasks import token_classification
from tests.data import test_fairseq
from tests.interop.test_family import close, outputs

_SPECIAL = ['<pad>', '<eos>', '<bos>', '<unk>', '<mask>']
_BYTES = [f'<0x{i:02X}>' for i in range(256)]
_PLAIN = ['\n\n', '\u2581\u2581', '\u2581\u2581\u2581\u2581', '<s>', '</s>', '[multimodal]']


def write(folder: pathlib.Path):
  """A small tokenizer.json with the parts of Gemma's; its <s> and </s> are tags of HTML."""
  t = tokenizers.Tokenizer(tokenizers.models.BPE(
      unk_token='<unk>', fuse_unk=True, byte_fallback=True))
  t.normalizer = tokenizers.normalizers.Replace(' ', '\u2581')
  t.pre_tokenizer = tokenizers.pre_tokenizers.Split(' ', 'merged_with_previous')
  t.train_from_iterator(
      [space + word for text in test_fairseq.texts(100) for word in text.split()
       for space in ('', ' ')],
      tokenizers.trainers.BpeTrainer(
          vocab_size=450, special_tokens=_SPECIAL + _BYTES, show_progress=False,
          limit_alphabet=60))
  settings = json.loads(t.to_str())
  settings['added_tokens'] = [x for x in settings['added_tokens'] if x['content'] in _SPECIAL]
  t = tokenizers.Tokenizer.from_str(json.dumps(settings))
  t.add_tokens([tokenizers.AddedToken(x, normalized=False) for x in _PLAIN])
  t.post_processor = tokenizers.processors.TemplateProcessing(
      single='<bos> $A <eos>', pair='<bos> $A <eos> $B <eos>',
      special_tokens=[('<bos>', 2), ('<eos>', 1)])
  folder.mkdir(exist_ok=True)
  t.save(str(folder / 'tokenizer.json'))


@pytest.fixture(scope='module')
def both(tmp_path_factory):
  """(folder, transformers' tokenizer, ours)."""
  folder = tmp_path_factory.mktemp('mmbert')
  write(folder)
  theirs = transformers.PreTrainedTokenizerFast(
      tokenizer_file=str(folder / 'tokenizer.json'), pad_token='<pad>', mask_token='<mask>',
      bos_token='<bos>', eos_token='<eos>', unk_token='<unk>')
  return folder, theirs, tokenizer_reader.load(folder)


def test_ids_equal_transformers(both):
  _, theirs, ours = both
  assert (ours.pad_id, ours.sep_id, ours.cls_id, ours.unk_id, ours.mask_id) == (0, 1, 2, 3, 4)
  assert ours.vocab == theirs.convert_ids_to_tokens(range(len(theirs)))
  strings = [*test_fairseq.HOSTILE, *test_fairseq.texts(20), 'a\n\n\nb', '<s>struck</s>', '    x']
  for text in strings:
    assert ours.encode_batch([text])[0] == theirs(text, add_special_tokens=False).input_ids, text
  (ids,) = ours.encode_batch(['\U00013000'])  # unknown to the vocabulary: its four bytes
  assert ours.tokens(ids) == ['<0xF0>', '<0x93>', '<0x80>', '<0x80>']
  text = 'the [MASK] fox'
  assert ours.encode_with_masks(text) == theirs(
      text.replace('[MASK]', '<mask>'), add_special_tokens=False).input_ids
  first, second = ours.encode_batch(['the quick', 'brown fox'])
  assert inputs_lib.join(ours, first, second).ids == theirs('the quick', 'brown fox').input_ids


def test_special_tokens_in_a_corpus_are_text(both):
  _, theirs, ours = both
  for text in ('<bos> a <mask>', '<eos><pad>', 'x<unk>y'):
    expected = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
    ids = ours.encode_batch([text])[0]
    assert ids == expected and not set(range(5)) & set(ids)


def test_words(both):
  _, _, ours = both
  text = 'the quick été'
  (ids, spans), = ours.encode_with_spans([text])
  starts = ours.word_starts()[ids]
  assert [text[a] for (a, _), starts_word in zip(spans, starts) if starts_word] == ['q', 'é']
  (pieces, *_), = token_classification.word_pieces([['quick', 'fox']], ours)
  assert ours.word_starts()[pieces[0]] and pieces == ours.encode_batch([' quick'])[0]


@pytest.mark.medium
def test_a_modernbert_with_this_tokenizer_equals_transformers(both, tmp_path):
  folder, _, ours = both
  torch.manual_seed(0)
  theirs = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(
      vocab_size=ours.vocab_size, num_hidden_layers=4, hidden_size=64, num_attention_heads=4,
      intermediate_size=96, local_attention=16, max_position_embeddings=64, pad_token_id=0,
      bos_token_id=2, eos_token_id=1, cls_token_id=2, sep_token_id=1,
      rope_parameters={kind: {'rope_type': 'default', 'rope_theta': 160_000.0}
                       for kind in ('full_attention', 'sliding_attention')})).eval()
  theirs.save_pretrained(str(tmp_path / 'a'))
  (tmp_path / 'a/tokenizer.json').write_bytes((folder / 'tokenizer.json').read_bytes())
  model = huggingface.load(epath.Path(tmp_path / 'a'))
  assert model.config.local_theta == 160_000.0
  batch = verify.sample(model, 3, 64)
  real = batch.text_ids > 0
  hidden, logits = outputs(model.params, model.config, batch)
  results = theirs(torch.tensor(batch.ids, dtype=torch.long), torch.tensor(batch.text_ids),
                   output_hidden_states=True)
  close(np.asarray(hidden)[real], results.hidden_states[-1][torch.tensor(real)])
  close(np.asarray(logits['mlm'])[real], results.logits[torch.tensor(real)])
  conversion.convert(str(tmp_path / 'a'), str(tmp_path / 'b'), 'huggingface')
  fields = json.loads((tmp_path / 'b/config.json').read_text())
  assert [fields[f'{name}_token_id'] for name in ('pad', 'bos', 'eos', 'cls', 'sep')] == [
      0, 2, 1, 2, 1]
  saved = transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'b'))
  assert saved('the fox').input_ids == [2, *ours.encode_batch(['the fox'])[0], 1]
