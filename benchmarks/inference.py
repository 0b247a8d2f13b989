"""Texts per second of `embed`, beside sentence-transformers and onnxruntime on one machine.

  python -m benchmarks.inference --model=MODEL --text='corpus/*.txt.gz' --rounds=5

MODEL is a folder of sentence-transformers. Five processes embed the same texts in turns,
and the medians count: bert_jax in float32 and in bfloat16, sentence-transformers in
PyTorch, and onnxruntime with the files of `convert --to=onnx --quantize=int8`. On a GPU
there are three, in bfloat16: bert_jax, sentence-transformers, and a loop over
transformers. The peers sort the texts by length, pad batches, and use the fastest of the
given batch sizes. The short texts are sentences of mixed length. Each long text has 250
words, which fill the longest input of all-MiniLM-L6-v2 (256 tokens). Needs torch,
sentence-transformers, onnx and onnxruntime.
"""

from collections.abc import Callable
import functools
import glob
import gzip
import json
import pathlib
import sys
import tempfile
import time

from absl import app, flags
import numpy as np

from benchmarks import calls, turns
from bert_jax.data import corpus

_MODEL = flags.DEFINE_string('model', None, 'Folder of sentence-transformers.', required=True)
_TEXT = flags.DEFINE_string('text', None, 'Glob of text files.', required=True)
_SHORT = flags.DEFINE_integer('short', 10_000, 'Short texts; 0 = none.')
_LONG = flags.DEFINE_integer('long', 1_000, 'Long texts; 0 = none.')
_ROUNDS = flags.DEFINE_integer('rounds', 5, 'Turns of each side.')
_BATCHES = flags.DEFINE_multi_integer('batch', [8, 16, 32, 64, 128], 'Batch sizes to try.')
# The flags of a process of one side.
_SIDE = flags.DEFINE_string('side', None, 'Internal: the side of this process.')
_FOLDER = flags.DEFINE_string('folder', None, 'Internal: ONNX files, and vectors of each side.')

_BFLOAT16 = {'bfloat16': 'bert_jax, bfloat16'}
_ON_CPU = {'bert_jax': 'bert_jax, float32', **_BFLOAT16, 'torch': 'sentence-transformers',
           'onnx': 'onnxruntime, float32', 'int8': 'onnxruntime, int8'}
_ON_GPU = {**_BFLOAT16, 'torch_bfloat16': 'sentence-transformers, bfloat16',
           'transformers': 'transformers, bfloat16'}
_TEXTS = 'texts.json'
_WORDS = 250  # of a long text: more than 256 tokens
_TRIED = 8  # batches, at least 1,000 texts, for each batch size
_TRIALS = 3  # of each batch size; the best counts
_LONGEST = 256  # tokens of a text, as in all-MiniLM-L6-v2

Embed = Callable[[list[str]], np.ndarray]


def _texts(kind: str) -> list[str]:
  """Returns random sentences ('short'), or texts of `_WORDS` words in order ('long')."""
  sentences, needed = [], _SHORT.value if kind == 'short' else 20 * _LONG.value
  for path in sorted(glob.glob(_TEXT.value)):
    with (gzip.open if path.endswith('.gz') else open)(path, 'rt', encoding='utf-8') as file:
      for line in file:
        sentences += corpus.Settings('').sentences(line) if line.strip() else []
        if len(sentences) > 20 * needed:
          break
  if kind == 'short':
    order = np.random.default_rng(0).permutation(len(sentences))
    return [sentences[i] for i in order[:_SHORT.value]]
  words = ' '.join(sentences).split()
  if len(words) < _WORDS * _LONG.value:
    raise app.UsageError(f'--text has {len(words):,} words, too few for {_LONG.value} long texts')
  return [' '.join(words[i * _WORDS:(i + 1) * _WORDS]) for i in range(_LONG.value)]


def _bert_jax() -> Embed:
  import bert_jax
  dtype = 'bfloat16' if _SIDE.value == 'bfloat16' else 'float32'
  return bert_jax.from_pretrained(_MODEL.value, dtype=dtype).embed


def _torch(batch: int) -> Embed:
  model = _sentence_transformer()
  return functools.partial(model.encode, batch_size=batch, show_progress_bar=False)


@functools.cache
def _sentence_transformer():
  import sentence_transformers
  model = sentence_transformers.SentenceTransformer(
      _MODEL.value, device='cpu' if _on_cpu() else 'cuda')
  return model if _SIDE.value == 'torch' else model.bfloat16()


def _transformers(batch: int) -> Embed:
  """A loop over padded batches in the order of their length, with the mean of the tokens."""
  import torch
  model, tokenizer = _transformers_model()

  @torch.inference_mode()
  def embed(texts):
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    vectors = np.zeros((len(texts), model.config.hidden_size), np.float32)
    for start in range(0, len(order), batch):
      part = order[start:start + batch]
      inputs = tokenizer([texts[i] for i in part], padding=True, truncation=True,
                         max_length=_LONGEST, return_tensors='pt').to(model.device)
      hidden, real = model(**inputs).last_hidden_state, inputs['attention_mask'][:, :, None]
      means = (hidden * real).sum(1, dtype=torch.float32) / real.sum(1)
      vectors[part] = means.cpu().numpy()
    return vectors

  return embed


