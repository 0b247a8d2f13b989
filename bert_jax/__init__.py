"""bert_jax: the BERT code base for JAX."""

__version__ = '0.1.0'  # pyproject.toml reads it here


def from_pretrained(directory: str, step: int | None = None, allow_older: bool = False):
  """Loads a trained model: a `bert_jax.inference.bert.Bert`.

  Args:
    directory: a workdir, a checkpoint of bert_jax, a Hugging Face folder or hub name.
    step: of a workdir's checkpoint; None = the best, or the newest where none was chosen.
    allow_older: where that one is damaged, take the next sound one.

  Raises:
    UserError: there is no sound model in `directory`.
  """
  from bert_jax.inference import bert  # `import bert_jax` alone does not start JAX
  return bert.load(directory, step, allow_older)
