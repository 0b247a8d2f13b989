"""The views of the command `explore`."""

from collections.abc import Sequence
import functools

from etils import epath

from bert_jax.errors import UserError, require, require_flag
from bert_jax.inference.bert import Bert, load
from bert_jax.runtime import storage
from bert_jax.views import attention_page
from bert_jax.views import words as words_lib


def _attention(bert: Bert, texts: Sequence[str], output: str | None, layer: int | None,
               head: int | None):
  attention = attention_page.attention(bert, *texts)
  if output.endswith('.html'):
    attention_page.write_html(attention, output)
  else:
    attention_page.write_png(attention, output, layer, head)
  layers, heads, length, _ = attention.weights.shape
  print(f'{output}: {length} tokens, {layers} layers of {heads} heads')


def _contexts(bert: Bert, texts: Sequence[str], words: Sequence[str]):
  for layer, cosine in enumerate(words_lib.similarities(bert, texts, words[0])):
    name = f'layer {layer}' if layer else 'embeddings'
    print(f'{name:<12} {cosine:6.3f}  {"#" * round(40 * max(cosine, 0))}')


def _table(bert: Bert, words: Sequence[str], output: str | None, analogy: bool):
  table = words_lib.TokenTable(bert)
  if analogy:
    results = [(f'{words[1]} - {words[0]} + {words[2]}', table.analogy(*words))]
  else:
    results = ((word, table.neighbours(word)) for word in words)
  # The map has the words as the user spells them, and entries for their neighbors.
  shown = {table.id_of(word): word for word in words}
  for title, nearest in results:
    print(title)
    for entry, cosine in nearest:
      print(f'  {cosine:6.3f}  {entry}')
    shown = {table.ids[entry]: entry for entry, _ in nearest} | shown
  if output:
    table.write_map(shown, output)
    print(f'{output}: a map of {len(shown)} words')


# {view: (its function, the flags that it takes in addition to --model)}
VIEWS = {'attention': (_attention, ('text', 'output', 'layer', 'head')),
         'contexts': (_contexts, ('text', 'words')),
         'neighbours': (functools.partial(_table, analogy=False), ('words', 'output')),
         'analogy': (functools.partial(_table, analogy=True), ('words', 'output'))}


def _check(view: str, texts: Sequence[str], words: Sequence[str], output: str | None,
           layer: int | None, head: int | None):
  """Raises UserError for an argument that a view needs, or cannot use."""
  if view == 'attention':
    require(texts and len(texts) <= 2,
            '--view=attention needs --text once, or twice for a pair')
    require(output and output.endswith(('.html', '.png')),
            '--view=attention needs --output=FILE.html or FILE.png')
    require(not output.endswith('.html') or (layer is None and head is None),
            '--layer and --head have no effect here: the page shows all of them')
  elif view == 'contexts':
    require(len(words) == 1, '--view=contexts needs one --words=WORD and --text twice')
    require(len(texts) == 2, f'--view=contexts compares a word in two texts, not in '
                             f'{len(texts)}: give --text twice')
  else:
    require(view != 'analogy' or len(words) == 3,
            '--view=analogy needs --words=A,B,C: what is to C as B is to A?')
    require(bool(words), '--view=neighbours needs --words=WORD[,WORD ...]')
    require(not output or output.endswith('.png'),
            f'--output={output}: the map is a picture: give FILE.png')


def show(model: str | None, view: str | None, texts: Sequence[str], words: Sequence[str],
         output: str | None, layer: int | None = None, head: int | None = None, *,
         step: int | None = None, allow_older: bool = False):
  """Shows one view of a model; see `bert.load` for `step` and `allow_older`.

  Raises:
    UserError: an unknown view, a missing argument, or an output that cannot be written.
  """
  require_flag('view', view, VIEWS)
  # All checks come first, because a model takes a while to load.
  given = {'text': texts, 'words': words, 'output': output, 'layer': layer, 'head': head}
  function, names = VIEWS[view]
  for name, value in given.items():
    require(value in (None, '', [], ()) or name in names,
            f'--{name} has no effect here: --view={view} does not use it')
  require(bool(model), 'give --model=DIR')
  _check(view, texts, words, output, layer, head)
  if output:
    storage.make_parent('--output', epath.Path(output))
  bert = load(model, step, allow_older)
  try:
    function(bert, *(given[name] for name in names))
  except PermissionError as e:
    raise UserError(f'--output={output} cannot be written: {e.strerror or e}') from e
