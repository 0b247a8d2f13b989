"""bert_jax: the BERT code base for JAX."""

__version__ = '0.1.0'  # pyproject.toml reads it here


def from_pretrained(directory: str, step: int | None = None, allow_older: bool = False):
  """Loads a trained model: a `bert_jax.inference.bert.Bert`.

  Args:
    directory: a workdir, a checkpoint of bert_jax, a Hugging Face folder or hub name.
    step: the step of a checkpoint in a workdir; None = the best one, else the newest.
    allow_older: if this checkpoint is damaged, take the next intact one.

  Raises:
    UserError: `directory` has no intact model.
  """
  # A local import, so that `import bert_jax` does not start JAX.
  from bert_jax.inference import bert
  return bert.load(directory, step, allow_older)
