"""The fine-tuning tasks. A new task is one file here, its import and its line in ALL."""

from bert_jax.tasks import (
  multiple_choice,
  question_answering,
  reranking,
  sentence_embedding,
  sequence_classification,
  sparse_embedding,
  token_classification,
)

ALL = {kind.name: kind for kind in (
    sequence_classification.SequenceKind,
    token_classification.TokenKind,
    question_answering.QuestionKind,
    multiple_choice.ChoiceKind,
    sentence_embedding.EmbeddingKind,
    sparse_embedding.SparseKind,
    reranking.RerankingKind,
)}
# Their models have a head of their own.
WITH_HEAD = {name: kind for name, kind in ALL.items() if hasattr(kind, 'head')}
