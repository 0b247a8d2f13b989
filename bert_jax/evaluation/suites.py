"""The suites of `bert_jax.evaluate`, and one evaluation from its flags to its files."""

from collections.abc import Callable
from typing import Any, NamedTuple

from etils import epath

from bert_jax.errors import require, require_flag
from bert_jax.evaluation import (
  glue_suite,
  held_out_text,
  minimal_pairs,
  mteb_suite,
  report,
  retrieval,
  task_scores,
)
from bert_jax.inference import bert as bert_lib
from bert_jax.interop import load as load_lib
from bert_jax.runtime import storage


class Suite(NamedTuple):
  """A suite of `bert_jax.evaluate`.

  Attributes:
    evaluate: takes the model, --data, the path of the report, and the given options by
      name; returns a `Report`.
    options: the names of its options.
    writes: suffixes of the files and folders that it writes beside the report.
    brings_data: the suite has its own data and takes no --data.
    load: loads the model; see `bert.load` for the arguments.
  """

  evaluate: Callable[..., report.Report]
  options: tuple[str, ...] = ()
  writes: tuple[str, ...] = ()
  brings_data: bool = False
  load: Callable[..., Any] = bert_lib.load


SUITES = {
    'minimal_pairs': Suite(minimal_pairs.evaluate, writes=(minimal_pairs.SCORES,)),
    'masked_lm': Suite(held_out_text.evaluate, ('rate', 'max_len', 'seed'),
                       writes=(held_out_text.SUMS,)),
    # The runs of GLUE load the model again, onto the device. This copy stays on the host.
    'glue': Suite(
        glue_suite.evaluate,
        ('seeds', 'rates', 'epochs', 'batch_size', 'max_len', 'most', 'twin'),
        writes=(glue_suite.FOLDER,), load=load_lib.load),
    'retrieval': Suite(
        retrieval.evaluate, ('split', 'pooling', 'max_len', 'precision', 'rerank'),
        writes=(retrieval.RUN, retrieval.RERANKED)),
    'mteb': Suite(mteb_suite.evaluate, ('tasks',), writes=(mteb_suite.FOLDER,), brings_data=True),
    'task': Suite(task_scores.evaluate, ('task', 'fields', 'max_len', 'batch_size')),
}


def run(model: str, suite: str, data: str, output: str, options: dict[str, Any],
        step: int | None = None, allow_older: bool = False, overwrite: bool = True):
  """Evaluates a model; prints the table and writes it as JSON, .md and .png.

  Args:
    model: a folder or a name: see `bert.load`.
    suite: one of SUITES.
    data: the data of the suite, the value of --data.
    output: FILE.json.
    options: the given options; the suite must use each of them.
    step: the checkpoint of a workdir: see `bert.load`.
    allow_older: see `bert.load`.
    overwrite: False = raise UserError if an output file exists.

  Raises:
    UserError: a mistake in the arguments or the data.
  """
  require_flag('suite', suite, SUITES)
  chosen = SUITES[suite]
  require(not (chosen.brings_data and data),
          f'--data has no effect here: --suite={suite} has its own data')
  needed = {'model': model, 'data': data or chosen.brings_data, 'output': output}
  for name, value in needed.items():
    require(bool(value), f'give --{name}')
  require(output.endswith('.json'), f'--output={output} must end in .json')
  # An option without effect is a mistake: nothing that was given may be ignored.
  for name in options:
    require(name in chosen.options,
            f'--{name} has no effect here: --suite={suite} does not use it')
  path = epath.Path(output)
  storage.make_parent('--output', path)
  # Check before any work that no output file is the data, or exists.
  files = report.files(path, *chosen.writes)
  storage.require_not_read('--output', output, files, [data])
  if not overwrite:
    storage.require_absent('--output', output, *reversed(files))
  result = chosen.evaluate(chosen.load(model, step, allow_older), data, path, **options)
  print(report.text(result))
  facts = {'suite': suite, 'model': model, 'step': step, 'data': data, **result.facts}
  report.write(result._replace(facts=facts), path)
