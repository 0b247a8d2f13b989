"""Libraries that print what they also raise, or look for a TPU that is not there, are quieted."""

import glob
import os
import sys
import warnings

from absl import logging

TPU_DEVICES = ('/dev/accel*', '/dev/vfio/[0-9]*')  # as the kernel shows them
# libtpu asks the network for these where there is no TPU, and prints what it does not find.
ABSENT_TPU = {'TPU_SKIP_MDS_QUERY': '1', 'TPU_WORKER_HOSTNAMES': 'localhost',
              'TPU_ACCELERATOR_TYPE': 'v5litepod-16', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}
# The libraries whose records of a level say what their errors say, too.
_NOISE = {'ERROR': ('asyncio', 'gcsfs', 'orbax'),
          'WARNING': ('gcsfs', 'tensorflow_datasets', 'urllib3')}


def quiet_libraries():
  """Drops what libraries print of errors that they also raise, and of a TPU that is not there."""

  def unraisable(args):
    # A reader or writer that outlives its purpose.
    code = getattr(args.object, 'cr_code', None)
    if str(args.exc_value) != 'Event loop is closed' and not (code and 'orbax' in code.co_filename):
      sys.__unraisablehook__(args)

  def is_news(record) -> bool:
    origin = {record.name, *record.pathname.split(os.sep)}
    return origin.isdisjoint(_NOISE.get(record.levelname, ()))

  sys.unraisablehook = unraisable
  warnings.filterwarnings('ignore', r"coroutine '.*' was never awaited", RuntimeWarning)
  logging.get_absl_handler().addFilter(is_news)
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # TensorFlow's, which may read gs://
  if not any(map(glob.glob, TPU_DEVICES)):
    for variable, value in ABSENT_TPU.items():
      os.environ.setdefault(variable, value)
