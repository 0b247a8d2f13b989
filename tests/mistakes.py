"""Makes the folder where the commands of tests/mistakes.md run."""

import gzip
import json
import pathlib
import pickle
import posixpath
import shutil
import zipfile

from safetensors import numpy

from bert_jax.runs import run
from tests import conftest, made_tasks

ROOT = pathlib.Path(__file__).parent.parent


def _texts(folder: pathlib.Path):
  (folder / 'empty.txt').write_text('')
  (folder / 'blank.txt').write_text('\n\n \n')
  (folder / 'binary.txt').write_bytes(b'text\n\nmore \0 text')
  (folder / 'latin.txt').write_bytes('café\n'.encode('latin-1') * 3)
  (folder / 'one.txt').write_text('The only document. It has two sentences.\n')
  (folder / 'broken.jsonl').write_text('{"text": "one"}\n{"text": \n')
  (folder / 'other.jsonl').write_text(''.join(
      json.dumps({'body': '\n'.join(document)}) + '\n' for document in conftest.make_documents(60)))
  whole = gzip.compress(b'text. more text.\n\n' * 500)
  (folder / 'broken.txt.gz').write_bytes(whole[:len(whole) // 2])
  (folder / 'deep.jsonl').write_text('{"text": ' + '[' * 100_000 + '\n')


def _vocabularies(folder: pathlib.Path):
  entries = made_tasks._VOCAB
  (folder / 'vocab.txt').write_text('\n'.join(entries) + '\n')
  (folder / 'no_mask.txt').write_text('\n'.join(x for x in entries if x != '[MASK]') + '\n')
  (folder / 'cased.txt').write_text('\n'.join([*entries[:5], *(x.upper() for x in entries[5:])]))
  (folder / 'capitals').mkdir()
  shutil.copy(folder / 'vocab.txt', folder / 'capitals')
  (folder / 'capitals/tokenizer_config.json').write_text('{"do_lower_case": false}')
  (folder / 'broken.model').write_bytes(b'no model')


def _examples(folder: pathlib.Path):
  made_tasks.sequences(folder / 'train.tsv', 40)
  made_tasks.sequences(folder / 'dev.tsv', 10, seed=1)
  (folder / 'one_class.tsv').write_text('text\tlabel\n' + 'w1 good\tyes\n' * 9)
  (folder / 'other_label.tsv').write_text('text\tlabel\nw1 good\tperhaps\n')
  (folder / 'header.tsv').write_text('text\tlabel\n')
  (folder / 'no_number.tsv').write_text('text\tlabel\nw1\t1.5\nw2\tmuch\n')
  (folder / 'missing.tsv').write_text('text\tlabel\nw1\tno\nw2\tnan\nw3\tyes\n')
  (folder / 'scored.csv').write_text('text,rude,spam\nw1,0,1\nw2,-1,-1\nw3,1,0\n')
  made_tasks.tags(folder / 'tags.conll', 20)
  (folder / 'no_tag.conll').write_text('w1 O\nw2\n')
  (folder / 'other_tag.conll').write_text('w1 B-PLACE\n')
  (folder / 'swapped.conll').write_text('w1 B-NAME\nw2 O\nI-NAME w3\n')
  made_tasks.questions(folder / 'squad.json', 10)
  (folder / 'no_squad.json').write_text('{"version": "1.1"}')
  made_tasks.choices(folder / 'choices.jsonl', 10)
  (folder / 'choice_9.jsonl').write_text('{"text": "a", "choices": ["b", "c"], "label": 9}\n')
  (folder / 'unnamed_choice.jsonl').write_text(json.dumps({'answerKey': 'B', 'question': {
      'stem': 'a', 'choices': [{'text': 'b'}, {'label': 'B', 'text': 'c'}]}}))
  (folder / 'questions.jsonl').write_text('{"question": "Who?"}\n')
  (folder / 'texts.jsonl').write_text('{"text": "w1 [MASK] w2"}\n')
  (folder / 'pairs.jsonl').write_text('{"sentence_good": "a", "sentence_bad": "b", "UID": "u"}\n')
  (folder / 'short_line.tsv').write_text('index\tsentence\n0\tw1\n1\n2\tw2\n')
  (folder / 'sst2.tsv').write_text('sentence\tlabel\n' + 'w1 good\t1\nw2 bad\t0\n' * 4)
  (folder / 'glue/CoLA').mkdir(parents=True)
  (folder / 'glue/CoLA/train.tsv').write_text('x\t1\t\tw1\n')


def _rankings(folder: pathlib.Path):
  made_tasks.rankings(folder / 'rank.jsonl', 10)
  (folder / 'no_positive.jsonl').write_text('{"query": "w1", "document": "w2", "label": 0}\n')
  (folder / 'near.tsv').write_text('query\tpositive\nw1\tw2\n')
  (folder / 'beir/qrels').mkdir(parents=True)
  (folder / 'beir/corpus.jsonl').write_text('{"_id": "d1", "text": "w2"}\n')
  (folder / 'beir/queries.jsonl').write_text('{"_id": "q1", "text": "w1"}\n')
  for split, line in (('test', 'q1\td1\t1'), ('lost', 'q1\td9\t1'), ('unasked', 'q9\td1\t1'),
                      ('hopeless', 'q1\td1\t0')):
    (folder / f'beir/qrels/{split}.tsv').write_text(f'query-id\tcorpus-id\tscore\n{line}\n')


def _break_weights(folder: pathlib.Path):
  """A copy of the model with a NaN."""
  shutil.copytree(folder / 'model', folder / 'nan')
  path = folder / 'nan/model.safetensors'
  tensors = numpy.load_file(path)
  next(x for name, x in tensors.items() if name.endswith('pooler.dense.bias'))[3] = float('nan')
  numpy.save_file(tensors, path)


def _pickle_code(folder: pathlib.Path):
  """A copy of the model with a function among its pickled weights."""
  shutil.copytree(folder / 'model', folder / 'pickled')
  (folder / 'pickled/model.safetensors').unlink()
  with zipfile.ZipFile(folder / 'pickled/pytorch_model.bin', 'w') as file:
    file.writestr('archive/data.pkl', pickle.dumps({'w': posixpath.join, 'v': len}, 2))


def _edit_text(folder: pathlib.Path):
  """A copy of the run whose text has another size now."""
  shutil.copytree(folder / 'run', folder / 'edited')
  shutil.copy(folder / 'corpus.txt', folder / 'edited.txt')
  path = folder / 'edited/corpus/manifest.json'
  manifest = json.loads(path.read_text())
  manifest['settings'] |= {'source': 'edited.txt', 'inputs': ['edited.txt 99 0']}
  path.write_text(json.dumps(manifest))


def make(folder: pathlib.Path):
  """Writes the files; `run` is a finished run, `model` a Hugging Face folder."""
  (folder / 'configs').symlink_to(ROOT / 'configs')
  (folder / 'launch').symlink_to(ROOT / 'launch')
  (folder / 'tiny.py').symlink_to(ROOT / 'tests/tiny.py')
  (folder / 'broken.py').write_text('def get_config(:\n')
  (folder / 'nothing.py').write_text('x = 1\n')
  conftest.write_corpus(folder / 'corpus.txt', conftest.make_documents(60))
  _texts(folder)
  _vocabularies(folder)
  _examples(folder)
  _rankings(folder)
  made_tasks.model(folder / 'model')
  for name, content in (('gpt', {'model_type': 'gpt2', 'architectures': ['GPT2Model']}),
                        ('no_sizes', {'model_type': 'bert'})):
    (folder / name).mkdir()
    (folder / name / 'config.json').write_text(json.dumps(content))
  _break_weights(folder)
  _pickle_code(folder)
  (folder / 'file').write_text('')
  (folder / 'nobody').mkdir()
  run.run(conftest.tiny_config('corpus.txt', train_steps=2, checkpoint_every=1,
                               **{'optimizer.warmup_steps': 1}), 'run')
  _edit_text(folder)
  shutil.copytree(folder / 'run', folder / 'hurt')
  shutil.rmtree(folder / 'hurt/checkpoints/2')
  shutil.copytree(folder / 'run/checkpoints/1', folder / 'hurt/checkpoints/2')
