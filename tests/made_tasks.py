"""Small tasks that a small model learns: files of each format, and a model to start from.

A text's class is whether it has the word "good"; a name is a word that begins with a capital N; the
answer to "who" is the word after "is"; the right choice repeats the text.
"""

import dataclasses
import json
import pathlib

from etils import epath
from flax import linen as nn
import jax
import numpy as np

from bert_jax.data.late_inputs import LateInputs
from bert_jax.data.tokenizers import older
from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.data.tokens import Tokens
from bert_jax.interop import huggingface, late_layout, layout, sentence_transformers
from bert_jax.interop.late_layout import LateLayout
from bert_jax.interop.pretrained import Pretrained, head_groups
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Encoder
from bert_jax.tasks import task_list

WORDS = [f'w{i}' for i in range(20)]
NAMES = [f'n{i}' for i in range(5)]
_VOCAB = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *WORDS, *NAMES, 'good', 'bad', 'who', 'is',
          '?', '.', *'abcdefghijklmnopqrstuvwxyz', '##s']


def tokenizer() -> Tokenizer:
  return older.wordpiece(_VOCAB)


def model(folder: pathlib.Path, **sizes) -> str:
  """A random encoder in the Hugging Face layout, 2 layers of 32."""
  config = BertConfig(**(dict(
      vocab_size=len(_VOCAB), hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64,
      max_positions=64, initializer_range=0.1) | sizes))
  tokens = np.zeros((1, 8), np.int32)
  params = nn.unbox(jax.jit(Encoder(config).init)(jax.random.key(0), Tokens(*[tokens] * 4),
                                               tokens[:, :1]))
  huggingface.save(Pretrained(config, {'params': {'bert': params['params']}}, tokenizer()),
                   epath.Path(folder))
  return str(folder)


def start(folder: pathlib.Path, task: str) -> str:
  """A model that a task can start from."""
  return (with_head(folder, '', (), ('mlm',)) if task_list.ALL[task].starts_from
          else model(folder))


def with_head(folder: pathlib.Path, task: str, labels: tuple[str, ...],
              groups: tuple[str, ...] = ()) -> str:
  """A random model with a head for a task, or with the heads of `groups`."""
  config = BertConfig(vocab_size=len(_VOCAB), hidden_size=32, num_layers=2, num_heads=4,
                      intermediate_size=64, max_positions=64, initializer_range=0.1)
  rng = np.random.default_rng(0)
  abstract = nn.unbox(
      layout.abstract_params(config, groups or head_groups(config, task), len(labels), task))
  params = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), abstract)
  problem = 'single_label' if task == 'sequence_classification' else ''
  huggingface.save(Pretrained(config, params, older.wordpiece(_VOCAB), task, labels, problem),
                   epath.Path(folder))
  return str(folder)


def late_layout_of(width: int) -> LateLayout:
  """A layout with a random projection to 8, and queries of 8 tokens."""
  kernel = np.random.default_rng(0).normal(size=(width, 8)).astype(np.float32)
  return LateLayout(LateInputs(expansion='fixed', expanded=8), max_len=32, projection=kernel)


def late(folder: pathlib.Path) -> str:
  """A folder of a MultiVectorEncoder, with a random projection to 8."""
  encoder = huggingface.load(epath.Path(model(folder.parent / f'{folder.name}-encoder')))
  layout = late_layout_of(32)
  projected = late_layout.with_projection(dataclasses.replace(encoder, text_layout=layout))
  sentence_transformers.save(projected, epath.Path(folder))
  return str(folder)


def _words(rng, low=2, high=9):
  return [WORDS[i] for i in rng.integers(0, len(WORDS), rng.integers(low, high))]


def sequences(path: pathlib.Path, count: int, seed: int = 0, length: int = 9) -> str:
  """tsv: text, label (good or bad), value."""
  rng, lines = np.random.default_rng(seed), ['text\tlabel\tvalue']
  for _ in range(count):
    words, good = _words(rng, 2, length), rng.random() < 0.5
    words.insert(rng.integers(0, len(words)), 'good' if good else 'bad')
    lines.append(f'{" ".join(words)}\t{"yes" if good else "no"}\t{3.0 if good else 1.0}')
  path.write_text('\n'.join(lines) + '\n')
  return str(path)


