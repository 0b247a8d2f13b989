"""An embedder for the package mteb (Muennighoff et al. 2023, arXiv:2210.07316).

  import mteb
  from bert_jax.mteb import Encoder
  mteb.evaluate(Encoder('runs/embedder'), mteb.get_tasks(tasks=['STS12', 'NFCorpus']))

It needs `pip install mteb`, which installs torch. The encoder embeds texts as
`Bert.embed` does, with the pooling, prompts and longest input of the model.
"""

from typing import Any

from mteb.models.abs_encoder import AbsEncoder, get_prompt_name
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.types import PromptType
import numpy as np

from bert_jax.inference import json_lines
from bert_jax.inference.bert import Bert, load
from bert_jax.interop.sentence_layout import DOCUMENT_PROMPTS, QUERY_PROMPTS

_OF_TYPE = {PromptType.query: QUERY_PROMPTS, PromptType.document: DOCUMENT_PROMPTS}


class Encoder(AbsEncoder):
  """A model of bert_jax with the interface of mteb's `EncoderProtocol`."""

  def __init__(self, model: str | Bert, revision: str | None = None,
               device: str | None = None, **_: Any):
    """Loads a model.

    The other arguments belong to mteb's interface. mteb stores scores by the name of the
    model and `revision`; None = a digest of the model. `device` is ignored.
    """
    self.bert = model if isinstance(model, Bert) else load(model)
    own = self.bert.dense
    self.model_prompts = dict(own.prompts)
    name = str(self.bert.model.facts.get('source', 'model')).rstrip('/').rpartition('/')[2]
    self.mteb_model_meta = ModelMeta.create_empty({
        'name': f'bert_jax/{name}', 'revision': revision or json_lines.identity(self.bert.model),
        'max_tokens': own.max_len or self.bert.config.max_positions,
        'embed_dim': self.bert.embed([]).shape[1],
        'similarity_fn_name': ScoringFunction(own.similarity)})

  def prompt(self, task_metadata: Any, prompt_type: PromptType | None) -> str | None:
    """Returns the name of a task's prompt: by mteb's rules, else by the type of the text.

    '' = no prompt; None = the default prompt of the model.
    """
    name, names = (get_prompt_name(self.model_prompts, task_metadata, prompt_type),
                   _OF_TYPE.get(prompt_type))
    return self.bert.dense.first_prompt(names) if names and not name else name

  def encode(self, inputs: Any, *, task_metadata: Any, hf_split: str, hf_subset: str,
             prompt_type: PromptType | None = None, **_: Any) -> np.ndarray:
    """Embeds the texts of all batches: [texts, D] float32."""
    texts = [text for batch in inputs for text in batch['text']]
    return self.bert.embed(texts, prompt=self.prompt(task_metadata, prompt_type))
