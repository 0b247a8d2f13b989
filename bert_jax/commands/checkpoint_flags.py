"""The flags --step and --allow_older, for the commands that read a workdir."""

from absl import flags

STEP = flags.DEFINE_integer(
    'step', None, 'Step of the checkpoint of a workdir; by default the best, else the newest.')
ALLOW_OLDER = flags.DEFINE_bool(
    'allow_older', False, 'Where that checkpoint is damaged, take the next sound one.')
