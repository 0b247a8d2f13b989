"""Checks of a tokenizer.json, and errors of the package `tokenizers` as UserErrors.

The package accepts some files that hang it or make its Rust code panic later.
"""

from collections.abc import Iterator, Mapping
import contextlib
from typing import Any

from bert_jax.errors import UserError, require


@contextlib.contextmanager
def as_user_error(problem: str) -> Iterator[None]:
  """Turns errors of the library into UserErrors that begin with `problem`."""
  try:
    yield
  except UserError:
    raise
  except BaseException as e:
    # The library raises plain Exceptions, and a BaseException if Rust panics.
    if not isinstance(e, Exception) and type(e).__name__ != 'PanicException':
      raise
    raise UserError(f'{problem}: {" ".join(str(e).split())[:200]}') from e


def check_ids(vocab: Mapping[str, Any], where: Any):
  """Raises UserError for duplicate ids and for large gaps between ids."""
  # The library loops through the gaps: an id of 10**12 would hang it.
  most = 2 * len(vocab) + 1024
  wrong = [f'{entry[:50]!r} is {str(i)[:50]}' for entry, i in vocab.items()
           if not isinstance(i, int) or not 0 <= i < most]
  require(not wrong,
          f'{where}: the id of {", ".join(wrong[:1])}: the ids of {len(vocab)} entries must '
          f'be whole numbers from 0 to {most - 1}')
  entry_of = {i: entry for entry, i in vocab.items()}
  double = next((entry for entry, i in vocab.items() if entry_of[i] != entry), None)
  require(double is None, f'{where}: two entries have the id of {double!r}')


def check_unknown(model: Mapping[str, Any], where: Any):
  """Raises UserError if a model has no entry for unknown text."""
  kind, vocab = model.get('type'), model['vocab']
  if isinstance(vocab, list):
    known = model.get('unk_id') is not None or model.get('byte_fallback')
  else:
    known = kind not in ('WordPiece', 'WordLevel') or model.get('unk_token') in vocab
  require(known,
          f'{where}: its model has no entry for unknown text (unk_token or unk_id)')


def check_template(rule: Any, where: Any):
  """Raises UserError if a template adds a token that it does not define.

  The library accepts such a template, and its Rust code panics at the first text.
  """
  try:
    for part in rule.get('processors', [rule]):
      defined = part.get('special_tokens', {})
      for piece in (*part.get('single', []), *part.get('pair', [])):
        name = piece.get('SpecialToken', {}).get('id')
        require(name is None or name in defined,
                f'{where}: its post-processor adds {str(name)[:50]!r}, which it does not '
                'define')
  except (AttributeError, TypeError):
    return  # malformed or absent: the library names the mistake
