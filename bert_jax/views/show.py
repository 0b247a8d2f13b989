"""The views of the command `explore`."""

from collections.abc import Sequence

from etils import epath

from bert_jax.errors import UserError
from bert_jax.inference import bert as bert_lib
from bert_jax.inference.bert import Bert
from bert_jax.runtime import storage
from bert_jax.views import attention_page
from bert_jax.views import words as words_lib

# The flags that each view uses, beside the model.
VIEWS = {'attention': ('text', 'output', 'layer', 'head'), 'contexts': ('text', 'words'),
         'neighbours': ('words', 'output'), 'analogy': ('words', 'output')}


def _attention(bert: Bert, texts: Sequence[str], output: str | None, layer: int | None,
               head: int | None):
  if not texts or len(texts) > 2:
    raise UserError('--view=attention needs --text once, or twice for a pair')
  if not output or not output.endswith(('.html', '.png')):
    raise UserError('--view=attention needs --output=FILE.html or FILE.png')
  if output.endswith('.html') and (layer is not None or head is not None):
    raise UserError('--layer and --head have no effect here: the page shows all of them')
  attention = attention_page.attention(bert, *texts)
  if output.endswith('.html'):
    attention_page.write_html(attention, output)
  else:
    attention_page.write_png(attention, output, layer, head)
  layers, heads, length, _ = attention.weights.shape
  print(f'{output}: {length} tokens, {layers} layers of {heads} heads')


def _contexts(bert: Bert, texts: Sequence[str], words: Sequence[str]):
  if len(words) != 1:
    raise UserError('--view=contexts needs one --words=WORD and --text twice')
  for layer, cosine in enumerate(words_lib.similarities(bert, texts, words[0])):
    name = f'layer {layer}' if layer else 'embeddings'
    print(f'{name:<12} {cosine:6.3f}  {"#" * round(40 * max(cosine, 0))}')


def _table(bert: Bert, words: Sequence[str], output: str | None, analogy: bool):
  table = words_lib.TokenTable(bert)
  if analogy and len(words) != 3:
    raise UserError('--view=analogy needs --words=A,B,C: what is to C as B is to A?')
  if not words:
    raise UserError('--view=neighbours needs --words=WORD[,WORD ...]')
  if analogy:
    results = [(f'{words[1]} - {words[0]} + {words[2]}', table.analogy(*words))]
  else:
    results = ((word, table.neighbours(word)) for word in words)
  shown = {table.id_of(word): word for word in words}
  for title, nearest in results:
    print(title)
    for entry, cosine in nearest:
      print(f'  {cosine:6.3f}  {entry}')
    shown = {table.ids[entry]: entry for entry, _ in nearest} | shown
  if output:
    table.write_map(shown, output)
    print(f'{output}: a map of {len(shown)} words')


def show(model: str | None, view: str | None, texts: Sequence[str], words: Sequence[str],
         output: str | None, layer: int | None = None, head: int | None = None):
  """Shows one view of a model.

  Raises:
    UserError: an unknown view, a missing argument, or an output that cannot be written.
  """
  if view not in VIEWS:
    wrong = f'--view={view} is unknown: use' if view else 'give --view, one of'
    raise UserError(f'{wrong} {", ".join(VIEWS)}')
  given = {'text': texts, 'words': words, 'output': output, 'layer': layer, 'head': head}
  for name, value in given.items():
    if value not in (None, '', [], ()) and name not in VIEWS[view]:
      raise UserError(f'--{name} has no effect here: --view={view} does not use it')
  if not model:
    raise UserError('give --model=DIR')
  if view in ('neighbours', 'analogy') and output and not output.endswith('.png'):
    raise UserError(f'--output={output}: the map is a picture, FILE.png')
  if output:
    storage.make_parent('--output', epath.Path(output))
  bert = bert_lib.load(model)
  try:
    if view == 'attention':
      _attention(bert, texts, output, layer, head)
    elif view == 'contexts':
      _contexts(bert, texts, words)
    else:
      _table(bert, words, output, view == 'analogy')
  except OSError as e:
    raise UserError(f'--output={output} cannot be written: {e.strerror or e}') from e
