"""Mines hard negatives: python -m bert_jax.mine --model=DIR --input=FILE --corpus=FILE"""

from absl import flags

from bert_jax.commands import checkpoint_flags, command, overwrite_flag

_MODEL = flags.DEFINE_string('model', None, checkpoint_flags.ANY_MODEL)
_INPUT = flags.DEFINE_string(
    'input', None, 'Pairs of a query and a positive: csv, tsv, JSON lines.')
_CORPUS = flags.DEFINE_string('corpus', None, 'JSON lines {"_id", "title", "text"}.')
_OUTPUT = flags.DEFINE_string(
    'output', None,
    'JSON lines {"query", "positive", "negative_1", ..., "negatives"}; with --teacher also '
    '"scores".')
_COLUMNS = flags.DEFINE_list(
    'columns', ['query', 'positive'], 'Columns of the query and the positive.')
_RANKS = flags.DEFINE_list('ranks', ['1', '50'], 'First and last rank of the negatives.')
_COUNT = flags.DEFINE_integer('count', 1, 'Negatives for each pair.', lower_bound=1)
_MARGIN = flags.DEFINE_float(
    'margin', 0.05,
    'Minimum difference between the cosine of the positive and of a negative.')
_POOLING = flags.DEFINE_string(
    'pooling', None, "cls, mean, max; by default the model's own, or mean.")
_TEACHER = flags.DEFINE_string(
    'teacher', '',
    'A cross-encoder, as --model: each line gets its scores of the positive and the '
    'negatives, for data.scores_column of configs/late_interaction.py.')
_MAX_LEN = flags.DEFINE_integer('max_len', None, 'Longest text in tokens.')


def _main(argv: list[str]):
  overwrite = overwrite_flag.get('--output', _OUTPUT.value)
  ranks = command.numbers('--ranks', _RANKS.value)
  from bert_jax.inference import mining  # after the flags: JAX is slow to import
  from bert_jax.runtime import platforms, storage
  platforms.begin_command()
  with storage.exclusive('--output', _OUTPUT.value, _INPUT.value, _CORPUS.value,
                         overwrite=overwrite):
    mining.mine(_MODEL.value, _INPUT.value, _CORPUS.value, _OUTPUT.value,
                columns=_COLUMNS.value, ranks=ranks, count=_COUNT.value,
                margin=_MARGIN.value, pooling=_POOLING.value, max_len=_MAX_LEN.value,
                teacher=_TEACHER.value,
                step=checkpoint_flags.STEP.value,
                allow_older=checkpoint_flags.ALLOW_OLDER.value)


if __name__ == '__main__':
  command.run_command(_main)
