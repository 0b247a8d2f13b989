"""Hard negatives: documents that a model takes for a query's, and that are not its positives."""

from collections.abc import Sequence
import hashlib
import json

from etils import epath
import numpy as np

from bert_jax.errors import require
from bert_jax.inference import beir, json_lines, search, stored_vectors
from bert_jax.inference import bert as bert_lib
from bert_jax.interop.sentence_layout import DOCUMENT, QUERY
from bert_jax.labelled import table
from bert_jax.runtime import storage
from bert_jax.runtime.console import print_summary


def _vectors(bert: bert_lib.Bert, texts: Sequence[str], path: epath.Path,
             prompts: Sequence[str], **options) -> dict[str, np.ndarray]:
  """The vector of each text."""
  texts = list(dict.fromkeys(texts))
  digest = hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).hexdigest()
  stored_vectors.write(bert, texts, len(texts), digest, path, prompts, **options)
  return dict(zip(texts, np.load(path)))


def _positives(pairs: Sequence[tuple[str, str]],
               texts: beir.Texts) -> dict[str, set[int]]:
  """The numbers of the texts that are positives of each query, with their title or without."""
  places = {positive: [] for _, positive in pairs}
  for i, writings in enumerate(texts.with_and_without_title()):
    for writing in set(writings) & places.keys():
      places[writing].append(i)
  numbers = {}
  for query, positive in pairs:
    numbers.setdefault(query, set()).update(places[positive])
  return numbers


def mine(model: str, source: str, corpus: str, output: str, *,
         columns: Sequence[str] = ('query', 'positive'), ranks: tuple[int, int] = (1, 50),
         count: int = 1, margin: float = 0.05, pooling: str | None = None,
         max_len: int | None = None, step: int | None = None, allow_older: bool = False):
  """Writes JSON lines {"query", "positive", "negative_1", ..., "negatives"}, the hardest first.

  After a kill it goes on; OUTPUT.corpus.npy and others beside it have the vectors. A pair with
  fewer than `count` negatives is left out.

  Args:
    model: a folder or a name, as `load` takes it with `step` and `allow_older`.
    source: a table of pairs, a query and a positive in each row.
    corpus: JSON lines {"_id", "title", "text"}, the title optional; a text of it that is a
      positive of the query is no negative.
    output: the file.
    columns: of the query and the positive.
    ranks: the first and the last rank, from 1, of documents that are taken.
    count: negatives of a pair.
    margin: the cosine of a negative is at least so much below that of the positive (Moreira et al.
      2024, https://arxiv.org/abs/2407.15831: a nearer document is often a positive).
    pooling, max_len: as for `Bert.embed`.

  Raises:
    UserError: a mistake in the arguments or the files.
  """
  for name, value in (('model', model), ('input', source), ('corpus', corpus), ('output',
                                                                                output)):
    require(bool(value), f'give --{name}')
  require(
      len(columns) == 2,
      f'--columns={",".join(columns)} must name the query and the positive')
  require(
      len(ranks) == 2 and 1 <= ranks[0] <= ranks[1],
      f'--ranks={",".join(map(str, ranks))} must be a first rank from 1 on and a last one'
  )
  pairs = [tuple(map(row.text, columns)) for row in table.read(source, 'auto', 'train')]
  require(bool(pairs), f'{source} holds no pair')
  texts, path = beir.Texts(epath.Path(corpus)), epath.Path(output)
  require(bool(texts.ids), f'{corpus} holds no text')
  storage.make_parent('--output', path)
  bert, options = bert_lib.load(model, step, allow_older), {
      'pooling': pooling,
      'max_len': max_len
  }
  query_file, positive_file, documents = (path.parent / f'{path.name}.{name}.npy'
                                          for name in ('queries', 'positives', 'corpus'))
  queries = _vectors(bert, [query for query, _ in pairs], query_file, QUERY, **options)
  positives = _vectors(bert, [positive for _, positive in pairs], positive_file, DOCUMENT,
                       **options)
  stored_vectors.write(bert, texts, len(texts.ids), texts.digest, documents, DOCUMENT,
                       **options)

  excluded = _positives(pairs, texts)
  strangers = sum(not excluded[query] for query, _ in pairs)
  if strangers:
    print_summary([('note',
                    f'{strangers:,} of {len(pairs):,} pairs have no positive in the '
                    'corpus: none of its texts is excluded for them')])
  hits = search.search(np.stack(list(queries.values())), documents,
                       ranks[1] + max(map(len, excluded.values())))
  near = {query: [(i, score) for i, score in zip(*of_query) if i not in excluded[query]]
          for query, *of_query in zip(queries, hits.index.tolist(), hits.scores.tolist())}
  chosen = [[i for i, score in near[query][ranks[0] - 1:ranks[1]]
             if score <= queries[query] @ positives[positive] - margin][:count]
            for query, positive in pairs]
  chosen = [numbers if len(numbers) == count else [] for numbers in chosen]
  require(any(chosen),
          f'no pair has {count} negatives: widen --ranks, or lower --margin or --count')
  _write(pairs, chosen, texts, path)


def _write(pairs: Sequence[tuple[str, str]], chosen: Sequence[Sequence[int]],
           texts: beir.Texts, path: epath.Path):
  """Writes the pairs with their negatives, which `chosen` numbers in the corpus."""
  needed = {i for numbers in chosen for i in numbers}
  text_of = {i: text for i, text in enumerate(texts) if i in needed}
  with json_lines.partial(path) as (sink, _):
    for (query, positive), numbers in zip(pairs, chosen):
      if numbers:
        negatives = [text_of[i] for i in numbers]
        named = {f'negative_{n}': text for n, text in enumerate(negatives, 1)}
        json_lines.write(sink, {'query': query, 'positive': positive, **named,
                                'negatives': negatives})
  full = sum(map(bool, chosen))
  print_summary([
      ('pairs', f'{full:,} with their negatives, {len(pairs) - full:,} with too few are '
       'left out')
  ])
