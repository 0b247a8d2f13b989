"""Random overrides of a config: a run applies each command line completely or refuses it.

A command ends with 0 or 2, or with 1 and a known line. After 0, run.json has every given value.
Most commands stop before training, some after they trace a step, and a few train.
"""

import json
import multiprocessing
import os
import pathlib
import random
import resource
import runpy
import shlex
import shutil
import signal
import tempfile
import time
from typing import Any

from etils import epath

from bert_jax.commands import config_flag
from bert_jax.config import flat
from bert_jax.data import preparation
from bert_jax.data.tokenizers import training
from bert_jax.model import attention_kernels
from bert_jax.model.bert_config import ACTIVATIONS, DTYPES, REMAT
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.training import loop
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib
from tests import conftest, made_tasks, test_commands, typed
from tests.faults.runs import Bench, Trial

BATCH = 25  # command lines of a trial
SECONDS = 300  # of a core that one may take; a machine with other work needs longer
_TRACED, _TRAINED = 0.25, 0.05  # shares of command lines that trace a step, and that train
# Lines of runs that end with 1 although their values are valid.
_KNOWN = ('out of memory', 'the loss was not finite')

_HEAD = 'from bert_jax import config\n\n\ndef get_config():\n'
_SMALL = ("  c.model.update(dict(hidden_size=32, num_heads=4, intermediate_size=64, num_layers=2,\n"
          "                      max_positions=64, vocab_size=200))\n")
_RUN = ("  c.update(dict(train_steps=2, batch_size=8, max_len=32, log_every=1, eval_every=2,\n"
        "                checkpoint_every=2))\n  c.optimizer.warmup_steps = 1\n")
_PRETRAINING = (_SMALL + _RUN + "  c.phases, c.eval_batches, c.data.heldout = (), 1, 0.1\n"
                "  c.data.source = 'corpus.txt'\n")
_PHASES = "  c.phases = ((1, 16, 8), (1, 32, 8))\n"
_FINETUNING = (_RUN + "  c.train_epochs, c.init_from, c.model.scan_unroll = 0.0, 'model', 1\n"
               "  c.optimizer.warmup_ratio = 0.0\n")
_ARCHITECTURES = {
    'bert': "config.pretraining('tiny')\n",
    'electra': "config.pretraining(electra.ElectraConfig(generator_size=0.5, embedding_size=16))\n"
               "  c.data.sequences = 'full_sentences'\n",
    'albert': "config.pretraining(albert.AlbertConfig(embedding_size=16))\n"
              "  c.data.sequences = 'sentence_order'\n",
    'modernbert': "config.pretraining(modern.ModernConfig(local_window=16))\n"
                  "  c.data.sequences = 'full_sentences'\n"}

_WORDS = {
    'task': ('pretrain', 'sequence_classification', 'token_classification', 'question_answering'),
    'platform': ('auto', 'cpu', 'gpu'), 'sharding': ('dp', 'fsdp', 'tp', 'fsdp_tp'),
    'objective': ('', 'mlm', 'mlm_nsp', 'mlm_sop', 'replaced_tokens', 'replaced_tokens_gdes',
                  'distillation'),
    'keep_best': ('', 'auto', 'loss', 'accuracy', 'f1', 'mlm_loss', 'spearman'),
    'init_from': ('', 'model', 'base'), 'teacher': ('', 'base', 'model'),
    'model.architecture': ('bert', 'roberta', 'distilbert', 'albert', 'electra', 'modernbert',
                           'mpnet', 'deberta-v2'),
    'model.activation': ACTIVATIONS, 'model.attention': attention_kernels.CHOICES,
    'model.remat': REMAT,
    'model.dtype': DTYPES, 'add_tokens': ('', 'words.txt'),
    'embedding_init': ('', 'vectors.txt'), 'model.classifier_pooling': ('cls', 'mean'),
    'optimizer.name': optimizer_lib.NAMES, 'optimizer.decay': optimizer_lib.DECAYS,
    'masking.unit': ('token', 'whole_word', 'span', 'ngram'),
    'data.source': ('corpus.txt', 'records', 'corpus.jsonl', '*.txt', 'builtin',
                    'corpus.txt=1,corpus.jsonl=2', 'records=0.7:0.3,corpus.txt=0.3:0.7'),
    'data.negatives': ('other_document', 'similar_style', 'same_document'),
    'data.sequences': ('next_sentence', 'sentence_order', 'full_sentences'),
    'data.vocab': ('', 'vocab.txt', 'bpe', 'records/tokenizer'),
    'data.language': ('en', 'de', 'zh', 'zh-tw', 'english'),
    'data.tokenizer': ('wordpiece', 'sentencepiece', 'bpe'),
    'data.problem': ('single_label', 'multi_label', 'regression'),
    'data.long': ('head', 'tail', 'head_tail', 'chunks_max', 'chunks_mean', 'chunks_attention'),
    'data.pooling': ('', 'cls', 'mean', 'max', 'none'),
    'data.query_expansion': ('auto', 'none', 'fixed', 'min_visible'),
    'data.query_prompt': ('auto', '', 'query: '), 'data.document_prompt': ('auto', '', 'passage: '),
    'data.scores_column': ('', 'scores', 'text'),
    'data.loss': ('binary', 'graded', 'listwise', 'hinge'),
    'data.text_column': ('text', '0', 'body'), 'data.text_pair_column': ('', 'text', 'text_pair'),
    'data.label_column': ('label', 'value', '-1', '1', 'yes,no'),
    'data.choices_column': ('choices', 'text'), 'data.negative_column': ('', 'contrary'),
    'data.format': ('auto', 'text', 'jsonl', 'wikitext', 'csv', 'tsv', 'conll', 'squad', 'swag',
                    'glue/sst2', 'glue/mrpc', 'glue/stsb')}
