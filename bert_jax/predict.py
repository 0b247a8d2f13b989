"""Runs a trained model: python -m bert_jax.predict --task=fill_mask --model=DIR < in.jsonl"""

from absl import flags

from bert_jax import errors

_TASK = flags.DEFINE_string('task', None, 'fill_mask, next_sentence or score.')
_MODEL = flags.DEFINE_string('model', None, 'A workdir that main has trained.')
_INPUT = flags.DEFINE_string('input', None, 'JSON lines; standard input by default.')
_OUTPUT = flags.DEFINE_string('output', None, 'JSON lines; standard output by default.')


def main(argv: list[str]):
  """Flags in, one call."""
  del argv
  from bert_jax.inference import jsonl  # after the flags: JAX takes a while to import
  jsonl.run(_TASK.value, _MODEL.value, _INPUT.value, _OUTPUT.value)


if __name__ == '__main__':
  errors.run_command(main)
