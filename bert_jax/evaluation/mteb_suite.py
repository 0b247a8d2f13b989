"""Runs tasks of MTEB with the package mteb; writes its results files and one table."""

from collections.abc import Sequence
import importlib.util

from etils import epath

from bert_jax.errors import UserError, require
from bert_jax.evaluation.report import Report
from bert_jax.inference.bert import Bert

FOLDER = '.mteb'  # the suffix of mteb's own results, next to the report


def evaluate(bert: Bert, _: str, path: epath.Path, *, tasks: Sequence[str] = ()) -> Report:
  """Returns the main score of each task, and their mean.

  Args:
    bert: the model.
    path: the path of the report. PATH.mteb has the results files of mteb; a finished task
      does not run again for the same model.
    tasks: names of tasks in mteb, at least one.

  Raises:
    UserError: mteb is not installed, or does not know a task.
  """
  require(importlib.util.find_spec('mteb') is not None,
          '--suite=mteb needs the package mteb, which is not installed: pip install mteb')
  require(bool(tasks), '--suite=mteb needs --tasks=NAME,NAME, such as STS12,NFCorpus')
  import mteb  # an extra, and slow to import

  from bert_jax import mteb as ours

  try:
    chosen = mteb.get_tasks(tasks=list(tasks))
  except KeyError as e:
    raise UserError(f'--tasks={",".join(tasks)}: {e.args[0]}') from e
  results = mteb.evaluate(ours.Encoder(bert), chosen,
                          cache=mteb.ResultCache(path.with_suffix(FOLDER)))
  scores = {x.task_name: float(x.get_score()) for x in results.task_results}
  rows = [[name, score] for name, score in scores.items()]
  rows.append(['mean', sum(scores.values()) / len(scores)])
  return Report({'tasks': scores}, ('task', 'main score'), rows, 'main score')
