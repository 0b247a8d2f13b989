"""Mines hard negatives: documents near a query that are not its positives."""

from collections.abc import Sequence
from typing import Any

from etils import epath
import numpy as np

from bert_jax.errors import require
from bert_jax.inference import beir, json_lines, search, stored_vectors
from bert_jax.inference.bert import Bert, load, load_cross_encoder
from bert_jax.interop.sentence_layout import DOCUMENT_PROMPTS, QUERY_PROMPTS
from bert_jax.labelled import table
from bert_jax.runtime import console, storage
from bert_jax.tasks import reranking


def _vectors(bert: Bert, texts: Sequence[str], path: epath.Path,
             prompts: Sequence[str], **options) -> dict[str, np.ndarray]:
  """Returns {text: its vector, [D] float32}; stores the vectors at `path`."""
  texts = list(dict.fromkeys(texts))
  stored_vectors.write(bert, texts, len(texts), json_lines.digest(texts), path, prompts,
                       **options)
  return dict(zip(texts, np.load(path)))


def _positives(pairs: Sequence[tuple[str, str]],
               texts: beir.Texts) -> dict[str, set[int]]:
  """Returns the corpus indices of each query's positives, matched with or without title."""
  places: dict[str, list[int]] = {positive: [] for _, positive in pairs}
  for i, (_, *with_and_without_title) in enumerate(texts.read()):
    for text in set(with_and_without_title) & places.keys():
      places[text].append(i)
  numbers: dict[str, set[int]] = {}
  for query, positive in pairs:
    numbers.setdefault(query, set()).update(places[positive])
  absent = sum(not places[positive] for _, positive in pairs)
  if absent:
    console.print_summary([
        ('note', f'{absent:,} of {len(pairs):,} pairs have a positive that is not in the '
                 'corpus: no text is excluded for them')])
  return numbers


def _negatives(candidates: Sequence[Sequence[int]], texts: beir.Texts,
               count: int) -> list[list[int]]:
  """Returns the first `count` different texts of each line, by their indices.

  All lines have the same columns, so a line with fewer texts is left out.
  """
  needed = {i for indices in candidates for i in indices}
  index_of: dict[str, int] = {}
  first = {i: index_of.setdefault(text, i) for i, text in enumerate(texts) if i in needed}
  chosen = [[*dict.fromkeys(first[i] for i in indices)][:count] for indices in candidates]
  return [indices if len(indices) == count else [] for indices in chosen]


def _check(given: dict[str, str], columns: Sequence[str], ranks: Sequence[int],
           count: int):
  """Raises UserError for a missing flag, wrong columns or ranks, or too few ranks."""
  for name, value in given.items():
    require(bool(value), f'give --{name}')
  require(len(columns) == 2,
          f'--columns={",".join(columns)} must name the query and the positive')
  require(len(ranks) == 2 and 1 <= ranks[0] <= ranks[1],
          f'--ranks={",".join(map(str, ranks))} must be a first rank from 1 on and a last '
          'one')
  require(count <= ranks[1] - ranks[0] + 1,
          f'--count={count} negatives do not fit into --ranks={ranks[0]},{ranks[1]}: '
          'give more ranks or a smaller count')


def _pairs(source: str, query: str, positive: str) -> list[tuple[str, str]]:
  """Reads the columns `query` and `positive`; raises UserError for an empty file."""
  pairs = [(row.text(query), row.text(positive))
           for row in table.read(source, 'auto', 'train')]
  require(bool(pairs), f'{source} holds no pair')
  return pairs


