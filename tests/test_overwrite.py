"""Every command refuses to replace an existing output without --overwrite."""

import dataclasses
import json
import os
import pathlib
import shutil

from etils import epath
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.evaluation import report, suites
from bert_jax.inference import json_lines, predictions
from bert_jax.interop import conversion, load
from bert_jax.runtime import storage
from tests import conftest, made_tasks, typed

ROOT = pathlib.Path(__file__).parent


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  path = tmp_path_factory.mktemp('overwrite')
  made_tasks.model(path / 'model')
  made_tasks.with_head(path / 'sst2', 'sequence_classification', ('no', 'yes'))
  (path / 'texts.jsonl').write_text(''.join(json.dumps({'text': f'w{i}'}) + '\n' for i in range(9)))
  (path / 'dev.tsv').write_text('text\tlabel\nw1 good\tyes\nw2 bad\tno\n')
  (path / 'pairs.tsv').write_text('query\tpositive\nw1\tw2\n')
  (path / 'corpus.jsonl').write_text(''.join(
      json.dumps({'_id': f'd{i}', 'text': f'w{i} w{i + 1}'}) + '\n' for i in range(9)))
  conftest.write_corpus(path / 'corpus.txt', conftest.make_documents(20))
  return path


@pytest.fixture(scope='module')
def command(folder):
  """Types a command; returns (status, standard error)."""
  with typed.server() as run:
    def call(module, *arguments, stdin=''):
      status = run(module, arguments, folder, folder / 'stderr', stdin=stdin)
      return status, (folder / 'stderr').read_text()
    yield call


# The command, the flag of its output, and the output.
COMMANDS = {
    'predict': (['--task=embed', '--model=model', '--input=texts.jsonl'], '--output', 'out.jsonl'),
    'predict arrays': (['--task=embed', '--model=model', '--input=texts.jsonl'], '--output',
                       'new/out.npy'),
    'evaluate': (['--model=sst2', '--suite=task', '--data=dev.tsv'], '--output', 'out.json'),
    'mine': (['--model=model', '--input=pairs.tsv', '--corpus=corpus.jsonl', '--margin=-2'],
             '--output', 'mined.jsonl'),
    'explore': (['--model=model', '--view=attention', '--text=w1 w2'], '--output', 'a.html'),
    'explore words': (['--model=model', '--view=neighbours', '--words=w1'], '--output', 'map.png'),
    'plan': ([f'--config={ROOT}/tiny.py', '--config.data.source=corpus.txt', '--topology=local'],
             '--out', 'plan.json')}
FAST = ('predict arrays', 'explore')  # the others are slow


@pytest.mark.parametrize('name', COMMANDS)
def test_an_existing_output_is_kept_without_overwrite(folder, command, name):
  arguments, flag, output = COMMANDS[name]
  path, typed_flag = folder / output, f'{flag}={output}'
  path.parent.mkdir(exist_ok=True)
  path.write_text('mine')
  before = {p: p.read_bytes() for p in folder.rglob('*') if p.is_file()}
  expected = (f'bert_jax: {typed_flag} already exists: give another {flag}, or --overwrite to '
              'replace it\n')
  assert command(name.split()[0], *arguments, typed_flag) == (2, expected)
  after = {p: p.read_bytes() for p in folder.rglob('*') if p.is_file() and 'stderr' not in p.name}
  assert after == {p: x for p, x in before.items() if 'stderr' not in p.name}
  if name in FAST:  # the remedy of the message works
    status, error = command(name.split()[0], *arguments, typed_flag, '--overwrite')
    assert status == 0, error
    assert path.read_bytes() != b'mine'


@pytest.mark.parametrize('name', ['predict', 'mine', 'explore', 'plan', 'convert', 'evaluate'])
def test_overwrite_without_an_output_is_refused(command, name):
  flag = '--out' if name == 'plan' else '--output'
  arguments = {'convert': ['--input=model', '--verify'], 'plan': COMMANDS['plan'][0]}.get(name, [])
  assert command(name, *arguments, '--overwrite') == (
      2, f'bert_jax: --overwrite has no effect here: give {flag} too\n')


