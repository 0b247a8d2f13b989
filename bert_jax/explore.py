"""Shows a model: python -m bert_jax.explore --model=DIR --view=attention --text=..."""

from absl import flags

from bert_jax.commands import checkpoint_flags, command, overwrite_flag

_MODEL = flags.DEFINE_string('model', None, checkpoint_flags.ANY_MODEL)
_VIEW = flags.DEFINE_string(
    'view', None,
    'attention (of a text or a pair), contexts (one word in two texts), neighbours or '
    'analogy (of words).')
_TEXT = flags.DEFINE_multi_string(
    'text', [], 'attention: a text, or two for a pair; contexts: two texts. Give the flag once '
    'for each text.')
_WORDS = flags.DEFINE_list('words', [], 'contexts, neighbours: words; analogy: A,B,C.')
_LAYER = flags.DEFINE_integer(
    'layer', None, 'attention as .png: the layer, from 1; by default the mean of all.')
_HEAD = flags.DEFINE_integer(
    'head', None, 'attention as .png: the head, from 1; by default the mean of all.')
_OUTPUT = flags.DEFINE_string('output', None, 'A .html or .png file.')


def _main(argv: list[str]):
  overwrite = overwrite_flag.get('--output', _OUTPUT.value)
  from bert_jax.runtime import platforms, storage  # after the flags: JAX is slow to import
  from bert_jax.views import show
  platforms.begin_command()
  with storage.exclusive('--output', _OUTPUT.value, overwrite=overwrite):
    show.show(_MODEL.value, _VIEW.value, texts=_TEXT.value, words=_WORDS.value,
              output=_OUTPUT.value, layer=_LAYER.value, head=_HEAD.value,
              step=checkpoint_flags.STEP.value,
              allow_older=checkpoint_flags.ALLOW_OLDER.value)


if __name__ == '__main__':
  command.run_command(_main)
