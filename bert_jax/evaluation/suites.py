"""The suites of `bert_jax.evaluate`, and one evaluation from its flags to its files."""

from typing import Any

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

# The options of each suite, in addition to the model and the data.
SUITES = {
    'minimal_pairs': (),
    'masked_lm': ('rate', 'max_len', 'seed'),
    'glue': ('seeds', 'rates', 'epochs', 'batch_size', 'max_len', 'most', 'twin'),
    'retrieval': ('split', 'pooling', 'max_len', 'precision', 'rerank'),
    'mteb': ('tasks',),
    'task': ('task', 'fields', 'max_len', 'batch_size'),
}
# Suffixes of files beside the report that --data might name.
_BESIDE = (minimal_pairs.SCORES, held_out_text.SUMS, glue_suite.FOLDER)


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
  require(suite != 'mteb' or not data,
          '--data has no effect here: --suite=mteb has its own data, give --tasks')
  needed = {'model': model, 'data': data or suite == 'mteb', 'output': output}
  for name, value in needed.items():
    require(bool(value), f'give --{name}')
  require(output.endswith('.json'), f'--output={output} must end in .json')
  # An option without effect is a mistake: nothing that was given may be ignored.
  for name in options:
    require(name in SUITES[suite],
            f'--{name} has no effect here: --suite={suite} does not use it')
  path, options = epath.Path(output), dict(options)
  storage.make_parent('--output', path)
  # Check before any work that no output file is the data.
  beside = map(path.with_suffix, _BESIDE)
  storage.spare('--output', output, [*beside, *report.files(path)], [data])
  if not overwrite:
    others = {'minimal_pairs': [minimal_pairs.SCORES], 'masked_lm': [held_out_text.SUMS],
              'retrieval': [retrieval.RUN] + [retrieval.RERANKED] * ('rerank' in options)}
    storage.keep('--output', output, *reversed(report.files(path, *others.get(suite, ()))))
  if suite == 'glue':
    twin = options.pop('twin', False)
    # The runs load the model themselves: it stays on the host here.
    result = glue_suite.evaluate(load_lib.load(model, step, allow_older), data,
                                 path.with_suffix(glue_suite.FOLDER), glue_suite.Recipe(**options),
                                 twin)
  else:
    bert = bert_lib.load(model, step, allow_older)
    if suite == 'task':
      result = task_scores.evaluate(model, bert, data, **options)
    elif suite == 'mteb':
      result = mteb_suite.evaluate(bert, path, options.get('tasks', ()))
    elif suite == 'masked_lm':
      result = held_out_text.evaluate(bert, data, path, **options)
    elif suite == 'retrieval':
      rerank = options.pop('rerank', '')
      result = retrieval.evaluate(bert, data, path, **options,
                                  reranker=bert_lib.load(rerank) if rerank else None)
    else:
      result = minimal_pairs.evaluate(bert, data, path)
  print(report.text(result))
  facts = {'suite': suite, 'model': model, 'step': step, 'data': data, **result.facts}
  report.write(result._replace(facts=facts), path)
