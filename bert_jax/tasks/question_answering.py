"""Where in a text the answer to a question stands (SQuAD; Devlin et al. 2019, 4.2 and 4.3)."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from bert_jax.data.tokenizer import Tokenizer
from bert_jax.errors import UserError
from bert_jax.interop.pretrained import SPAN_LABELS
from bert_jax.labelled import squad
from bert_jax.labelled.packed_examples import Batch
from bert_jax.labelled.packed_examples import Features
from bert_jax.labelled.squad import Question
from bert_jax.model.attention import MASKED
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.task_heads import BertForQuestionAnswering
from bert_jax.objectives.losses import Metrics
from bert_jax.objectives.losses import weighted
from bert_jax.tasks import answers
from bert_jax.tasks import metrics as scores_lib
from bert_jax.tasks.answers import Context
from bert_jax.tasks.answers import Span
from bert_jax.tasks.finetuning import FineTuning
from bert_jax.tasks.finetuning import Output
from bert_jax.tasks.finetuning import Split
from bert_jax.tasks.finetuning import Splits
from bert_jax.tasks.finetuning import by_input
from bert_jax.tasks.finetuning import eval_files
from bert_jax.tasks.finetuning import not_empty


def _target(context: Context, window: answers.Window, question: Question) -> np.ndarray:
  """[tokens, 2] int32 1 where the answer starts and ends; on [CLS] if the window has it not."""
  target = np.zeros((len(window.input.ids), 2), np.int32)
  start = end = 0
  if question.answers:
    begin = question.starts[0]
    span = answers.token_span(context.spans, begin, begin + len(question.answers[0]))
    if span and window.first <= span[0] and span[1] < window.first + window.count:
      start, end = (window.offset + token - window.first for token in span)
  target[start, 0] = target[end, 1] = 1
  return target


def features(questions: Sequence[Question], contexts: Sequence[Context], *,
             by_window: bool) -> Features:
  """The windows of questions, each an example of its own or all of a question one example."""
  windows = [(i, context, window) for i, context in enumerate(contexts)
             for window in context.windows]
  owners = np.arange(len(windows)) if by_window else np.array([i for i, _, _ in windows], np.int64)
  return Features([window.input for _, _, window in windows], owners, token_targets=[
      _target(context, window, questions[i]) for i, context, window in windows])


@dataclasses.dataclass(frozen=True)
class QuestionAnswering(FineTuning):
  """Start and end of the answer.

  Attributes:
    contexts: of the questions of each file that is evaluated, by the name of its split.
    n_best, max_answer_len: see `answers.best_spans`.
    null_threshold: see `answers.answer`; None = every question has an answer (v1.1).
  """

  contexts: Mapping[str, Sequence[Context]] = dataclasses.field(default_factory=dict)
  n_best: int = 20
  max_answer_len: int = 30
  null_threshold: float | None = None

  score_names = ('exact_match', 'f1')

  def logits(self, apply: Callable[..., jax.Array], batch: Batch) -> jax.Array:
    """[R, L, 2]."""
    return apply(batch.inputs)

  def metrics(self, logits: jax.Array, batch: Batch) -> Metrics:
    """The mean of the two cross-entropies over the tokens of each window; both right."""
    slots = jnp.arange(1, batch.starts.shape[1] + 1)
    member = batch.inputs.pair_index[:, None, :] == slots[:, None]  # [R, P, L]
    there = member.any(-1).astype(jnp.float32)  # [R, P]
    losses, right = 0.0, True
    for i in (0, 1):
      scores = jnp.where(member, logits[:, None, :, i], MASKED)  # [R, P, L]
      chosen = jnp.where(batch.token_targets[:, None, :, i] > 0, scores, 0)
      chosen = jnp.where(member, chosen, 0).sum(-1)
      losses += 0.5 * (jax.nn.logsumexp(scores, axis=-1) - chosen)
      right &= chosen >= scores.max(-1)
    return {'loss': weighted(losses, there), 'accuracy': weighted(right, there)}

  def candidates(self, split: Split, outputs: list[Output]) -> list[tuple[list[Span], float]]:
    """The best spans of each question, and the score of no answer."""
    logits = iter(by_input(outputs, len(split.batches.features.inputs)))
    return [answers.best_spans(context, [next(logits) for _ in context.windows],
                               n_best=self.n_best, max_answer_len=self.max_answer_len)
            for context in self.contexts[split.name]]

  def predicted(self, split: Split, candidates: Sequence[tuple[list[Span], float]],
                null_threshold: float | None) -> dict[str, str]:
    """id -> the answer."""
    return {q.id: answers.answer(q.context, spans, null, null_threshold)['answer']
            for q, (spans, null) in zip(split.examples, candidates)}

  def scores(self, split: Split, outputs: list[Output]) -> dict[str, float]:
    """Exact match and F1 of the official scorers; for v2.0 also with the best threshold."""
    found = self.candidates(split, outputs)
    unanswerable = self.null_threshold is not None
    scores = scores_lib.answers(split.examples, self.predicted(split, found, self.null_threshold),
                                unanswerable=unanswerable)
    if not unanswerable:
      return scores
    above = [null - spans[0].score if spans else np.inf for spans, null in found]
    return scores | scores_lib.best_threshold(
        split.examples, self.predicted(split, found, np.inf), above)


def create(config: ConfigDict, model: BertConfig, tokenizer: Tokenizer,
           splits: Splits) -> QuestionAnswering:
  """The task that a config describes.

  Raises:
    UserError: something is wrong with the data.
  """
  data = config.data

  def windows(questions, path):
    try:
      return answers.read([(q.question, q.context) for q in questions], tokenizer, config.max_len,
                          data.doc_stride)
    except UserError as e:
      raise UserError(f'{path}: {e}') from e

  questions = not_empty(squad.read(data.train), data.train)
  train = [q for q in questions if q.in_place]
  notes = ()
  if len(train) < len(questions):
    notes = (f'{len(questions) - len(train):,} of {len(questions):,} questions of {data.train} are '
             'left out: their answer does not stand where it is said to',)
  train = not_empty(train, f'{data.train} (of questions whose answer stands at its place)')
  unanswerable = any(not q.answers for q in train)
  made = features(train, windows(train, data.train), by_window=True)

  evals, contexts = [], {}
  for name, path in eval_files(config):
    asked = not_empty(squad.read(path), path)
    contexts[name] = windows(asked, path)
    evals.append(splits.evaluation(name, asked, features(asked, contexts[name], by_window=False)))
  return QuestionAnswering(
      BertForQuestionAnswering(model), SPAN_LABELS, splits.train(train, made), tuple(evals),
      notes=notes, feed=splits.feed, contexts=contexts, n_best=data.n_best,
      max_answer_len=data.max_answer_len,
      null_threshold=data.null_threshold if unanswerable else None)
