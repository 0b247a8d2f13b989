"""Hard negatives: documents that a model takes for a query's, and that are not its positives."""

from collections.abc import Sequence
import hashlib
import json

from etils import epath
import numpy as np

from bert_jax.errors import UserError, require
from bert_jax.inference import beir, json_lines, search, stored_vectors
from bert_jax.inference import bert as bert_lib
from bert_jax.labelled import table
from bert_jax.runtime.console import print_summary


def _vectors(bert: bert_lib.Bert, texts: Sequence[str], path: epath.Path,
             **options) -> dict[str, np.ndarray]:
  """The vector of each text."""
  texts = list(dict.fromkeys(texts))
  digest = hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).hexdigest()
  stored_vectors.write(bert, texts, len(texts), digest, path, **options)
  return dict(zip(texts, np.load(path)))


def mine(model: str, source: str, corpus: str, output: str, *,
         columns: Sequence[str] = ('query', 'positive'), ranks: tuple[int, int] = (1, 50),
         count: int = 1, margin: float = 0.05, pooling: str = 'mean', max_len: int | None = None,
         step: int | None = None, allow_older: bool = False):
  """Writes JSON lines {"query", "positive", "negative", "negatives"}, the hardest negative first.

  After a kill it goes on; OUTPUT.corpus.npy and others beside it have the vectors. A pair without a
  negative is left out.

  Args:
    model: a folder or a name, as `load` takes it with `step` and `allow_older`.
    source: a table of pairs, a query and a positive in each row.
    corpus: JSON lines {"_id", "title", "text"}, the title optional; a text of it that is a
      positive of the query is no negative.
    output: the file.
    columns: of the query and the positive.
    ranks: the first and the last rank, from 1, of documents that are taken.
    count: negatives of a pair at most.
    margin: the cosine of a negative is at least so much below that of the positive (Moreira et al.
      2024, https://arxiv.org/abs/2407.15831: a nearer document is often a positive).
    pooling, max_len: as for `Bert.embed`.

  Raises:
    UserError: a mistake in the arguments or the files.
  """
  for name, value in (('model', model), ('input', source), ('corpus', corpus), ('output', output)):
    require(bool(value), f'give --{name}')
  require(len(columns) == 2, f'--columns={",".join(columns)} must name the query and the positive')
  require(len(ranks) == 2 and 1 <= ranks[0] <= ranks[1],
          f'--ranks={",".join(map(str, ranks))} must be a first rank from 1 on and a last one')
  pairs = [tuple(map(row.text, columns)) for row in table.read(source, 'auto', 'train')]
  require(bool(pairs), f'{source} holds no pair')
  texts, path = beir.Texts(epath.Path(corpus)), epath.Path(output)
  require(bool(texts.ids), f'{corpus} holds no text')
  path.parent.mkdir(parents=True, exist_ok=True)
  bert, options = bert_lib.load(model, step, allow_older), {'pooling': pooling, 'max_len': max_len}
  queries, positives, documents = (path.parent / f'{path.name}.{name}.npy'
                                   for name in ('queries', 'positives', 'corpus'))
  queries = _vectors(bert, [query for query, _ in pairs], queries, **options)
  positives = _vectors(bert, [positive for _, positive in pairs], positives, **options)
  stored_vectors.write(bert, texts, len(texts.ids), texts.digest, documents, **options)

  places = {}  # of the positives in the corpus
  for i, text in enumerate(texts):
    if text in positives:
      places.setdefault(text, []).append(i)
  excluded = {}  # of each query
  for query, positive in pairs:
    excluded.setdefault(query, set()).update(places.get(positive, ()))
  hits = search.search(np.stack(list(queries.values())), documents,
                       ranks[1] + max(map(len, excluded.values())))
  near = {query: [(i, score) for i, score in zip(*of_query) if i not in excluded[query]]
          for query, *of_query in zip(queries, hits.index.tolist(), hits.scores.tolist())}
  chosen = [[i for i, score in near[query][ranks[0] - 1:ranks[1]]
             if score <= queries[query] @ positives[positive] - margin][:count]
            for query, positive in pairs]
  _write(pairs, chosen, texts, path)


def _write(pairs: Sequence[tuple[str, str]], chosen: Sequence[Sequence[int]], texts: beir.Texts,
           path: epath.Path):
  """Writes the pairs with their negatives, which `chosen` numbers in the corpus."""
  needed = {i for numbers in chosen for i in numbers}
  if not needed:
    raise UserError('no pair has a negative: widen --ranks, or lower --margin')
  text_of = {i: text for i, text in enumerate(texts) if i in needed}
  with json_lines.partial(path) as (sink, _):
    for (query, positive), numbers in zip(pairs, chosen):
      if numbers:
        negatives = [text_of[i] for i in numbers]
        json_lines.write(sink, {'query': query, 'positive': positive, 'negative': negatives[0],
                                'negatives': negatives})
  without = sum(not numbers for numbers in chosen)
  print_summary([('pairs', f'{len(pairs) - without:,} with {sum(map(len, chosen)):,} negatives, '
                           f'{without:,} without one are left out')])
