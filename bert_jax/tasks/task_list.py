"""The fine-tuning tasks. A new task is one file beside this one, and its line in ALL."""

from bert_jax.tasks import (
  multiple_choice,
  question_answering,
  reranking,
  sentence_embedding,
  sequence_classification,
  token_classification,
)

ALL = {task.name: task for task in (
    sequence_classification.SequenceClassification,
    token_classification.TokenClassification,
    question_answering.QuestionAnswering,
    multiple_choice.MultipleChoice,
    sentence_embedding.SentenceEmbedding,
    reranking.Reranking,
)}
WITH_HEAD = {name: task for name, task in ALL.items() if task.parts}
