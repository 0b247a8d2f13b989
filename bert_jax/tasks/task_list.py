"""The fine-tuning tasks. A new task is one file beside this one, and its line in ALL."""

from bert_jax.tasks import (
  multiple_choice,
  question_answering,
  sentence_embedding,
  sequence_classification,
  token_classification,
)

ALL = {module.KIND.name: module.KIND for module in (
    sequence_classification,
    token_classification,
    question_answering,
    multiple_choice,
    sentence_embedding,
)}
WITH_HEAD = {name: kind for name, kind in ALL.items() if kind.parts}
