"""bert_jax: the BERT code base for JAX."""


def from_pretrained(directory: str):
  """Loads a trained model from a workdir: a `bert_jax.inference.bert.Bert`.

  Raises:
    UserError: there is no model in `directory`.
  """
  from bert_jax.inference import bert  # `import bert_jax` alone does not start JAX
  return bert.load(directory)
