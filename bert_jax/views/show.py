"""The views of the command `explore`: what each prints and draws."""

from collections.abc import Sequence

from bert_jax.errors import UserError
from bert_jax.inference import bert as bert_lib
from bert_jax.inference.bert import Bert
from bert_jax.views import attention_page as attention_lib
from bert_jax.views import contexts
from bert_jax.views.token_embeddings import TokenTable

VIEWS = ('attention', 'contexts', 'neighbours', 'analogy')


def _attention(bert: Bert, texts: Sequence[str], output: str | None, layer: int | None,
               head: int | None):
  if not texts or len(texts) > 2:
    raise UserError('--view=attention needs --text once, or twice for a pair')
  if not output or not output.endswith(('.html', '.png')):
    raise UserError('--view=attention needs --output=FILE.html or FILE.png')
  found = attention_lib.attention(bert, *texts)
  if output.endswith('.html'):
    attention_lib.write_html(found, output)
  else:
    attention_lib.write_png(found, output, layer, head)
  print(f'{output}: {len(found.tokens)} tokens, {found.weights.shape[0]} layers of '
        f'{found.weights.shape[1]} heads')


def _contexts(bert: Bert, texts: Sequence[str], words: Sequence[str]):
  if len(words) != 1:
    raise UserError('--view=contexts needs one --words=WORD and --text twice')
  for layer, cosine in enumerate(contexts.similarities(bert, texts, words[0])):
    name = f'layer {layer}' if layer else 'embeddings'
    print(f'{name:<12} {cosine:6.3f}  {"#" * round(40 * max(cosine, 0))}')


def _table(bert: Bert, words: Sequence[str], output: str | None, analogy: bool):
  table = TokenTable(bert)
  if analogy and len(words) != 3:
    raise UserError('--view=analogy needs --words=A,B,C: what is to C as B is to A?')
  if not words:
    raise UserError('--view=neighbours needs --words=WORD[,WORD ...]')
  shown = list(words)
  for word in ([None] if analogy else words):
    found = table.analogy(*words) if analogy else table.neighbours(word)
    print(f'{words[1]} - {words[0]} + {words[2]}' if analogy else word)
    for entry, cosine in found:
      print(f'  {cosine:6.3f}  {entry}')
    shown += [entry for entry, _ in found if entry not in shown]
  if output:
    table.write_map(shown, output)
    print(f'{output}: a map of {len(shown)} words')


def show(model: str | None, view: str | None, texts: Sequence[str], words: Sequence[str],
            output: str | None, layer: int | None, head: int | None):
  """Shows one view of a model.

  Raises:
    UserError: an unknown view, something missing for it, or an output that cannot be written.
  """
  if view not in VIEWS:
    raise UserError(f'--view={view} is unknown: use {", ".join(VIEWS)}')
  if not model:
    raise UserError('give --model=DIR')
  if view in ('neighbours', 'analogy') and output and not output.endswith('.png'):
    raise UserError(f'--output={output}: the map is a picture, FILE.png')
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
