"""Minimal pairs from a small grammar, in BLiMP's format, for choosing a recipe.

  python -m benchmarks.grammar grammar.jsonl

The paradigms are about agreement, anaphora, gaps and islands, negative polarity and
argument structure, with words of our own. A recipe is chosen with these pairs, so BLiMP
stays unseen until it scores the recipe. The two sentences of a pair have the same number
of words, so that the length does not decide. The file is always the same.
"""

from collections.abc import Callable, Iterator
import itertools
import json
import pathlib
import random
import sys

_PAIRS = 250  # of each paradigm


# singular, plural
_PEOPLE = [('teacher', 'teachers'), ('doctor', 'doctors'), ('farmer', 'farmers'),
           ('child', 'children'), ('soldier', 'soldiers'), ('student', 'students'),
           ('writer', 'writers'), ('friend', 'friends'), ('worker', 'workers'),
           ('neighbor', 'neighbors')]
_THINGS = [('book', 'books'), ('letter', 'letters'), ('house', 'houses'), ('song', 'songs'),
           ('picture', 'pictures'), ('story', 'stories'), ('stone', 'stones'),
           ('map', 'maps'), ('flower', 'flowers'), ('door', 'doors')]
_MALE = ['king', 'father', 'brother', 'uncle', 'son', 'husband', 'boy', 'man']
_FEMALE = ['queen', 'mother', 'sister', 'aunt', 'daughter', 'wife', 'girl', 'woman']
# singular, plural, past
_INTRANSITIVE = [('sleeps', 'sleep', 'slept'), ('arrives', 'arrive', 'arrived'),
                 ('laughs', 'laugh', 'laughed'), ('falls', 'fall', 'fell'),
                 ('smiles', 'smile', 'smiled'), ('waits', 'wait', 'waited')]
# past, participle, base. 'lost' needs no object ("the team lost"): the pairs that judged the
# published ablations have it, so it stays.
_TRANSITIVE = [('found', 'found', 'find'), ('saw', 'seen', 'see'), ('made', 'made', 'make'),
               ('took', 'taken', 'take'), ('brought', 'brought', 'bring'),
               ('kept', 'kept', 'keep'), ('lost', 'lost', 'lose')]
_PLACES = ['in the garden', 'near the river', 'at the station', 'after the war',
           'in the morning', 'on the road']

Pairs = Iterator[tuple[str, str]]


def _subject_verb() -> Pairs:
  for (one, many), (sings, sing, _), place in itertools.product(
      _PEOPLE, _INTRANSITIVE, _PLACES):
    yield f'The {one} {sings} {place}.', f'The {one} {sing} {place}.'
    yield f'The {many} {sing} {place}.', f'The {many} {sings} {place}.'


def _subject_verb_over_a_phrase() -> Pairs:
  for (one, many), (near, nears), (sings, sing, _) in itertools.product(
      _PEOPLE, _THINGS, _INTRANSITIVE):
    yield f'The {one} with the {nears} {sings}.', f'The {one} with the {nears} {sing}.'
    yield f'The {many} with the {near} {sing}.', f'The {many} with the {near} {sings}.'


def _be() -> Pairs:
  for (one, many), adjective, tense in itertools.product(
      _PEOPLE + _THINGS, ['old', 'new', 'good', 'small', 'famous'],
      [('is', 'are'), ('was', 'were')]):
    yield f'The {one} {tense[0]} very {adjective}.', f'The {one} {tense[1]} very {adjective}.'
    yield f'The {many} {tense[1]} very {adjective}.', f'The {many} {tense[0]} very {adjective}.'


def _determiner_noun() -> Pairs:
  for (person, _), (verb, _, _), (one, many) in itertools.product(
      _PEOPLE, _TRANSITIVE, _THINGS):
    for this, these in (('this', 'these'), ('that', 'those')):
      yield f'The {person} {verb} {this} {one}.', f'The {person} {verb} {this} {many}.'
      yield f'The {person} {verb} {these} {many}.', f'The {person} {verb} {these} {one}.'


def _reflexive_gender() -> Pairs:
  for people, right, wrong in ((_MALE, 'himself', 'herself'), (_FEMALE, 'herself', 'himself')):
    for person, (verb, _, _), place in itertools.product(people, _TRANSITIVE, _PLACES):
      yield f'The {person} {verb} {right} {place}.', f'The {person} {verb} {wrong} {place}.'


def _reflexive_number() -> Pairs:
  for (_, many), (verb, _, _), wrong, place in itertools.product(
      _PEOPLE, _TRANSITIVE, ['himself', 'herself'], _PLACES):
    yield f'The {many} {verb} themselves {place}.', f'The {many} {verb} {wrong} {place}.'