_HOSTILE = ('', 'nowhere', '../x', '~/x', 'a b', 'ü🙂', '-', 'None', "'", 'tfds:none', 'x' * 300,
            '{}', '*', '[', '.')
_TUPLES = {
    'phases': ('()', '((1,16,8),(1,32,8))', '((2,16,8),)', '((900,16,8),(100,32,8))', '2,16,8',
               '((2,16,8))', '((2,16),)', '((0,16,8),)', '((1.5,16,8),)', '((2,9,7),)'),
    'profile_steps': ('()', '1,2', '(2,1)', '1', '50,60', '(1,2,3)', 'a,b'),
    'data.labels': ('()', 'yes,no', '(yes,no)', "('no','yes')", 'yes', 'yes,yes', 'yes,', '1,0',
                    '3.0,1.0', 'O,B-NAME,I-NAME', 'a,b,c'),
    'data.skip_labels': ('()', 'yes', '-', 'yes,no', '3.0'),
    'data.skipped_words': ('()', 'auto', 'the', '(.,the)', 'no such word', '1,2'),
    'data.matryoshka': ('()', '16,8', '(16,)', '8,8', '64', '(0,)', '1.5,2'),
    'data.matryoshka_weights': ('()', '1,2', '(0.5,)', '0,1', '1'),
    'trackers': ('()', 'tensorboard', 'tensorboard,tensorboard', 'tensorboard,paper'),
    'lora.targets': ('qkv,out', 'attention', 'up,down', 'feed_forward', 'query', '()'),
    'data.eval_fields': ('()', 'text_column=text', 'label_column=label,format=tsv', 'text=a',
                         'text_column', 'train=a', 'labels=a'),
    'data.eval_columns': ('text,text_pair,score', 'sentence1,sentence2,score', 'a,b', '()')}
_HOSTILE_TUPLES = ('(', '((', "('a',", '1,,2', 'nan', '((1,2),3)', '(None,)', '"', '[]')
_INTEGERS = ('1', '2', '3', '4', '8', '16', '32', '64')
_HOSTILE_INTEGERS = ('0', '-1', '-2147483648', '7', '16777217', '2147483648',
                     '9223372036854775808', '1.5', 'many', 'nan', '')
_FLOATS = ('0.1', '0.5', '0.9', '1', '1e-3', '2')
_HOSTILE_FLOATS = ('0', '-1', 'nan', 'inf', '-inf', '1e300', '1e-300', '1.0000001', 'x', '')
# Upper limits of fields whose larger values take hours or all memory.
_COSTLY = {'train_steps': 64, 'batch_size': 64, 'max_len': 512, 'train_epochs': 100,
           'train_minutes': 0.05,
           'data.loader_workers': 2, 'masking.max_predictions': 64, 'optimizer.accumulation': 8,
           'model.*': 512}


