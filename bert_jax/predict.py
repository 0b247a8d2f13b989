"""Runs a model: python -m bert_jax.predict --task=fill_mask --model=DIR < in.jsonl"""

from absl import flags

from bert_jax import errors
from bert_jax.commands import checkpoint_flags, command, overwrite_flag

_TASK = flags.DEFINE_string(
    'task', None,
    'fill_mask, next_sentence, score, embed; for a fine-tuned model its own task: '
    'sequence_classification, question_answering, ...')
_MODEL = flags.DEFINE_string('model', None, checkpoint_flags.ANY_MODEL)
_INPUT = flags.DEFINE_string('input', None, 'JSON lines; standard input by default.')
_OUTPUT = flags.DEFINE_string(
    'output', None,
    'JSON lines; .npy or .safetensors for embeddings; standard output by default.')
_POOLING = flags.DEFINE_string(
    'pooling', None,
    'embed: cls, mean, max, mean_sqrt_len_tokens, weightedmean, lasttoken, or none = '
    "each token; by default the model's own, or mean.")
_NORMALIZE = flags.DEFINE_bool(
    'normalize', None, "embed: vectors of length 1; by default the model's own, or no.")
_PROMPT = flags.DEFINE_string(
    'prompt', None,
    "embed, sparse_embedding, reranking, sequence_classification: name of the model's "
    "prompt before each text, '' = none; by default the model's own. late_interaction: "
    'query or document.')
_DIM = flags.DEFINE_integer(
    'dim', None, 'embed: the first entries of each vector, scaled to length 1.')
_PRECISION = flags.DEFINE_string(
    'precision', 'float32',
    'embed: precision of the vectors in an array file: float32, int8 (with a range for '
    'each entry) or binary (one bit for each entry).')
_LAYERS = flags.DEFINE_list(
    'layers', ['-1'], 'embed: layers to concatenate, 0 = the embeddings, -1 = the last.')
_LONG = flags.DEFINE_string(
    'long', None,
    'How to read a text that is longer than the model. embed: head (the default), tail, '
    'head_tail, or all of it by chunks_mean, chunks_max, chunks_attention. score: '
    'chunks, each token with the text around it; by default such a text is an error.')
_MAX_LEN = flags.DEFINE_integer('max_len', None, 'embed: longest input in tokens.')
_NULL_THRESHOLD = flags.DEFINE_float(
    'null_threshold', None,
    'question_answering: the answer is "" if its score exceeds the score of the best '
    'answer by more than this; by default as in fine-tuning, and never "" for a model '
    'that learned from answers alone.')
_STRICT = flags.DEFINE_bool(
    'strict', False,
    'End with status 2 at the first line without an answer. By default its answer is '
    '{"error": ...}, and the command ends with status 1 after all other lines.')

_DTYPE = flags.DEFINE_string(
    'dtype', None,
    'Dtype of matrix products: float32, bfloat16, or auto (bfloat16 if the device is '
    "fastest with it); by default the model's own.")
# {flag: the tasks that use it}
_USED_BY = dict.fromkeys(('pooling', 'normalize', 'layers', 'max_len', 'dim',
                         'precision'), ('embed',)) | {
    'prompt': ('embed', 'late_interaction', 'reranking', 'sequence_classification',
               'sparse_embedding'),
    'null_threshold': ('question_answering',)}


def _main(argv: list[str]):
  for name, tasks in _USED_BY.items():
    errors.require(not flags.FLAGS[name].present or _TASK.value in (None, '', *tasks),
                   f'--{name} has no effect here: it is for --task={" or ".join(tasks)}')
  overwrite = overwrite_flag.get('--output', _OUTPUT.value)
  layers = command.numbers('--layers', _LAYERS.value)
  from bert_jax.inference import predictions  # after the flags: JAX is slow to import
  from bert_jax.runtime import platforms, storage
  platforms.begin_command()
  options = predictions.Options(
      pooling=_POOLING.value, normalize=_NORMALIZE.value, layers=layers, long=_LONG.value,
      max_len=_MAX_LEN.value, prompt=_PROMPT.value, dim=_DIM.value,
      null_threshold=_NULL_THRESHOLD.value)
  with storage.exclusive('--output', _OUTPUT.value, _INPUT.value, overwrite=overwrite):
    predictions.run(_TASK.value, _MODEL.value, _INPUT.value, _OUTPUT.value, options,
                    _STRICT.value, _PRECISION.value, step=checkpoint_flags.STEP.value,
                    allow_older=checkpoint_flags.ALLOW_OLDER.value,
                    dtype=_DTYPE.value)


if __name__ == '__main__':
  command.run_command(_main)