def _what_or_that() -> Pairs:
  for we, know, (person, _), place in itertools.product(
      ['We', 'They', 'I'], ['know', 'heard', 'remember'], _PEOPLE, _PLACES):
    for (found, _, _), (_, _, slept) in zip(_TRANSITIVE, itertools.cycle(_INTRANSITIVE)):
      yield (f'{we} {know} what the {person} {found} {place}.',
             f'{we} {know} that the {person} {found} {place}.')
      yield (f'{we} {know} that the {person} {slept} {place}.',
             f'{we} {know} what the {person} {slept} {place}.')


def _wh_island() -> Pairs:
  for (first, _), (second, _), (verb, _, _), why in itertools.product(
      _PEOPLE, _PEOPLE, _TRANSITIVE, ['why', 'when', 'whether']):
    if first != second:
      yield (f'What did the {first} say that the {second} {verb}?',
             f'What did the {first} ask {why} the {second} {verb}?')


def _relative_gap() -> Pairs:
  for (person, _), (thing, _), (verb, _, _), adjective in itertools.product(
      _PEOPLE, _THINGS, _TRANSITIVE, ['old', 'new', 'small']):
    yield (f'The {thing} that the {person} {verb} was {adjective}.',
           f'The {thing} that the {person} slept was {adjective}.')


def _ever() -> Pairs:
  for (one, _), (_, participle, _), (_, things) in itertools.product(
      _PEOPLE, _TRANSITIVE, _THINGS):
    yield (f'No {one} has ever {participle} the {things}.',
           f'The {one} has ever {participle} the {things}.')


def _any() -> Pairs:
  for (one, _), (_, _, verb), (_, things) in itertools.product(
      _PEOPLE, _TRANSITIVE, _THINGS):
    yield (f'The {one} did not {verb} any {things}.',
           f'The {one} did soon {verb} any {things}.')


def _object_needed() -> Pairs:
  for (person, _), (_, _, slept), (made, _, _), place in itertools.product(
      _PEOPLE, _INTRANSITIVE, _TRANSITIVE, _PLACES):
    yield f'The {person} {slept} {place}.', f'The {person} {made} {place}.'


def _passive() -> Pairs:
  for (thing, _), (_, seen, _), (_, _, slept), (person, _) in itertools.product(
      _THINGS, _TRANSITIVE, _INTRANSITIVE, _PEOPLE):
    yield (f'The {thing} was {seen} by the {person}.',
           f'The {thing} was {slept} by the {person}.')


def _existential() -> Pairs:
  for (one, _), place, (some, every) in itertools.product(
      _PEOPLE + _THINGS, _PLACES, [('a', 'the'), ('a', 'every'), ('one', 'each')]):
    yield f'There was {some} {one} {place}.', f'There was {every} {one} {place}.'


# paradigm: (phenomenon, its pairs)
PARADIGMS: dict[str, tuple[str, Callable[[], Pairs]]] = {
    'subject_verb': ('agreement', _subject_verb),
    'subject_verb_over_a_phrase': ('agreement', _subject_verb_over_a_phrase),
    'be': ('agreement', _be),
    'determiner_noun': ('agreement', _determiner_noun),
    'reflexive_gender': ('anaphora', _reflexive_gender),
    'reflexive_number': ('anaphora', _reflexive_number),
    'what_or_that': ('gaps_and_islands', _what_or_that),
    'wh_island': ('gaps_and_islands', _wh_island),
    'relative_gap': ('gaps_and_islands', _relative_gap),
    'ever': ('npi', _ever),
    'any': ('npi', _any),
    'object_needed': ('argument_structure', _object_needed),
    'passive': ('argument_structure', _passive),
    'existential': ('argument_structure', _existential)}


def make(number: int) -> Iterator[dict[str, str]]:
  """Yields `number` pairs of each paradigm (fewer if it has fewer), with BLiMP's fields."""
  for name, (phenomenon, pairs) in PARADIGMS.items():
    every = list(dict.fromkeys(pairs()))
    for good, bad in random.Random(name).sample(every, min(number, len(every))):
      yield {'sentence_good': good, 'sentence_bad': bad, 'UID': name,
             'linguistics_term': phenomenon}


def main(path: str):
  """Writes the file."""
  lines = [json.dumps(pair) + '\n' for pair in make(_PAIRS)]
  pathlib.Path(path).write_text(''.join(lines))
  print(f'{len(lines):,} pairs of {len(PARADIGMS)} paradigms in {path}')


if __name__ == '__main__':
  main(*sys.argv[1:])
