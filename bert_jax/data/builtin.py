"""The built-in corpus: English prose from the documentation of the installed packages.

Each topic of `pydoc` becomes a document. So do the docstrings of each module of Python's
standard library and of the packages in requirements.txt. This repository contains none of
the text.
"""

import ast
from collections.abc import Iterator
import gzip
import importlib.util
import inspect
import pathlib
import re
import sysconfig
import warnings

from etils import epath

# Packages of requirements.txt with prose in their docstrings, and scipy, which jax needs.
_PACKAGES = ('absl', 'array_record', 'etils', 'flax', 'grain', 'jax', 'matplotlib',
             'ml_collections', 'numpy', 'optax', 'orbax', 'scipy', 'sentencepiece',
             'tensorboardX', 'tensorflow_datasets', 'tokenizers', 'tqdm')
_SKIPPED_DIRECTORIES = {
    'test', 'tests', 'testing', 'idlelib', 'lib2to3', 'site-packages', 'dist-packages',
    'third_party', '_vendor', 'vendor', '__pycache__',
}
_MIN_WORDS = 40  # shorter documents are too short for next sentence prediction


def is_prose(paragraph: str) -> bool:
  """True for English sentences; False for code, tables and lists of names."""
  words = paragraph.split()
  letters = sum(c.isalpha() or c.isspace() for c in paragraph)
  plain = sum(w.strip('.,;:()"\'`').isalpha() for w in words)
  return (len(words) >= 6 and '>>>' not in paragraph and letters > 0.85 * len(paragraph)
          and plain > 0.7 * len(words))


def paragraphs(docstring: str) -> list[str]:
  """The prose paragraphs of a docstring, each as one line without markup."""
  text = inspect.cleandoc(docstring).expandtabs()
  prose = []
  for block in re.split(r'\n\s*\n', text):
    line = ' '.join(block.split())
    line = re.sub(r':\w+:`~?([^`<]*)[^`]*`', r'\1', line)  # :func:`name` -> name
    line = re.sub(r'^\w+ -{3,} ', '', line)  # an underlined section title
    line = line.replace('`', '').replace('**', '')
    if is_prose(line):
      prose.append(line)
  return prose


def module_docstrings(file: pathlib.Path) -> list[str]:
  """All docstrings of a Python source file, in order; [] if it does not parse."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # invalid escapes in the packages' strings
      tree = ast.parse(file.read_bytes())
  except (SyntaxError, ValueError):
    return []
  kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  nodes = sorted((node for node in ast.walk(tree) if isinstance(node, kinds)),
                 key=lambda node: getattr(node, 'lineno', 0))
  return [text for node in nodes if (text := ast.get_docstring(node, clean=False))]


def _source_files() -> Iterator[pathlib.Path]:
  """Yields the Python files of the standard library and of _PACKAGES, without tests."""
  roots = [pathlib.Path(sysconfig.get_paths()['stdlib'])]
  for package in _PACKAGES:
    spec = importlib.util.find_spec(package)
    roots += map(pathlib.Path, spec.submodule_search_locations or () if spec else ())
  for root in roots:
    for file in sorted(root.rglob('*.py')):
      if not _SKIPPED_DIRECTORIES & set(file.relative_to(root).parts[:-1]):
        yield file


def _documents() -> Iterator[list[str]]:
  """Yields the paragraphs of each document, each paragraph once in the whole corpus."""
  from pydoc_data import topics
  # Packages repeat paragraphs, such as the description of an argument, many times.
  seen = set()
  sources = ([topics.topics[name]] for name in sorted(topics.topics))
  for docstrings in (*sources, *map(module_docstrings, _source_files())):
    distinct = dict.fromkeys(p for d in docstrings for p in paragraphs(d))
    document = [paragraph for paragraph in distinct if paragraph not in seen]
    seen.update(document)
    if sum(len(p.split()) for p in document) >= _MIN_WORDS:
      yield document


def extract(path: epath.Path):
  """Writes the corpus to a .txt.gz file, atomically."""
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.parent / (path.name + '.partial')
  # mtime=0: the same packages give the same bytes.
  with partial.open('wb') as raw, gzip.GzipFile(fileobj=raw, mode='wb', mtime=0) as f:
    for document in _documents():
      f.write(('\n'.join(document) + '\n\n').encode('utf-8', 'replace'))
  partial.replace(path)
