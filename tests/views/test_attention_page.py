"""The page shows the computed attention."""

import base64
import json
import pathlib
import re

import numpy as np
import pytest
import torch
import transformers

import bert_jax
from bert_jax.errors import UserError
from bert_jax.views import attention_page as attention_lib
from bert_jax.views import show
from tests.interop import torch_bert


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('model')
  torch_bert.make('BertModel', folder)
  return folder


@pytest.fixture(scope='module')
def bert(folder):
  return bert_jax.from_pretrained(str(folder))


def test_weights_equal_pytorch(folder, bert):
  theirs = transformers.BertModel.from_pretrained(str(folder), attn_implementation='eager').eval()
  row = bert.row(('w1 w2 w3', 'w4'))
  with torch.no_grad():
    expected = theirs(torch.tensor([row.ids]), token_type_ids=torch.tensor([row.type_ids]),
                      output_attentions=True).attentions
  attention = attention_lib.attention(bert, 'w1 w2 w3', 'w4')
  assert attention.tokens == ['[CLS]', 'w1', 'w2', 'w3', '[SEP]', 'w4', '[SEP]']
  np.testing.assert_allclose(attention.weights, torch.stack(expected)[:, 0].numpy(), atol=1e-6)
  np.testing.assert_allclose(attention.weights.sum(-1), 1, atol=1e-5)


def test_the_page_is_self_contained_and_holds_the_weights(bert, tmp_path):
  attention = attention_lib.attention(bert, 'w1 w2')
  attention = attention._replace(tokens=['[CLS]', '</script>', '猫', '[SEP]'])
  attention_lib.write_html(attention, str(tmp_path / 'a.html'))
  page = (tmp_path / 'a.html').read_text()
  assert not re.search(r'(src|href)\s*=', page) and page.count('</script>') == 1
  data = json.loads(re.search(r'const data = (\{.*\});', page)[1])
  assert data['tokens'] == attention.tokens and data['special'] == ['[CLS]', '[SEP]']
  weights = np.frombuffer(base64.b64decode(data['weights']), np.uint8).reshape(2, 2, 4, 4)
  np.testing.assert_allclose(weights / 255, attention.weights, atol=0.5 / 255 + 1e-6)


def test_the_picture_shows_the_chosen_head(bert, tmp_path, monkeypatch):
  attention = attention_lib.attention(bert, 'w1 w2')
  shown = []
  from matplotlib import axes
  monkeypatch.setattr(axes.Axes, 'imshow', lambda self, x, **options: shown.append(x))
  attention_lib.write_png(attention, str(tmp_path / 'a.png'), layer=2, head=1)
  attention_lib.write_png(attention, str(tmp_path / 'b.png'))
  np.testing.assert_array_equal(shown[0], attention.weights[1, 0])
  np.testing.assert_allclose(shown[1], attention.weights.mean((0, 1)), atol=1e-7)
  assert (tmp_path / 'a.png').read_bytes().startswith(b'\x89PNG')
  with pytest.raises(UserError, match='layer=3 does not exist: the model has 2'):
    attention_lib.write_png(attention, str(tmp_path / 'c.png'), layer=3)
  with pytest.raises(UserError, match='c.png: 300 tokens are too many for a picture'):
    attention_lib.write_png(attention._replace(tokens=['w1'] * 300), str(tmp_path / 'c.png'))


def test_the_output_folder_is_created(folder, tmp_path):
  show.show(str(folder), 'attention', ['w1 w2'], [], str(tmp_path / 'new/folder/a.html'))
  assert (tmp_path / 'new/folder/a.html').exists()


def test_mistakes_of_the_command(folder, tmp_path):
  out = str(tmp_path / 'a.html')
  for arguments, message in (
      (('none', [], [], None), '--view=none is unknown: use attention, contexts'),
      (('attention', [], [], out), 'needs --text once'),
      (('attention', ['w1'], [], None), 'needs --output'),
      (('attention', ['w1'], [], str(folder / 'config.json/a.html')), 'cannot be written'),
      (('contexts', ['w1', 'w2'], ['w3'], None), "'w3' does not occur in 'w1'"),
      (('contexts', ['w1'], ['w1'], None), 'a word in two texts, not in 1'),
      (('neighbours', [], [], None), 'needs --words'),
      (('neighbours', [], ['zzz'], None), "'zzz' is not one entry of the vocabulary"),
      (('neighbours', [], ['w1'], 'map.pdf'), 'the map is a picture'),
      (('analogy', [], ['w1', 'w2'], None), 'needs --words=A,B,C')):
    with pytest.raises(UserError, match=message):
      show.show(str(folder), *arguments, None, None)
  for view, options, message in (
      ('attention', dict(texts=['w1'], output=out, layer=1), '--layer and --head have no effect'),
      ('attention', dict(texts=['w1'], words=['w1'], output=out), '--words has no effect here'),
      ('contexts', dict(texts=['w1', 'w1'], words=['w1'], output=out), '--output has no effect'),
      ('neighbours', dict(texts=['w1'], words=['w1']), '--text has no effect here'),
      ('neighbours', dict(words=['w1'], step=3), 'is not a workdir: --step and --allow_older'),
      ('neighbours', dict(words=['w1'], allow_older=True), 'is not a workdir: --step and'),
      (None, {}, 'give --view, one of attention')):
    with pytest.raises(UserError, match=message):
      show.show(str(folder), view, **{'texts': [], 'words': [], 'output': None, **options})
  assert not list(pathlib.Path(tmp_path).iterdir())
