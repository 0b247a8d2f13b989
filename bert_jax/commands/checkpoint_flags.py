"""The flags --step and --allow_older of commands that read a workdir; the help of --model."""

from absl import flags

ANY_MODEL = (
    'A workdir, a checkpoint of bert_jax, a Hugging Face or sentence-transformers '
    'folder, a hub name, or a TensorFlow checkpoint of google-research/bert.')
STEP = flags.DEFINE_integer(
    'step', None,
    'Step of the checkpoint in a workdir; by default the best one, else the newest.')
ALLOW_OLDER = flags.DEFINE_bool(
    'allow_older', False,
    'If this checkpoint is damaged, take the newest intact one before it.')