def make(folder: pathlib.Path):
  """Writes config files, texts, records, models and examples."""
  folder.mkdir(parents=True)
  documents = conftest.make_documents(60)
  corpus = conftest.write_corpus(folder / 'corpus.txt', documents)
  (folder / 'corpus.jsonl').write_text(''.join(
      json.dumps({'text': '\n'.join(d)}) + '\n' for d in documents))
  preparation.prepare(preparation.Settings(corpus, vocab_size=200, heldout=0.1),
                      str(folder / 'records'))
  shutil.copy(folder / 'records/tokenizer/vocab.txt', folder / 'vocab.txt')
  bpe = training.train('bpe', lambda: [s for d in documents for s in d], 300, True)
  bpe.save(epath.Path(folder / 'bpe'))
  (folder / 'words.txt').write_text('zebra\nquokka\n')
  (folder / 'vectors.txt').write_text(''.join(
      f'{word} {" ".join(["0.5"] * 32)}\n' for word in conftest.WORDS[:9]))
  made_tasks.model(folder / 'model')
  made_tasks.start(folder / 'masked_lm', 'sparse_embedding')
  for name, start in _ARCHITECTURES.items():
    (folder / f'{name}.py').write_text(
        'from bert_jax.model import albert, electra, modern\n' + _HEAD + '  c = ' + start
        + _PRETRAINING.replace('num_layers=2', f'num_layers={4 if name == "modernbert" else 2}')
        + '  return c\n')
  (folder / 'phases.py').write_text(
      _HEAD + '  c = ' + _ARCHITECTURES['bert'] + _PRETRAINING + _PHASES + '  return c\n')
  for task in made_tasks.FILES:
    (folder / task).mkdir()
    files = made_tasks.files(task, folder / task, 20, 8)
    lines = ''.join(f'  c.{name} = {task + "/" + pathlib.Path(path).name!r}\n'
                    for name, path in files.items())
    (folder / f'{task}.py').write_text(
        _HEAD + f'  c = config.finetuning({task!r})\n' + _FINETUNING + lines
        + "  c.init_from = 'masked_lm'\n" * (task == 'sparse_embedding') + '  return c\n')


CONFIGS = (*_ARCHITECTURES, 'phases', *made_tasks.FILES)


def value_of(rng: random.Random, name: str, value: Any) -> str:
  """A random value for a field of this type: a likely one, or one that nobody should give."""
  hostile = rng.random() < 0.25
  if isinstance(value, bool):
    return rng.choice(('maybe', '2', '')) if hostile else rng.choice(('true', 'false'))
  if isinstance(value, tuple):
    return rng.choice(_HOSTILE_TUPLES if hostile else _TUPLES[name])
  if isinstance(value, int | float):
    if isinstance(value, int):
      drawn = rng.choice(_HOSTILE_INTEGERS if hostile else (*_INTEGERS, str(value)))
    else:
      drawn = rng.choice(_HOSTILE_FLOATS if hostile else (*_FLOATS, str(value)))
    most = _COSTLY.get(name, _COSTLY['model.*'] if name.startswith('model.') else None)
    try:
      return drawn if most is None or float(drawn) <= most else str(most)
    except ValueError:
      return drawn
  if name in ('data.train', 'data.eval', 'data.test'):
    files = [f'{task}/{split}.{made_tasks.SUFFIXES[task]}' for task in made_tasks.FILES
             for split in ('train', 'eval')]
    return rng.choice(_HOSTILE) if hostile else rng.choice((value, *files))
  return rng.choice(_HOSTILE) if hostile or name not in _WORDS else rng.choice(_WORDS[name])


def draw(rng: random.Random, folder: pathlib.Path) -> tuple[str, dict[str, str]]:
  """The name of a config, and overrides of one to four of its fields."""
  name = rng.choice(CONFIGS)
  config = runpy.run_path(str(folder / f'{name}.py'))['get_config']()
  fields = flat(config)
  types = {'model.architecture': 'bert', 'model.activation': 'gelu', 'model.layer_norm_eps': 1e-12}
  chosen = rng.sample(sorted(fields), rng.randint(1, 4))
  return name, {field: value_of(rng, field, types.get(field, 0) if fields[field] is None
                                else fields[field]) for field in chosen}


def _stop(job, config, mesh, workdir, checkpoints, initial):
  """Instead of the training loop."""
  del job, config, mesh, workdir, initial
  checkpoints.close()


def _trace(job, config, mesh, workdir, checkpoints, initial):
  """Instead of the training loop: its step is traced, with the rows of the first step."""
  del workdir, initial
  optimizer = optimizer_lib.OptimizerConfig(**config.optimizer)
  transform = optimizer_lib.make_optimizer(optimizer, job.train_steps)
  _, abstract = state_lib.make_init(job.task, transform, mesh, config.sharding)
  step = state_lib.make_train_step(job.task, transform, mesh, config.sharding, abstract,
                                   seed=config.seed, accumulation=optimizer.accumulation)
  step.lower(abstract, mesh_lib.put_batch(job.data.rows(0), mesh))
  checkpoints.close()


