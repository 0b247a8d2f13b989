"""Compares existing records with the settings of a new preparation."""

import dataclasses
from typing import Any

from etils import epath

from bert_jax.data import corpus, records
from bert_jax.data.corpus import Settings


def changed_setting(folder: epath.Path, settings: Settings) -> tuple[str, Any] | None:
  """Returns (the first setting that differs in complete records, its value there)."""
  earlier = with_defaults(records.read_manifest(folder)['settings'])
  now = dataclasses.asdict(settings)
  # One vocabulary may have several paths, so callers compare its digest instead.
  if earlier['vocab'] and now['vocab']:
    del now['vocab']
  return next(((name, earlier[name]) for name, value in now.items()
               if earlier[name] != value), None)


def difference(folder: epath.Path, settings: Settings, digest: str | None) -> str:
  """Says how complete records differ from the records of `settings`; '' = equal.

  Args:
    folder: the complete records.
    settings: the text and the vocabulary.
    digest: the digest of the vocabulary; None = it is trained on the text.
  """
  if changed := changed_setting(folder, settings):
    return f'made with another {changed[0]}'
  manifest = records.read_manifest(folder)
  if digest not in (None, manifest['tokenizer']):
    return f'made with another version of {settings.vocab}'
  inputs = manifest['settings'].get('inputs')  # Beam stores none
  source = corpus.open_source(settings, folder / 'progress')
  if inputs not in (None, list(source.inputs)):
    return 'of files that have changed since'
  return ''


def with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
  """Stored settings, with the defaults of fields that were added later."""
  return {field.name: field.default
          for field in dataclasses.fields(Settings)} | settings
