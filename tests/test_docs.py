"""Every command of the README and the guides runs, with small sizes and local paths."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from bert_jax.interop import conversion
from tests import conftest, made_tasks, typed
from tests.test_configs import SMALL

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {str(path.relative_to(ROOT)): path.read_text()
         for path in (ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md')))}


def blocks(language: str, pages=PAGES) -> list[str]:
  """The code blocks of the pages, each once."""
  texts = [block for page in pages.values()
           for block in re.findall(rf'```{language}\n(.*?)```', page, re.DOTALL)]
  return list(dict.fromkeys(texts))


def commands(pages=PAGES) -> list[str]:
  """The command lines of the bash blocks, each once, continued lines joined."""
  lines = [re.sub(' +', ' ', line) for block in blocks('bash', pages)
           for line in block.replace('\\\n', ' ').splitlines() if line.strip()]
  return list(dict.fromkeys(lines))


def shell(line):
  done = subprocess.run(
      ['bash', '-c', line], cwd=ROOT, capture_output=True, text=True,
      env={**os.environ, 'VENV': sys.prefix, 'PYTHON': sys.executable,
           'XLA_FLAGS': conftest.xla_flags(1),
           'PATH': f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}'})
  assert done.returncode == 0, f'{line}\n{done.stdout}\n{done.stderr}'
  return done.stdout


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """Runs a command line; commands of bert_jax need no shell and share their imports."""
  folder = tmp_path_factory.mktemp('output')

  def run(line):
    command = re.fullmatch(r"(?:echo '(.+)' \| )?python -m bert_jax\.(\w+) (.+)", line)
    if not command:
      return shell(line)
    stdin, module, arguments = command.groups()
    status = start(module, shlex.split(arguments), ROOT, folder / 'stderr', stdin=stdin or '',
                   environment={'XLA_FLAGS': conftest.xla_flags(1)})
    assert status == 0, f'{line}\n{(folder / "stderr").read_text()}'

  with typed.server() as start:
    yield run


@pytest.fixture(scope='module')
def workdir(tmp_path_factory, corpus_file):
  """A small workdir of `bash launch/local.sh`; the other commands use it as runs/tiny."""
  folder = tmp_path_factory.mktemp('readme')
  flags = ' '.join(f'--config.{name}={value}' for name, value in SMALL.items())
  out = shell(f'bash launch/local.sh {folder}/runs/tiny --config.data.source={corpus_file} {flags}')
  assert 'Filled masks:' in out and re.search(r'\d%', out), out
  return folder


def test_the_first_two_commands_are_the_launch_scripts():
  # The fixture above runs the first with small sizes. The second runs this test.
  assert commands()[:2] == ['bash launch/local.sh', 'bash launch/test.sh']


def finetuning(line, workdir, tmp_path):
  """A fine-tuning command on generated files, from a small model, for two steps."""
  task = re.search(r'configs/(\w+)\.py', line)[1]
  replaced = re.compile(r'--(workdir|config\.(data|init_from))')
  words = [w for w in shlex.split(line) if not replaced.match(w)]
  fields = {'init_from': made_tasks.model(tmp_path / 'model'), 'batch_size': 8, 'max_len': 32,
            'train_epochs': 0, 'train_steps': 2, **made_tasks.files(task, tmp_path, 20, 8)}
  return shlex.join([*words, f'--workdir={tmp_path}/run',
                     *(f'--config.{name}={value}' for name, value in fields.items())])


def evaluation(line, tmp_path, corpus_file):
  """A command of `evaluate` or of the speedrun on generated files."""
  pair = {'sentence_good': 'the king runs', 'sentence_bad': 'the king run', 'UID': 'agreement',
          'linguistics_term': 'verbs'}
  (tmp_path / 'pairs.jsonl').write_text(json.dumps(pair) + '\n')
  (tmp_path / 'GLUE/SST-2').mkdir(parents=True)
  for name in ('train', 'dev'):
    (tmp_path / f'GLUE/SST-2/{name}.tsv').write_text(
        'sentence\tlabel\n' + 'the king\t1\na tree\t0\n' * 8)
  for name, text in (('corpus', 'w1 w2'), ('queries', 'w1')):
    (tmp_path / f'{name}.jsonl').write_text(json.dumps({'_id': 'a', 'text': text}) + '\n')
  (tmp_path / 'qrels').mkdir()
  (tmp_path / 'qrels/test.tsv').write_text('query-id\tcorpus-id\tscore\na\ta\t1\n')
  for name, path in (("'blimp/*.jsonl'", f'{tmp_path}/pairs.jsonl'), ('=GLUE', f'={tmp_path}/GLUE'),
                     ('=SST-2', f'={tmp_path}/GLUE/SST-2'),
                     ('=BEIR/scifact', f'={tmp_path}'),
                     ("'held_out/*.txt'", corpus_file), ("'corpus/*.txt.gz'", corpus_file),
                     ('=scores/', f'={tmp_path}/scores/')):
    line = line.replace(name, path)
  if 'speedrun' in line:  # enough minutes for a step of each phase on a busy machine
    return line + f' --minutes=0.2 --words=3000 --workdir={tmp_path}/speedrun'
  if 'suite=task' in line:  # the stand-in for runs/sst2 has other columns
    return line + ' --fields=format=glue/sst2'
  return line + ' --rates=1e-4 --seeds=1 --epochs=1 --batch_size=8' * ('suite=glue' in line)


@pytest.fixture(scope='module')
def fine_tuned(tmp_path_factory):
  """Untrained models with a head, as the workdirs that the guides predict with."""
  folder, workdirs = tmp_path_factory.mktemp('fine_tuned'), {}
  for name, task, labels in (('sst2', 'sequence_classification', ('negative', 'positive')),
                             ('ner', 'token_classification', ('B-PER', 'O')),
                             ('squad', 'question_answering', ('start', 'end')),
                             ('choices', 'multiple_choice', ('score',)),
                             ('reranker', 'sequence_classification', ('score',))):
    workdirs[f'runs/{name}'] = made_tasks.with_head(folder / name, task, labels)
  workdirs['runs/late'] = made_tasks.late(folder / 'late')
  workdirs['runs/embedder'] = made_tasks.model(folder / 'embedder')
  return workdirs


@pytest.fixture(scope='module')
def exported(workdir, tmp_path_factory):
  """The folders that docs/serving.md loads."""
  folder = tmp_path_factory.mktemp('exported')
  for name, to in (('model', 'huggingface'), ('embedder', 'sentence_transformers'),
                   ('graph', 'onnx')):
    conversion.convert(f'{workdir}/runs/tiny', str(folder / name), to)
  return folder


def cases() -> list:
  """The commands after the first two; long trainings of the guides are slow tests."""
  trains = re.compile(r'bert_jax\.(main|plan)|launch/s|suite=glue')
  of_readme = commands({'README.md': PAGES['README.md']})
  return [pytest.param(line, marks=pytest.mark.slow)
          if trains.search(line) and line not in of_readme else line for line in commands()[2:]]


@pytest.mark.medium
@pytest.mark.parametrize('line', cases())
def test_each_documented_command_runs(line, run, workdir, tmp_path, corpus_file, fine_tuned):
  for name, model in fine_tuned.items() if '_jax.main' not in line else ():
    line = line.replace(f'={name}', f'={model}')
  line = line.replace('runs/tiny', f'{workdir}/runs/tiny')
  if 'bert_jax.prepare' in line:
    line = (line.replace("'corpus/*.txt.gz'", corpus_file).replace('=30522', '=200')
            .replace('records/mine', f'{tmp_path}/records'))
  if 'bert_jax.mine' in line:
    (tmp_path / 'corpus.jsonl').write_text(
        ''.join(json.dumps({'_id': f'{i}', 'text': f'the king {i}'}) + '\n' for i in range(9)))
    (tmp_path / 'pairs.jsonl').write_text('{"query": "the king 1", "positive": "the king 1"}\n')
    line = line.replace('pairs.jsonl', f'{tmp_path}/pairs.jsonl').replace(
        '=corpus.jsonl', f'={tmp_path}/corpus.jsonl').replace('=0.05', '=0')
  if '--eval=SST-2' in line:
    (tmp_path / 'dev.tsv').write_text('sentence\tlabel\n' + 'the king\t1\na tree\t0\n' * 8)
    line = line.replace('SST-2/dev.tsv', f'{tmp_path}/dev.tsv') + ' --most_lost=1'
  if re.search(r'bert_jax\.(convert|explore|mine)', line):
    line = line.replace('exported/', f'{workdir}/exported/')
  if '--view' in line:  # words that the small vocabulary knows
    line = line.replace('list,string', 'the,a').replace('file', 'the')
  if 'bert_jax.evaluate' in line or 'speedrun.sh' in line:
    line = evaluation(line, tmp_path, corpus_file)
  line = line.replace('=5e-5,3e-5', '=5e-5').replace('seed=0,1,2', 'seed=0')
  if re.search(r'configs/(sequence_|token_|question_|multiple_|reranking|sentence_)', line):
    line = finetuning(line, workdir, tmp_path)
  elif 'bert_jax.plan' in line:
    line = re.sub('v5e:4x4|h100:8', 'local', line).replace(' --price=1.2', '')  # a CPU has no price
    line += " --config.model.num_layers=1 --config.phases='()'"
    line += ''.join(f' --config.{name}={value}' for name, value in SMALL.items())
  elif 'gpu.sh' in line:  # its other parts take minutes
    line = line.replace('records/wiki runs/gpu', f'{tmp_path} {tmp_path}/gpu versions')
  elif line.startswith('bash launch/') and 'speedrun' not in line:
    line = line.replace('.sh ', '.sh --dry-run ', 1)
  elif 'bert_jax.main' in line or 'supervise.py' in line:
    replaced = re.compile(r'--(workdir|config\.(data|mesh|phases))')
    words = [w for w in shlex.split(line) if not replaced.match(w)]
    phases = '((1,16,8),(1,32,8))' if re.search(r'base|large|small|medium', line) else '()'
    unused = ('batch_size', 'max_len') * (phases != '()') + ('model.vocab_size',) * (
        'teacher' in line)
    flags = [f'--config.{name}={value}' for name, value in SMALL.items() if name not in unused]
    words = [re.sub('teacher=.*', f'teacher={workdir}/runs/tiny', w) for w in words]
    if 'init_from' in line:
      words = [re.sub('init_from=.*', f'init_from={workdir}/runs/tiny', w) for w in words]
      flags = [flag for flag in flags if '.model.' not in flag]
    line = shlex.join([*words, *flags, f'--config.phases={phases}', f'--workdir={tmp_path}/run',
                       '--config.data.format=text', f'--config.data.source={corpus_file}'])
  run(line)


@pytest.mark.medium
@pytest.mark.parametrize('code', [
    pytest.param(code, marks=pytest.mark.slow) if 'bert_jax.train(' in code else code
    for code in blocks('python')])
def test_each_documented_python_block_runs(code, workdir, fine_tuned, exported):
  code = code.replace("'exported/", f"'{exported}/")
  for name, model in fine_tuned.items():
    code = code.replace(f"'{name}'", f"'{model}'")
  done = subprocess.run([sys.executable, '-c', code], cwd=workdir, capture_output=True, text=True,
                        env={**os.environ, 'PYTHONPATH': str(ROOT)})
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('name', PAGES)
def test_every_path_that_a_page_names_exists(name):
  if name == 'docs/mistakes.md':
    pytest.skip('it names files that do not exist, on purpose')
  named = r'(?:\]\(|`)((?:configs|launch|bert_jax|docs|tests|benchmarks)/[\w./]*\w)'
  for path in re.findall(named, PAGES[name]):
    assert (ROOT / path).exists(), path


def build_site(config: pathlib.Path, target: pathlib.Path) -> subprocess.CompletedProcess:
  # Not --quiet: it hides the warnings from --strict, too.
  return subprocess.run(
      [sys.executable, '-m', 'mkdocs', 'build', '--strict', f'--config-file={config}',
       f'--site-dir={target}'], cwd=ROOT, text=True, capture_output=True)


def test_the_site_builds_without_a_warning(tmp_path):
  """The interface page has every method that the other pages call."""
  done = build_site(ROOT / 'mkdocs.yml', tmp_path)
  assert not done.returncode and 'WARNING' not in done.stderr, done.stderr
  api = (tmp_path / 'api/objectives/index.html').read_text()
  assert 'bert_jax.objectives.masking.mask' in api and 'Masks a batch of rows' in api
  interface = (tmp_path / 'api/interface/index.html').read_text()
  shown = set(re.findall(r'id="bert_jax\.inference\.bert\.Bert\.(\w+)"', interface))
  assert shown == {'trained_length', 'encode', 'embed', 'similarity', 'fill_mask', 'next_sentence',
                   'score', 'search', 'rank'}
  assert set(re.findall(r'\bbert\.(\w+)\(', '\n'.join(PAGES.values()))) <= shown
  for page in (tmp_path / 'api').glob('*/index.html'):
    assert not re.search(r'<code>_\w+</code>', page.read_text()), page


def test_a_mistake_on_the_site_fails_the_build(tmp_path):
  settings = re.sub(r'^nav:\n(?: .*\n)*', '', (ROOT / 'mkdocs.yml').read_text(), flags=re.M)
  (tmp_path / 'mkdocs.yml').write_text(settings.replace('paths: [.]', f'paths: [{tmp_path}]'))
  (tmp_path / 'docs').mkdir()
  (tmp_path / 'docs/index.md').write_text(
      '# A page\n\n[a](gone.md) [b](other.md#gone) ![c](gone.png)\n\n::: wrong\n')
  (tmp_path / 'docs/other.md').write_text('# Another page\n')
  (tmp_path / 'wrong.py').write_text(
      'def f(x: int):\n  """Does it.\n\n  Args:\n    y: an argument.\n  """\n')
  done = build_site(tmp_path / 'mkdocs.yml', tmp_path / 'site')
  for warning in ("a link 'gone.md'", "a link 'gone.png'", "does not contain an anchor '#gone'",
                  "Parameter 'y' does not appear in the function signature"):
    assert re.search(f'WARNING .*{re.escape(warning)}', done.stderr), done.stderr
  assert done.returncode == 1
