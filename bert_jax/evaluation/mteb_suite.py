"""Runs tasks of MTEB with the package mteb; writes its results files and one table."""

from collections.abc import Sequence
import importlib.util
import math

from etils import epath

from bert_jax.errors import Failed, UserError, require
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
    UserError: mteb is not installed, does not know a task, or its task is not about text.
    Failed: the data of a task cannot be loaded; finished tasks keep their results.
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
  others = [task.metadata.name for task in chosen
            if set(task.metadata.modalities) != {'text'}]
  require(not others, f'--tasks={",".join(tasks)}: {", ".join(others)} is not only about text')
  try:
    results = mteb.evaluate(ours.Encoder(bert), chosen,
                            cache=mteb.ResultCache(path.with_suffix(FOLDER)))
  except OSError as e:  # also the errors of the Hugging Face hub and of the network
    raise Failed(f'--suite=mteb stopped: {e}: run the same command again to go on') from e
  # A constant vector has no correlation: JSON has no NaN.
  scores = {x.task_name: None if math.isnan(score := float(x.get_score())) else score
            for x in results.task_results}
  rows = [[name, score] for name, score in scores.items()]
  known = [score for score in scores.values() if score is not None]
  rows.append(['mean', sum(known) / len(known) if known else None])
  return Report({'tasks': scores}, ('task', 'main score'), rows, 'main score')
