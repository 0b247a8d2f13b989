"""Questions on a text: SQuAD v1.1 and v2.0 files (Rajpurkar et al. 2016, 2018)."""

import collections
from typing import NamedTuple

from bert_jax.errors import UserError, require
from bert_jax.labelled import table
from bert_jax.runtime import storage


class Question(NamedTuple):
  """A question on a text, and the answers that people gave."""

  id: str
  question: str
  context: str  # the text
  answers: tuple[str, ...]  # none = it cannot be answered from the text
  starts: tuple[int, ...]  # where in the context each answer begins, in characters

  @property
  def in_place(self) -> bool:
    """True if the first answer stands at its place, or there is none."""
    return not self.answers or (
        self.starts[0] >= 0 and self.context.startswith(self.answers[0], self.starts[0]))


def read(path: str) -> list[Question]:
  """The questions of a file; raises UserError if it is not in SQuAD's format."""
  try:
    articles = storage.parse_json(table.read_text(path))['data']
    questions = [_question(qa, paragraph['context'])
                 for article in articles for paragraph in article['paragraphs']
                 for qa in paragraph['qas']]
  except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
    raise UserError(f'{path} is not in SQuAD\'s format (data, paragraphs, qas): '
                    f'{type(e).__name__} {e}') from e
  for name, count in collections.Counter(question.id for question in questions).items():
    require(count == 1, f'{path}: the id {name!r} is there twice')
  return questions


def _question(qa: dict, context: str) -> Question:
  is_impossible = qa.get('is_impossible', False)
  if is_impossible not in (False, True, None):
    raise TypeError(f'is_impossible is {is_impossible!r}, not true or false')
  answers = [] if is_impossible else qa['answers']
  texts = [qa['question'], context, *(answer['text'] for answer in answers)]
  if not all(isinstance(text, str) for text in texts):
    raise TypeError('a question, a context or an answer is no string')
  if not all(answer['text'].strip() for answer in answers):
    raise ValueError(f'the question {qa["id"]!r} has an empty answer: where there is none, answers '
                     'is []')
  return Question(str(qa['id']), qa['question'], context, tuple(a['text'] for a in answers),
                  tuple(int(a.get('answer_start', -1)) for a in answers))
