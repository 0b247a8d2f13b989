"""Chinese from text to filled masks: words segmented in `prepare`, masked whole."""

import itertools

import bert_jax
from bert_jax import run
from bert_jax.data import prepare
from tests import conftest

WHERE = {'猫': '床', '狗': '门', '鸟': '树', '鱼': '水', '马': '草', '牛': '山'}


def test_fill_mask_after_a_short_run_with_whole_words_masked(tmp_path):
  sentences = [f'{animal}{verb}在{place}上。' for animal, place in WHERE.items()
               for verb in ('坐', '睡', '站', '躺')]
  cycle = itertools.cycle(sentences * 2 + sentences[::-1] + sentences[5:])
  documents = [list(itertools.islice(cycle, 9)) + [f'今天是第{i}天。'] for i in range(150)]
  source = conftest.write_corpus(tmp_path / 'zh.txt', documents)
  prepare.prepare(prepare.Settings(source, vocab_size=120, language='zh', heldout=0.05),
                  str(tmp_path / 'records'), 1)
  config = conftest.tiny_config(str(tmp_path / 'records'), **{
      'masking.unit': 'whole_word', 'train_steps': 300, 'eval_every': 300, 'checkpoint_every': 300,
      'log_every': 100, 'batch_size': 16, 'optimizer.learning_rate': 5e-3, 'model.dropout': 0.0,
      'model.attention_dropout': 0.0, 'model.initializer_range': 0.08,
      'optimizer.warmup_steps': 30})
  run.run(config, str(tmp_path / 'run'))
  bert = bert_jax.from_pretrained(str(tmp_path / 'run'))
  texts = [f'{animal}坐在[MASK]上。' for animal in WHERE]
  best = [bert.fill_mask(text)[0]['candidates'][0]['token'] for text in texts]
  assert best == list(WHERE.values())
