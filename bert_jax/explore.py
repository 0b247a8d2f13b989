"""Looks into a model: python -m bert_jax.explore --model=DIR --view=attention --text='A text.'"""

from absl import flags

from bert_jax.commands import command, overwrite_flag

_MODEL = flags.DEFINE_string(
    'model', None, 'A workdir, a checkpoint of bert_jax, a Hugging Face folder or hub name.')
_VIEW = flags.DEFINE_string(
    'view', None, 'attention (of a text or pair), contexts (one word in two texts), neighbours or '
    'analogy (of words).')
_TEXT = flags.DEFINE_multi_string('text', [], 'attention, contexts: a text; may be given twice.')
_WORDS = flags.DEFINE_list('words', [], 'contexts, neighbours: words; analogy: A,B,C.')
_LAYER = flags.DEFINE_integer('layer', None, 'attention.png: from 1; the mean of all by default.')
_HEAD = flags.DEFINE_integer('head', None, 'attention.png: from 1; the mean of all by default.')
_OUTPUT = flags.DEFINE_string('output', None, 'A file: .html or .png.')
flags.adopt_module_key_flags(overwrite_flag)  # listed by --help


def _main(argv: list[str]):
  overwrite = overwrite_flag.get('--output', _OUTPUT.value)
  from bert_jax.runtime import storage  # after the flags: JAX takes a while to import
  from bert_jax.views import show
  with storage.exclusive('--output', _OUTPUT.value, overwrite=overwrite):
    show.show(_MODEL.value, _VIEW.value, texts=_TEXT.value, words=_WORDS.value,
              output=_OUTPUT.value, layer=_LAYER.value, head=_HEAD.value)


if __name__ == '__main__':
  command.run_command(_main)