def mine(model: str, source: str, corpus: str, output: str, *,
         columns: Sequence[str] = ('query', 'positive'), ranks: tuple[int, int] = (1, 50),
         count: int = 1, margin: float = 0.05, pooling: str | None = None,
         max_len: int | None = None, teacher: str = '', step: int | None = None,
         allow_older: bool = False):
  """Mines hard negatives for pairs of a query and a positive, and writes JSON lines.

  A line is {"query", "positive", "negative_1", ..., "negatives"}, the hardest negative
  first, and with a teacher "scores". A killed job resumes from OUTPUT.queries.npy and two
  more files of vectors.

  Args:
    model: a folder or a name, loaded with `step` and `allow_older`: see `bert.load`.
    source: a table of pairs, a query and a positive in each row.
    corpus: JSON lines {"_id", "title", "text"}, the title optional. A positive of the
      query is never its negative.
    output: the file to write.
    columns: the columns of the query and the positive.
    ranks: the first and the last rank of the negatives, from 1.
    count: negatives of a pair; pairs with fewer are left out.
    margin: a negative's cosine is at least this far below the positive's. A nearer
      document is often a positive (Moreira et al. 2024, arXiv:2407.15831).
    pooling, max_len: see `Bert.embed`.
    teacher: a cross-encoder that scores the positive and the negatives of each line; '' =
      none.

  Raises:
    UserError: a mistake in the arguments or the files.
  """
  _check({'model': model, 'input': source, 'corpus': corpus, 'output': output}, columns,
         ranks, count)
  # Read both files before the model: a mistake in them shows at once.
  pairs = _pairs(source, *columns)
  texts, path = beir.Texts(epath.Path(corpus)), epath.Path(output)
  require(bool(texts.ids), f'{corpus} holds no text')
  storage.make_parent('--output', path)
  bert = load(model, step, allow_older)
  options: dict[str, Any] = {'pooling': pooling, 'max_len': max_len}
  scorer = load_cross_encoder(teacher)  # before the search, which takes long
  query_file, positive_file, documents = (path.parent / f'{path.name}.{name}.npy'
                                          for name in ('queries', 'positives', 'corpus'))
  all_queries, all_positives = zip(*pairs)
  queries = _vectors(bert, all_queries, query_file, QUERY_PROMPTS, **options)
  positives = _vectors(bert, all_positives, positive_file, DOCUMENT_PROMPTS, **options)
  stored_vectors.write(bert, texts, len(texts.ids), texts.digest, documents,
                       DOCUMENT_PROMPTS, **options)
  excluded = _positives(pairs, texts)
  # Positives get no rank. So each query needs as many further hits as it has positives.
  depth = ranks[1] + max(map(len, excluded.values()))
  hits = search.search(np.stack(list(queries.values())), documents, depth)
  near = {query: [(i, score) for i, score in zip(*of_query) if i not in excluded[query]]
          for query, *of_query in zip(queries, hits.numbers.tolist(), hits.scores.tolist())}
  candidates = [[i for i, score in near[query][ranks[0] - 1:ranks[1]]
                 if score <= queries[query] @ positives[positive] - margin]
                for query, positive in pairs]
  chosen = _negatives(candidates, texts, count)
  require(any(chosen),
          f'no pair has {count} negatives: widen --ranks, or lower --margin or --count')
  _write(pairs, chosen, texts, path, scorer)


def _write(pairs: Sequence[tuple[str, str]], chosen: Sequence[Sequence[int]],
           texts: beir.Texts, path: epath.Path, scorer: Bert | None):
  """Writes the pairs with their negatives; `chosen` has indices into the corpus."""
  needed = {i for numbers in chosen for i in numbers}
  text_of = {i: text for i, text in enumerate(texts) if i in needed}
  with json_lines.partial(path) as (sink, _):
    for (query, positive), numbers in zip(pairs, chosen):
      if numbers:
        negatives = [text_of[i] for i in numbers]
        named = {f'negative_{n}': text for n, text in enumerate(negatives, 1)}
        scores = {} if not scorer else {'scores': reranking.pair_logits(
            scorer, [(query, text) for text in (positive, *negatives)]).tolist()}
        json_lines.write(sink, {'query': query, 'positive': positive, **named,
                                'negatives': negatives, **scores})
  full = sum(map(bool, chosen))
  console.print_summary([
      ('pairs', f'{full:,} with their negatives, {len(pairs) - full:,} with too few are left '
                'out')])
