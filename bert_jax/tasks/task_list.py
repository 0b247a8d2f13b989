"""The fine-tuning tasks. A new task is one file beside this one, and its line in ALL."""

from bert_jax.tasks import (
  multiple_choice,
  question_answering,
  reranking,
  sentence_embedding,
  sequence_classification,
  sparse_embedding,
  token_classification,
)

ALL = {task.name: task for task in (
    sequence_classification.SequenceClassification,
    token_classification.TokenClassification,
    question_answering.QuestionAnswering,
    multiple_choice.MultipleChoice,
    sentence_embedding.SentenceEmbedding,
    sparse_embedding.SparseEmbedding,
    reranking.Reranking,
)}
# Their models have a head of their own.
WITH_HEAD = {name: task for name, task in ALL.items() if hasattr(task, 'head')}
