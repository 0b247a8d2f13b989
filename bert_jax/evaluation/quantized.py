"""Quantizes a model in ONNX to int8, and measures the loss of accuracy or of the cosine.

The weights of matrix products become int8, with a scale for each output, and the token
table gets 8 bits with one scale. The output layer of a masked LM stays float32. The inputs
of products are quantized while the model runs (Jacob et al. 2018, arXiv:1712.05877;
onnxruntime's dynamic quantization). The table compares both files on the same texts.
"""

from collections.abc import Sequence
import logging
import time

from etils import epath
import numpy as np

from bert_jax.data import inputs as inputs_lib
from bert_jax.errors import UserError, require
from bert_jax.evaluation import task_scores
from bert_jax.interop.onnx_export import folder, functions
from bert_jax.interop.pretrained import Pretrained
from bert_jax.interop.tokenizer_checks import HOSTILE
from bert_jax.labelled import table
from bert_jax.runtime import console
from bert_jax.tasks import finetuning_data, task_list

MOST_LOST = 0.05  # of the cosine or of the accuracy, unless the user gives another bound
_ROWS = 32  # texts in a batch
_LONGEST = 512  # tokens of a text, if the model sets no limit


class Texts:
  """The texts that both files run on: batches, and the classes if they are known."""

  def __init__(self, model: Pretrained, name: str, data: str = '',
               fields: Sequence[str] = ()):
    """Reads the texts.

    Args:
      model: the source of the ONNX folder, from `folder.exported`.
      name: the folder or name of the source; a workdir's run says how to read `data`.
      data: for a classifier with one label for each text, a file of examples, to compare
        accuracy; for other models, JSON lines with a 'text'. '' = the strings of HOSTILE,
        to compare outputs.
      fields: fields of the config group `data`, which say how to read `data`.

    Raises:
      UserError: the file is not as described, or has a label that the model lacks; a
        model of multiple choice.
    """
    # The graph of a multiple-choice model takes several texts for each input.
    require(not (model.task and task_list.WITH_HEAD[model.task].scores_choices),
            '--quantize=int8 is not for multiple choice: leave it out')
    texts, self.classes = self._read(model, name, data, fields)
    longest = (model.text_layout.max_len if model.text_layout else
               model.facts.get('max_len')) or _LONGEST
    inputs, _ = inputs_lib.text_inputs(texts, model.tokenizer,
                                       min(longest, model.config.max_positions))
    self.batches = [self._batch(inputs[i:i + _ROWS], model.tokenizer.pad_id)
                    for i in range(0, len(inputs), _ROWS)]

  def _read(self, model, name, data, fields):
    if not data:
      return [(text,) for text in HOSTILE if text.strip()], None
    if model.task == 'sequence_classification' and model.problem == 'single_label':
      examples, labels = task_scores.read(
          name, model, task_list.ALL[model.task], data, fields)
      for example in examples:
        require(str(example.label) in labels,
                f'{example.where}: the label {example.label!r} is none of the {len(labels)} '
                f'labels: {", ".join(labels)}')
      classes = [labels.index(str(example.label)) for example in examples]
      texts = [(x.text,) if x.text_pair is None else (x.text, x.text_pair)
               for x in examples]
      return texts, np.array(classes)
    require(not fields, '--fields has no effect here: it is for a classifier with one label '
                        'for each text')
    rows = finetuning_data.not_empty(table.read_jsonl(data), data)
    return [(row.text('text'),) for row in rows], None

  def _batch(self, inputs, pad_id: int) -> dict[str, np.ndarray]:
    tokens = inputs_lib.one_per_row(inputs, pad_id).tokens
    return {'input_ids': tokens.ids, 'token_type_ids': tokens.type_ids,
            'attention_mask': tokens.text_ids}


def _run(path: epath.Path, texts: Texts, output: str,
         has_tokens: bool) -> tuple[np.ndarray, float]:
  """Runs a file; returns the vectors of all texts or tokens [n, D], and the seconds."""
  session = folder.session(path)
  names = [x.name for x in session.get_inputs()]
  vectors, began = [], time.monotonic()
  for batch in texts.batches:
    result, = session.run(
        [output], {name: batch[name].astype(np.int64) for name in names})
    vectors.append(result[batch['attention_mask'] > 0] if has_tokens else result)
  return np.concatenate(vectors).reshape(sum(map(len, vectors)), -1), (
      time.monotonic() - began)


def _cosines(whole: np.ndarray, short: np.ndarray) -> np.ndarray:
  """The cosines of the rows of two arrays [n, D]: [n], or [1] if D is 1."""
  # The cosine of two numbers is only their sign: compare all at once.
  if whole.shape[1] == 1:
    whole, short = whole.T, short.T
  lengths = np.linalg.norm(whole, axis=1) * np.linalg.norm(short, axis=1)
  return np.sum(whole * short, axis=1) / np.maximum(lengths, 1e-12)


def quantize(model: Pretrained, texts: Texts, directory: epath.Path,
             most_lost: float | None = None):
  """Writes the int8 file next to the float32 file, and prints a table that compares them.

  Args:
    model: the source of the folder, from `folder.exported`.
    texts: the texts to compare on, read for this model.
    directory: a folder of `folder.save`.
    most_lost: the largest allowed loss of accuracy, or of the mean cosine of the output
      that loses most; None = MOST_LOST.

  Raises:
    UserError: the int8 file loses more; it is deleted.
  """
  from onnxruntime import quantization  # an extra, and slow to import

  most_lost = MOST_LOST if most_lost is None else most_lost
  source, target = directory / folder.FILE, directory / folder.QUANTIZED
  # A warning of the package advises a preprocessing step that changes nothing here. It
  # goes to the root logger, which belongs to the program: disable it for this call only.
  earlier = logging.root.manager.disable
  logging.disable(logging.WARNING)
  try:
    quantization.quantize_dynamic(str(source), str(target), per_channel=True,
                                  weight_type=quantization.QuantType.QInt8)
  finally:
    logging.disable(earlier)
  names = functions.function(model).outputs
  # An embedder answers with the vector of a text. Every output of other models counts.
  if 'sentence_embedding' in names:
    names = ('sentence_embedding',)
  runs = {name: [_run(path, texts, name, functions.has_tokens(model, name))
                 for path in (source, target)] for name in names}
  of_outputs = {name: _cosines(whole, short)
                for name, ((whole, _), (short, _)) in runs.items()}
  worst = min(names, key=lambda name: of_outputs[name].mean())
  (whole, slow), (short, fast) = runs[worst]
  cosines = of_outputs[worst]
  lost, what = 1 - float(cosines.mean()), 'cosine'
  rows = [('size', [f'{path.stat().length / 1e6:.1f} MB' for path in (source, target)]),
          ('seconds', [f'{slow:.2f}', f'{fast:.2f}']),
          ('cosine', ['1', f'{cosines.mean():.6f} (least {cosines.min():.6f})'])]
  if texts.classes is not None:
    right = [float(np.mean(x.argmax(1) == texts.classes)) for x in (whole, short)]
    lost, what = right[0] - right[1], 'accuracy'
    rows.append(('accuracy', [f'{x:.4f}' for x in right]))
  console.print_summary([('', 'float32, then int8')] + [
      (title, ', '.join(cells)) for title, cells in rows])
  if not lost <= most_lost:  # also if it is NaN
    target.unlink()
    raise UserError(f'int8 loses {lost:.2g} of the {what}, more than --most_lost='
                    f'{most_lost:g}: nothing is kept')
