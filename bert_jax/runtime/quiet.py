"""Silences libraries that print their own exceptions, or that search for a missing TPU."""

import glob
import os
import sys
import warnings

from absl import logging

TPU_DEVICES = ('/dev/accel*', '/dev/vfio/[0-9]*')  # device files of the kernel
# On a host without a TPU libtpu asks the network for these, and prints each failure.
ABSENT_TPU = {'TPU_SKIP_MDS_QUERY': '1', 'TPU_WORKER_HOSTNAMES': 'localhost',
              'TPU_ACCELERATOR_TYPE': 'v5litepod-16', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}
# {level: libraries whose log records of this level only repeat their exceptions}
_NOISE = {'ERROR': ('asyncio', 'gcsfs', 'orbax'),
          'WARNING': ('gcsfs', 'tensorflow_datasets', 'urllib3')}


def quiet_libraries():
  """Drops library output that repeats an exception or reports an absent TPU."""

  def unraisable(args):
    # A coroutine of orbax may outlive the event loop; it has nothing left to do.
    code = getattr(args.object, 'cr_code', None)
    if str(args.exc_value) != 'Event loop is closed' and not (
        code and 'orbax' in code.co_filename):
      sys.__unraisablehook__(args)

  def is_news(record) -> bool:
    origin = {record.name, *record.pathname.split(os.sep)}
    return origin.isdisjoint(_NOISE.get(record.levelname, ()))

  sys.unraisablehook = unraisable
  warnings.filterwarnings('ignore', r"coroutine '.*' was never awaited", RuntimeWarning)
  logging.get_absl_handler().addFilter(is_news)
  # epath may read gs:// with TensorFlow, which logs at length.
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  if not any(map(glob.glob, TPU_DEVICES)):
    for variable, value in ABSENT_TPU.items():
      os.environ.setdefault(variable, value)
