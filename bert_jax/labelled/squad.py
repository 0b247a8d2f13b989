"""Reads questions about texts: SQuAD v1.1 and v2.0 (Rajpurkar et al. 2016, 2018)."""

import collections
from typing import NamedTuple

from bert_jax.errors import UserError, require
from bert_jax.labelled import table
from bert_jax.runtime import storage


class Question(NamedTuple):
  """A question about a text, and the answers that annotators gave."""

  id: str
  question: str
  context: str  # the text
  answers: tuple[str, ...]  # () = the text has no answer
  starts: tuple[int, ...]  # the offset of each answer in the context, in characters

  @property
  def in_place(self) -> bool:
    """True if the context has the first answer at its offset, or no answer is given."""
    return not self.answers or (
        self.starts[0] >= 0 and self.context.startswith(self.answers[0], self.starts[0]))


def read(path: str, labelled: bool = True) -> list[Question]:
  """Returns the questions of a file.

  Args:
    path: the file.
    labelled: False = the answers are not read, and may be missing.

  Raises:
    UserError: the file is not in SQuAD's format.
  """
  # The JSON may have any structure. All errors from a wrong structure are one UserError.
  try:
    articles = storage.parse_json(table.read_text(path))['data']
    questions = [_question(qa, paragraph['context'], labelled)
                 for article in articles for paragraph in article['paragraphs']
                 for qa in paragraph['qas']]
  except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
    raise UserError(f'{path} is not in SQuAD\'s format (data, paragraphs, qas): '
                    f'{type(e).__name__} {e}') from e
  for name, count in collections.Counter(question.id for question in questions).items():
    require(count == 1, f'{path}: the id {name!r} appears {count} times')
  return questions


def _question(qa: dict, context: str, labelled: bool) -> Question:
  is_impossible = qa.get('is_impossible', False)
  if is_impossible not in (False, True, None):
    raise TypeError(f'is_impossible is {is_impossible!r}, not true or false')
  # SQuAD v2.0 may list plausible answers of an impossible question: they are wrong.
  answers = qa['answers'] if labelled and not is_impossible else []
  texts = [qa['question'], context, *(answer['text'] for answer in answers)]
  if not all(isinstance(text, str) for text in texts):
    raise TypeError('a question, a context or an answer is not a string')
  if not all(answer['text'].strip() for answer in answers):
    raise ValueError(f'the question {qa["id"]!r} has an empty answer: if the text has no '
                     'answer, answers must be []')
  return Question(id=str(qa['id']),
                  question=qa['question'],
                  context=context,
                  answers=tuple(answer['text'] for answer in answers),
                  starts=tuple(int(answer.get('answer_start', -1)) for answer in answers))