@pytest.mark.parametrize('flags', [(), ('--overwrite',)])
def test_an_interrupted_prediction_resumes(folder, command, flags):
  """OUTPUT.partial does not count as an output; --overwrite keeps the old output to the end."""
  if flags:
    (folder / 'p.jsonl').write_text('the one before')
  before = ''.join(f'{{"made before": {i}}}\n' for i in range(4))
  (folder / 'p.jsonl.partial').write_text(before + '{"made bef')  # as a kill leaves it
  (folder / 'p.jsonl.partial.json').write_text(json.dumps({
      'task': 'embed', 'model': json_lines.identity(load.load(str(folder / 'model'))),
      'input': ['texts.jsonl', *storage.size_and_time(epath.Path(folder / 'texts.jsonl'))],
      'options': dataclasses.asdict(predictions.Options())}))
  status, error = command('predict', '--task=embed', '--model=model', '--input=texts.jsonl',
                          '--output=p.jsonl', *flags)
  assert status == 0 and '4 examples were answered before' in error
  lines = (folder / 'p.jsonl').read_text().splitlines(keepends=True)
  assert ''.join(lines[:4]) == before and len(lines) == 9 and '"embedding"' in lines[4]
  assert not list(folder.glob('p.jsonl.*'))
  (folder / 'p.jsonl').unlink()


def _write_lines(path):
  with json_lines.partial(path, {'of': 'a job'}) as (sink, _):
    sink.write('new')


def _write_report(path):
  report.write(report.Report({}, ('name', 'value'), [['x', 0.5]], 'value'), path)


@pytest.mark.parametrize('write', [
    _write_lines, _write_report, lambda path: storage.write_whole(path, 'new')])
@pytest.mark.parametrize('content', ['mine', None])
def test_a_link_stays_and_its_target_is_written(tmp_path, write, content):
  """Through a second link, into another folder that may not exist yet."""
  target, links = tmp_path / 'disk/target.json', [tmp_path / name for name in ('a.json', 'b.json')]
  links[0].symlink_to('b.json')
  links[1].symlink_to('disk/target.json')
  if content:
    target.parent.mkdir()
    target.write_text(content)
  storage.make_parent('--output', epath.Path(links[0]))
  write(epath.Path(links[0]))
  assert [os.readlink(link) for link in links] == ['b.json', 'disk/target.json']
  assert 'new' in target.read_text() or json.loads(target.read_text())['rows']
  assert [p.name for p in target.parent.iterdir()] == ['target.json']  # nothing .partial is left
  assert not list(tmp_path.glob('*.partial*'))


def test_a_link_and_its_target_are_locked_as_one_output(tmp_path):
  (tmp_path / 'link').symlink_to('target')
  with (storage.exclusive('--output', str(tmp_path / 'link')),
        pytest.raises(UserError, match='another process is writing it'),
        storage.exclusive('--output', str(tmp_path / 'target'))):
    pass


def test_a_linked_output_is_replaced_only_with_overwrite(folder, command):
  arguments, flag, _ = COMMANDS['predict arrays']
  (folder / 'target.npy').write_text('mine')
  (folder / 'link.npy').symlink_to('target.npy')
  status, error = command('predict', *arguments, f'{flag}=link.npy')
  assert status == 2 and 'link.npy already exists' in error
  status, error = command('predict', *arguments, f'{flag}=link.npy', '--overwrite')
  assert status == 0, error
  assert os.readlink(folder / 'link.npy') == 'target.npy'
  assert np.load(folder / 'target.npy').shape[0] == 9


# ---- evaluations: several files -----------------------------------------------------------------


@pytest.mark.parametrize('ending', ['.json', '.md', '.png', '.run', '.reranked.run'])
def test_an_evaluation_replaces_no_file_without_overwrite(tmp_path, ending):
  """Not even a user's x.md or x.run next to it. The check comes before anything is loaded."""
  (tmp_path / f'x{ending}').write_text('mine')
  beside = '' if ending == '.json' else f': {tmp_path}/x{ending}'
  with pytest.raises(UserError, match=f'^--output={tmp_path}/x.json{beside} already exists: give '
                                      'another --output, or --overwrite to replace it'):
    suites.run('nowhere', 'retrieval', 'nowhere', str(tmp_path / 'x.json'), {'rerank': 'nowhere'},
               overwrite=False)
  with pytest.raises(UserError, match='nowhere is not a folder'):
    suites.run('nowhere', 'retrieval', 'nowhere', str(tmp_path / 'x.json'), {}, overwrite=True)
  if ending.endswith('.run'):  # not a file of this suite
    with pytest.raises(UserError, match='nowhere is not a folder'):
      suites.run('nowhere', 'task', 'nowhere', str(tmp_path / 'x.json'), {}, overwrite=False)
  assert [p.read_text() for p in tmp_path.iterdir()] == ['mine']