def type_it(words: list[str], share: float, out: str):
  """Runs a command in its own process; by `share`, it may stop before it trains."""
  resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
  if share > _TRAINED:
    loop.train = _trace if share < _TRAINED + _TRACED else _stop
  typed.run_here(words[0], words[1:], {}, '', out)


def _unused(config: str, overrides: dict[str, str], run: dict[str, Any]) -> str:
  """The first override that run.json does not show; '' if it has all."""
  for name, text in overrides.items():
    value = run['config']
    for part in name.split('.'):
      value = value.get(part) if isinstance(value, dict) else None
    resolved = {'train_steps': ('0',), 'eval_every': ('0',), 'checkpoint_every': ('0',),
                'init_from': (), 'data.pooling': ('',),
                'model.vocab_size': (text,)}  # an upper limit for a trained one
    if text == 'auto' or text in resolved.get(name, ()):
      continue
    if isinstance(value, list):
      given = json.loads(json.dumps(config_flag.TupleParser().parse(text)))
    elif isinstance(value, bool):
      given = text.lower() in ('true', '1', 't')
    elif isinstance(value, int | float):
      given = float(text)
    else:
      given = os.path.expanduser(text) if text.startswith('~/') else text
    if name == 'phases':  # they scale to the steps; of too many, the longest stay
      value = given if {tuple(x[1:]) for x in value} <= {tuple(x[1:]) for x in given} else value
    if value != given:
      return f'{name}={text!r} became {value!r}'
  return ''


def judge(status: int | None, error: str, config: str, overrides: dict[str, str],
          workdir: pathlib.Path) -> str:
  """What is wrong with the end of a command, '' if nothing is."""
  lines = error.splitlines()
  if status in (None, -signal.SIGXCPU, -signal.SIGKILL):
    return f'hangs, or takes more than {SECONDS} s'
  if status in (1, 2) and len(lines) == 1 and error.startswith('bert_jax: '):
    known = status == 2 or any(part in error for part in _KNOWN)
    return '' if known else f'status 1 with an unknown line: {lines[0][:300]}'
  if status:
    return f'status {status}: {" / ".join(lines[-3:])[:400]}'
  return _unused(config, overrides, json.loads((workdir / 'run.json').read_text()))


def _server() -> multiprocessing.context.BaseContext:
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload(['bert_jax.runs.run', 'tests.typed', __name__])
  return context


def fuzz(bench: Bench, number: int) -> Trial:
  """A batch of command lines."""
  folder = bench.folder / 'config files'
  if not folder.exists():
    make(folder)
  os.environ.update(bench.env, PYTHONPATH=str(test_commands.ROOT))
  server, findings, ends = _server(), [], {}
  for i in range(number * BATCH, (number + 1) * BATCH):
    rng = random.Random(f'config {i}')
    config, overrides = draw(rng, folder)
    with tempfile.TemporaryDirectory() as temporary:
      place, before = pathlib.Path(temporary), os.getcwd()
      words = ['main', f'--config={config}.py', f'--workdir={place / "run"}',
               *(f'--config.{name}={value}' for name, value in overrides.items())]
      try:
        os.chdir(folder)
        process = server.Process(
            target=type_it, args=(words, rng.random(), str(place / 'error')))
        process.start()
      finally:
        os.chdir(before)
      began = time.monotonic()
      process.join(10 * SECONDS)
      if process.exitcode is None:
        process.kill()
        status = None
      else:
        status = process.exitcode
      error = (place / 'error').read_text(errors='replace') if (place / 'error').exists() else ''
      wrong = judge(status, error, config, overrides, place / 'run')
    ends[status] = ends.get(status, 0) + 1
    with (bench.folder / 'configs.jsonl').open('a') as log:
      log.write(json.dumps({'number': i, 'command': shlex.join(words), 'status': status,
                            'error': error[-2000:], 'wrong': wrong,
                            'seconds': round(time.monotonic() - began, 1)}) + '\n')
    if wrong:
      findings.append(f'{i}: {shlex.join(words)}: {wrong}')
  ended = ', '.join(f'{count} end with {status}' for status, count in sorted(ends.items(), key=str))
  return Trial(f'{len(findings)} findings' if findings else 'all used or refused', not findings,
               (ended + '; ' + '; '.join(findings))[:3000])