def tags(path: pathlib.Path, count: int, seed: int = 0) -> str:
  """CoNLL: names of one or two words."""
  rng, lines = np.random.default_rng(seed), []
  for _ in range(count):
    for word in _words(rng):
      lines.append(f'{word}\tO')
      if rng.random() < 0.3:
        lines.append(f'{NAMES[rng.integers(5)].upper()}\tB-NAME')
        if rng.random() < 0.3:
          lines.append(f'{NAMES[rng.integers(5)]}s\tI-NAME')
    lines.append('')
  path.write_text('\n'.join(lines) + '\n')
  return str(path)


def questions(path: pathlib.Path, count: int, seed: int = 0, unanswerable: bool = False) -> str:
  """SQuAD: "Who?" of a text in which one word follows "is"."""
  rng, paragraphs = np.random.default_rng(seed), []
  for i in range(count):
    before, after, name = ' '.join(_words(rng)), ' '.join(_words(rng)), NAMES[rng.integers(5)]
    context, answers = f'{before} is {name.upper()} {after}.', []
    if unanswerable and rng.random() < 0.5:
      context = f'{before} {after}.'
    else:
      answers = [{'text': name.upper(), 'answer_start': len(before) + 4}]
    paragraphs.append({'context': context, 'qas': [
        {'id': f'{seed}-{i}', 'question': 'Who?', 'answers': answers}]})
  path.write_text(json.dumps({'data': [{'paragraphs': paragraphs}]}))
  return str(path)


def pairs(path: pathlib.Path, count: int, seed: int = 0) -> str:
  """jsonl: two texts that share two rare words, a third that has others; a score for evaluation."""
  rng, lines = np.random.default_rng(seed), []
  for i in range(count):
    a, b, c, d = rng.permutation(len(WORDS))[:4]
    near = i % 2
    text = [WORDS[a], WORDS[b], 'is', '.']
    other = [WORDS[a], WORDS[b], 'bad'] if near else [WORDS[c], WORDS[d], 'bad']
    lines.append({'text': ' '.join(text), 'text_pair': f'{WORDS[a]} {WORDS[b]} bad',
                  'contrary': f'{WORDS[c]} {WORDS[d]} bad', 'sentence1': ' '.join(text),
                  'sentence2': ' '.join(other), 'score': float(near)})
  path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return str(path)


def choices(path: pathlib.Path, count: int, seed: int = 0) -> str:
  """JSON lines: two to four choices, of which the right one is "good"."""
  rng, lines = np.random.default_rng(seed), []
  for _ in range(count):
    number = int(rng.integers(2, 5))
    label = int(rng.integers(number))
    endings = [' '.join(_words(rng, 1, 3)) + (' good' if i == label else ' bad')
               for i in range(number)]
    lines.append(json.dumps({'text': ' '.join(_words(rng)), 'choices': endings, 'label': label}))
  path.write_text('\n'.join(lines) + '\n')
  return str(path)


def rankings(path: pathlib.Path, count: int, seed: int = 0) -> str:
  """JSON lines: a query of one to three words, a document with "good", two to four with "bad"."""
  rng, lines = np.random.default_rng(seed), []
  for i in range(count):
    lines.append(json.dumps({
        'query': f'w{i % 20} ' + ' '.join(_words(rng, 1, 3)) + f' {"abcdefghij"[i // 20 % 10]}',
        'positives': [' '.join(_words(rng)) + ' good'],
        'negatives': [' '.join(_words(rng)) + ' bad' for _ in range(rng.integers(2, 5))]}))
  path.write_text('\n'.join(lines) + '\n')
  return str(path)


FILES = {'sequence_classification': sequences, 'token_classification': tags,
         'question_answering': questions, 'multiple_choice': choices,
         'sentence_embedding': pairs, 'sparse_embedding': pairs, 'late_interaction': pairs,
         'reranking': rankings}
SUFFIXES = {'sequence_classification': 'tsv', 'token_classification': 'conll',
            'question_answering': 'json', 'multiple_choice': 'jsonl',
            'sentence_embedding': 'jsonl', 'sparse_embedding': 'jsonl',
            'late_interaction': 'jsonl', 'reranking': 'jsonl'}


def files(task: str, folder: pathlib.Path, train: int = 160, held_out: int = 40) -> dict[str, str]:
  """data.train and data.eval of a task."""
  return {f'data.{name}': FILES[task](folder / f'{name}.{SUFFIXES[task]}', count, seed)
          for name, count, seed in (('train', train, 0), ('eval', held_out, 1))}