@pytest.mark.parametrize('suite, name, data', [
    ('minimal_pairs', 'x.pairs.jsonl', 'x.pairs.jsonl'),
    ('minimal_pairs', 'x.pairs.jsonl', '*.jsonl'),
    ('masked_lm', 'x.md', 'x.md'), ('masked_lm', 'x.batches.jsonl', '**/x.*'),
    ('task', 'x.json', 'link.tsv'), ('glue', 'x.runs', 'x.runs')])
def test_an_evaluation_never_overwrites_its_data(tmp_path, suite, name, data):
  (tmp_path / name).write_text('mine')
  (tmp_path / 'link.tsv').symlink_to(name)
  beside = '' if name == 'x.json' else f': {tmp_path}/{name}'
  with pytest.raises(UserError) as error:
    suites.run('nowhere', suite, f'{tmp_path}/{data}', str(tmp_path / 'x.json'), {}, overwrite=True)
  assert str(error.value) == (f'--output={tmp_path}/x.json{beside} would overwrite what this '
                              'command reads: give another --output')
  assert (tmp_path / name).read_text() == 'mine'


def test_the_files_of_a_report_appear_together(tmp_path, monkeypatch):
  table = report.Report({'a': 1}, ('name', 'value'), [['x', 0.5]], 'value', {'.run': 'q Q0 d 1 1'})
  monkeypatch.setattr(report, '_picture', lambda _: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    report.write(table, epath.Path(tmp_path / 'x.json'))
  assert not list(tmp_path.iterdir())
  monkeypatch.undo()
  report.write(table, epath.Path(tmp_path / 'x.json'))
  assert sorted(p.name for p in tmp_path.iterdir()) == ['x.json', 'x.md', 'x.png', 'x.run']
  assert (tmp_path / 'x.run').read_text() == 'q Q0 d 1 1'
  assert (tmp_path / 'x.png').read_bytes()[:4] == b'\x89PNG'
  assert json.loads((tmp_path / 'x.json').read_text()) == {
      'a': 1, 'rows': [{'name': 'x', 'value': 0.5}]}


# ---- folders ------------------------------------------------------------------------------------


def test_overwrite_replaces_a_converted_model(folder, tmp_path):
  source, out = str(folder / 'model'), tmp_path / 'out'
  shutil.copytree(source, out)
  stale = out / 'encoder.stablehlo'  # which only another format writes
  stale.write_text('of the one before')
  message = 'already exists: give another --output, or --overwrite to replace it'
  with pytest.raises(UserError, match=message):
    conversion.convert(source, str(out), 'bert_jax')
  with pytest.raises(UserError, match='bad.* is not a folder here'):
    conversion.convert(str(tmp_path / 'bad'), str(out), 'bert_jax', overwrite=True)
  assert stale.exists()  # a mistake replaces nothing
  conversion.convert(source, str(out), 'bert_jax', overwrite=True)
  assert not stale.exists() and (out / 'bert.json').exists()
  assert [p.name for p in tmp_path.iterdir()] == ['out']
  with pytest.raises(UserError, match='--overwrite has no effect here: --verify writes nothing'):
    conversion.convert(source, str(out), None, verify_only=True, overwrite=True)


@pytest.mark.parametrize('content', [
    ['notes.txt'], ['run.json', 'config.json'], ['.git'], ['config.json', 'README.md']])
def test_a_folder_without_a_converted_model_is_never_replaced(folder, tmp_path, content):
  for name in content:
    (tmp_path / name).write_text('{}')
  for overwrite in (False, True):
    with pytest.raises(UserError, match='already exists and is not only a converted model: give'):
      conversion.convert(str(folder / 'model'), str(tmp_path), 'bert_jax', overwrite=overwrite)
  assert sorted(p.name for p in tmp_path.iterdir()) == sorted(content)


@pytest.mark.parametrize('name', ['data.csv', 'src/main.py', '.git/HEAD', 'tokenizer/notes.txt'])
def test_a_converted_model_with_another_file_is_never_replaced(folder, tmp_path, name):
  out = tmp_path / 'out'
  shutil.copytree(folder / 'model', out)
  (out / name).parent.mkdir(exist_ok=True)
  (out / name).write_text('mine')
  for overwrite in (False, True):
    with pytest.raises(UserError) as error:
      conversion.convert(str(folder / 'model'), str(out), 'bert_jax', overwrite=overwrite)
    assert str(error.value) == (
        f'--output={out} holds {name}, which is not part of a converted model: nothing is '
        'replaced, use another --output')
  assert (out / name).read_text() == 'mine' and (out / 'model.safetensors').exists()


@pytest.mark.medium
@pytest.mark.parametrize('to', conversion.FORMATS)
def test_overwrite_replaces_each_format(folder, tmp_path, to):
  """Including the modules and prompts of a sentence encoder."""
  out, source = tmp_path / 'out', str(folder / 'model')
  if to == 'bert_jax':
    conversion.convert(source, str(tmp_path / 'texts'), 'sentence_transformers')
    source = str(tmp_path / 'texts')
  conversion.convert(source, str(out), to)
  (out / 'README.md').write_text('of the one before')
  conversion.convert(source, str(out), to, overwrite=True)
  assert 'of the one before' not in ''.join(p.read_text() for p in out.glob('README.md'))


def test_the_source_is_never_replaced(folder, tmp_path):
  made_tasks.model(tmp_path / 'model')
  (tmp_path / 'config.json').write_text('{}')
  for output in (tmp_path, tmp_path / 'model', tmp_path / 'model/../model'):
    with pytest.raises(UserError, match='already exists and is not only a converted model'):
      conversion.convert(str(tmp_path / 'model'), str(output), 'bert_jax', overwrite=True)
  assert (tmp_path / 'model/model.safetensors').exists()


def test_overwrite_replaces_records(folder, command):
  arguments = ['--input=corpus.txt', '--output=records', '--workers=1']
  assert command('prepare', *arguments, '--vocab_size=200')[0] == 0
  first = json.loads((folder / 'records/manifest.json').read_text())['digest']
  assert command('prepare', *arguments, '--vocab_size=150') == (
      2, 'bert_jax: records is not empty: it holds records made with another vocab_size; use '
         'another folder, or --overwrite to replace the records\n')
  # After a mistake or with a foreign file, nothing changes.
  bad = [arguments[0], '--vocab=nowhere', arguments[1], '--overwrite']
  assert command('prepare', *bad)[0] == 2
  (folder / 'records/notes.txt').write_text('mine')
  status, error = command('prepare', *arguments, '--vocab_size=150', '--overwrite')
  assert status == 2 and 'records holds notes.txt, which is not part of its records' in error
  (folder / 'records/notes.txt').unlink()
  assert json.loads((folder / 'records/manifest.json').read_text())['digest'] == first
  status, error = command('prepare', *arguments, '--vocab_size=150', '--overwrite')
  assert status == 0, error
  assert json.loads((folder / 'records/manifest.json').read_text())['digest'] != first
  assert sorted(p.name for p in folder.glob('records*')) == ['records']
  assert command('prepare', '--input=corpus.txt', '--check', '--overwrite') == (
      2, 'bert_jax: --overwrite has no effect here: --check writes nothing\n')


def test_a_link_to_a_replaced_folder_stays(folder, command, tmp_path):
  """Replaces twice: the first time leaves nothing that blocks the second."""
  (tmp_path / 'disk').mkdir()
  (tmp_path / 'link').symlink_to('disk')
  output = f'--output={tmp_path}/link'
  for size in (150, 160, 170):
    status, error = command('prepare', '--input=corpus.txt', '--workers=1', output,
                            f'--vocab_size={size}', *['--overwrite'] * (size > 150))
    assert status == 0, error
    vocabulary = (tmp_path / 'disk/tokenizer/vocab.txt').read_text().splitlines()
    assert len(vocabulary) == size
  shutil.rmtree(tmp_path / 'disk')
  conversion.convert(str(folder / 'model'), str(tmp_path / 'disk'), 'bert_jax')
  for _ in range(2):
    (tmp_path / 'disk/encoder.stablehlo').write_text('of the one before')
    conversion.convert(str(folder / 'model'), str(tmp_path / 'link'), 'bert_jax', overwrite=True)
    assert not (tmp_path / 'disk/encoder.stablehlo').exists()
  assert os.readlink(tmp_path / 'link') == 'disk'
  assert sorted(path.name for path in tmp_path.iterdir()) == ['disk', 'link']


def test_an_output_in_an_s3_bucket_is_refused(command):
  arguments = COMMANDS['predict'][0]
  status, error = command('predict', *arguments, '--output=s3://bucket/out.jsonl')
  assert (status, error) == (
      2, 'bert_jax: --output=s3://bucket/out.jsonl: buckets are named gs://BUCKET/FOLDER\n')


def test_a_device_is_refused_as_output(folder, command):
  for flags in ((), ('--overwrite',)):
    status, error = command('predict', '--task=embed', f'--model={folder}/model',
                            f'--input={folder}/texts.jsonl', '--output=/dev/null', *flags)
    assert status == 2 and error.strip().endswith('/dev/null is a device or a pipe: give a file')
  assert not pathlib.Path('/dev/null').is_file()
