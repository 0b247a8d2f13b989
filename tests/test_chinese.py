"""Chinese from text to filled masks: `prepare` segments words, a run masks whole words."""

import numpy as np
import pytest

import bert_jax
from bert_jax.data import preparation
from bert_jax.runs import run
from tests import conftest

WHERE = {'猫': '床', '狗': '门', '鸟': '树', '鱼': '水', '马': '草', '牛': '山'}


@pytest.mark.slow
def test_a_short_run_with_whole_word_masking_fills_masks_in_chinese(tmp_path):
  rng = np.random.default_rng(0)
  sentences = [f'{animal}{verb}在{place}上。' for animal, place in WHERE.items() for verb in '坐睡']
  documents = [list(rng.choice(sentences, 6)) for _ in range(150)]
  source = conftest.write_corpus(tmp_path / 'zh.txt', documents)
  preparation.prepare(preparation.Settings(source, vocab_size=120, language='zh', heldout=0.05),
                  str(tmp_path / 'records'), 1)
  config = conftest.tiny_config(str(tmp_path / 'records'), **{
      'masking.unit': 'whole_word', 'masking.rate': 0.3, 'train_steps': 400, 'eval_every': 400,
      'checkpoint_every': 400, 'log_every': 100, 'batch_size': 16, 'model.dropout': 0.0,
      'model.attention_dropout': 0.0, 'model.initializer_range': 0.08,
      'optimizer.learning_rate': 5e-3, 'optimizer.warmup_steps': 30})
  run.run(config, str(tmp_path / 'run'))
  bert = bert_jax.from_pretrained(str(tmp_path / 'run'))
  for animal in WHERE:  # a short run learns that a place follows, but not whose place
    candidates = bert.fill_mask(f'{animal}坐在[MASK]上。', top_k=10)[0]['candidates']
    places = [c['probability'] for c in candidates if c['token'] in WHERE.values()]
    assert candidates[0]['token'] in WHERE.values()
    assert sum(places) > 0.9  # of all places: a longer run prefers the right one
