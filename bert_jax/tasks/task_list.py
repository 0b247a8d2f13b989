"""The fine-tuning tasks; a new task is one file, its import here and its line in ALL."""

from bert_jax.tasks import (
  late_interaction,
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
    late_interaction.LateKind,
    reranking.RerankingKind,
)}
# The tasks whose models have their own head.
WITH_HEAD = {name: kind for name, kind in ALL.items() if hasattr(kind, 'head')}
