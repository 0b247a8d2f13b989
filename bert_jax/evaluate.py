"""Scores a model: python -m bert_jax.evaluate --model=DIR --suite=glue --data=..."""

from absl import flags

from bert_jax.commands import checkpoint_flags, command, overwrite_flag

_MODEL = flags.DEFINE_string('model', None, checkpoint_flags.ANY_MODEL)
_SUITE = flags.DEFINE_string(
    'suite', None, 'minimal_pairs, masked_lm, glue, retrieval, mteb, task.')
_DATA = flags.DEFINE_string(
    'data', None,
    "minimal_pairs: JSON lines of BLiMP, BabyLM's supplement or EWoK. masked_lm: text "
    "files. glue: a folder with the tasks' folders, or tfds:glue. retrieval: a folder in "
    "BEIR's layout. task: a file of examples, as data.eval.")
_OUTPUT = flags.DEFINE_string(
    'output', None, 'FILE.json; also writes FILE.md and FILE.png.')
_OPTIONS = {
    'rate': flags.DEFINE_float(
        'rate', 0.15, 'masked_lm: fraction of the tokens to mask.'),
    'seed': flags.DEFINE_integer(
        'seed', 0, 'masked_lm: random seed of the masks.', lower_bound=0),
    'max_len': flags.DEFINE_integer(
        'max_len', 128,
        'masked_lm, glue: tokens in a row. retrieval: tokens in a text, by default as '
        'many as the model reads. task: tokens in an input, by default as in '
        'fine-tuning, or as many as the model reads.', lower_bound=1),
    'task': flags.DEFINE_string(
        'task', '', "task: a task of bert_jax.main; by default the model's."),
    'fields': flags.DEFINE_list(
        'fields', [],
        'task: fields of the config group data, text_column=sentence,format=tsv.'),
    'tasks': flags.DEFINE_list('tasks', [], 'mteb: names of its tasks, STS12,NFCorpus.'),
    'split': flags.DEFINE_string('split', 'test', 'retrieval: SPLIT in qrels/SPLIT.tsv.'),
    'pooling': flags.DEFINE_string(
        'pooling', None,
        "retrieval: cls, mean, max; by default the model's own, or mean."),
    'precision': flags.DEFINE_string(
        'precision', 'float32',
        'retrieval: precision of the stored document vectors: float32, int8, binary.'),
    'rerank': flags.DEFINE_string(
        'rerank', '',
        'retrieval: a cross-encoder, as --model, that reorders the best 100 documents of '
        'each query.'),
    'seeds': flags.DEFINE_integer(
        'seeds', 3, 'glue: runs for each task and learning rate.', lower_bound=1),
    'rates': flags.DEFINE_list(
        'rates', ['1e-4', '5e-5', '3e-5'], 'glue: learning rates to choose from.'),
    'epochs': flags.DEFINE_float(
        'epochs', 3.0, 'glue: passes over the training examples.'),
    'batch_size': flags.DEFINE_integer(
        'batch_size', 32, 'glue, task: examples in a step.', lower_bound=1),
    'most': flags.DEFINE_integer(
        'most', 0, 'glue: maximum number of training examples; 0 = all.', lower_bound=0),
    'twin': flags.DEFINE_bool(
        'twin', False, 'glue: also score a model with random parameters.'),
}


def _main(argv: list[str]):
  overwrite = overwrite_flag.get('--output', _OUTPUT.value)
  # Only the given flags: suites have their own defaults, and reject flags without effect.
  options = {name: flag.value for name, flag in _OPTIONS.items() if flag.present}
  if 'rates' in options:
    options['rates'] = command.numbers('--rates', options['rates'], float)
  from bert_jax.evaluation import suites  # after the flags: JAX is slow to import
  from bert_jax.runtime import platforms, storage
  platforms.begin_command()
  with storage.exclusive('--output', _OUTPUT.value, _DATA.value):
    suites.run(_MODEL.value, _SUITE.value, _DATA.value, _OUTPUT.value, options,
               step=checkpoint_flags.STEP.value,
               allow_older=checkpoint_flags.ALLOW_OLDER.value,
               overwrite=overwrite)


if __name__ == '__main__':
  command.run_command(_main)