@functools.cache
def _transformers_model():
  import torch
  import transformers
  return (transformers.AutoModel.from_pretrained(_MODEL.value, dtype=torch.bfloat16).cuda().eval(),
          transformers.AutoTokenizer.from_pretrained(_MODEL.value))


def _on_cpu() -> bool:
  import jax
  return jax.default_backend() == 'cpu'


@functools.cache
def _session(name: str):
  import onnxruntime
  return onnxruntime.InferenceSession(f'{_FOLDER.value}/onnx/{name}.onnx',
                                      providers=['CPUExecutionProvider'])


@functools.cache
def _tokenizer():
  import tokenizers

  from bert_jax.interop import text_layout
  tokenizer = tokenizers.Tokenizer.from_file(f'{_FOLDER.value}/tokenizer.json')
  settings = pathlib.Path(_FOLDER.value, text_layout.ENCODER_SETTINGS).read_text()
  from bert_jax.runtime import storage
  tokenizer.enable_truncation(storage.parse_json(settings)['max_seq_length'])
  tokenizer.enable_padding()
  return tokenizer


def _onnx(name: str, batch: int) -> Embed:
  session, tokenizer = _session(name), _tokenizer()
  names = [x.name for x in session.get_inputs()]

  def embed(texts):
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    vectors = [None] * len(texts)
    for start in range(0, len(order), batch):
      part = order[start:start + batch]
      encodings = tokenizer.encode_batch([texts[i] for i in part])
      arrays = {'input_ids': 'ids', 'token_type_ids': 'type_ids',
                'attention_mask': 'attention_mask'}
      inputs = {x: np.array([getattr(e, arrays[x]) for e in encodings]) for x in names}
      for i, vector in zip(part, session.run(['sentence_embedding'], inputs)[0]):
        vectors[i] = vector
    return np.stack(vectors)

  return embed


def _serve():
  """Serves the side of this process: a step embeds all texts."""
  make = {'torch': _torch, 'torch_bfloat16': _torch, 'transformers': _transformers,
          'onnx': functools.partial(_onnx, 'model'),
          'int8': functools.partial(_onnx, 'model_quantized')}.get(_SIDE.value)
  texts = json.loads(pathlib.Path(_FOLDER.value, _TEXTS).read_text())
  if make:
    tried = texts[:max(1_000, _TRIED * max(_BATCHES.value))]

    def seconds(batch):
      embed, times = make(batch), []
      for _ in range(1 + _TRIALS):  # the first one warms up
        began = time.perf_counter()
        embed(tried)
        times.append(time.perf_counter() - began)
      return min(times[1:])

    best = min(_BATCHES.value, key=seconds)
    embed = make(best)
  else:
    best, embed = 'packed rows', _bert_jax()

  def step(number):
    vectors = embed(texts)
    if not number:
      np.save(f'{_FOLDER.value}/{_SIDE.value}.npy', vectors)
    return 0.0

  turns.serve(step, str(best))


def _measure(kind: str, folder: str):
  """Runs all sides in turns and prints their rows."""
  texts = _texts(kind)
  pathlib.Path(folder, _TEXTS).write_text(json.dumps(texts))
  arguments = [f'--model={_MODEL.value}', f'--text={_TEXT.value}', f'--folder={folder}',
               *(f'--batch={batch}' for batch in _BATCHES.value)]
  titles = _ON_CPU if _on_cpu() else _ON_GPU
  with turns.alone():
    # One after the other: they choose their batch sizes by time.
    sides = {name: turns.Side([sys.executable, '-m', 'benchmarks.inference', *arguments,
                               f'--side={name}'], len(texts)).ready() for name in titles}
    for _ in range(_ROUNDS.value):
      for side in sides.values():
        side.run(1, cold=1 if _on_cpu() else 0)
  vectors = {name: np.load(f'{folder}/{name}.npy') for name in titles}
  first, peer = next(iter(titles)), next(x for x in titles if x.startswith('torch'))
  ours = vectors[first] / np.linalg.norm(vectors[first], axis=1, keepdims=True)
  for name, title in titles.items():
    side = sides[name]
    other = vectors[name] / np.linalg.norm(vectors[name], axis=1, keepdims=True)
    ratio = np.median(np.divide(sides[peer].seconds, side.seconds))
    print(f'| {len(texts):,} {kind} | {title} | {side.versions} | '
          f'{side.tokens_per_second:.0f} | {ratio:.2f} | '
          f'{np.sum(ours * other, 1).min():.6f} |', flush=True)
    side.close()


def main(_):
  """Prints texts per second, their ratio, and the smallest cosine with the first side."""
  if _SIDE.value:
    _serve()
    return
  turns.busy()
  with tempfile.TemporaryDirectory() as folder:
    if _on_cpu():
      calls.call('bert_jax.convert', f'--input={_MODEL.value}', f'--output={folder}',
                 '--to=onnx', '--quantize=int8')
    print('| texts | side | batch | texts per second | times PyTorch | smallest cosine |')
    print('| --- | --- | --- | --- | --- | --- |')
    for kind, count in (('short', _SHORT.value), ('long', _LONG.value)):
      if count:
        _measure(kind, folder)


if __name__ == '__main__':
  app.run(main)
