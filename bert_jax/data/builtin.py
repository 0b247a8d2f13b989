"""The corpus that every installation carries: the English prose of its own documentation.

The docstrings of Python's standard library and of the packages in requirements.txt, and the topics
of `pydoc`: one document a module. Nothing of it is in this repository.
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

# Packages of requirements.txt (and scipy, which jax always brings) that explain themselves.
PACKAGES = ('absl', 'array_record', 'etils', 'flax', 'grain', 'jax', 'matplotlib', 'ml_collections',
            'numpy', 'optax', 'orbax', 'scipy', 'sentencepiece', 'tensorboardX',
            'tensorflow_datasets', 'tokenizers', 'tqdm')
_SKIPPED_DIRECTORIES = {'test', 'tests', 'testing', 'idlelib', 'lib2to3', 'site-packages',
                        'dist-packages', 'third_party', '_vendor', 'vendor', '__pycache__'}
_MIN_WORDS = 40  # of a document: shorter ones say too little to tell a next sentence


def is_prose(paragraph: str) -> bool:
  """Whether a paragraph of a docstring is English sentences: no code, table or list of names."""
  words = paragraph.split()
  letters = sum(c.isalpha() or c.isspace() for c in paragraph)
  plain = sum(w.strip('.,;:()"\'`').isalpha() for w in words)
  return (len(words) >= 6 and '>>>' not in paragraph and letters > 0.85 * len(paragraph)
          and plain > 0.7 * len(words))


def paragraphs(docstring: str) -> list[str]:
  """The paragraphs of a docstring that are prose, each as one line without markup."""
  text = inspect.cleandoc(docstring).expandtabs()
  found = []
  for block in re.split(r'\n\s*\n', text):
    line = ' '.join(block.split())
    line = re.sub(r':\w+:`~?([^`<]*)[^`]*`', r'\1', line)  # :func:`name` -> name
    line = re.sub(r'^\w+ -{3,} ', '', line)  # the underlined title of a section
    line = line.replace('`', '').replace('**', '')
    if is_prose(line):
      found.append(line)
  return found


def module_docstrings(file: pathlib.Path) -> list[str]:
  """Every docstring in a Python source file, in order; none if it cannot be parsed."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # old escapes in other people's strings
      tree = ast.parse(file.read_bytes())
  except (SyntaxError, ValueError):
    return []
  nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  found = [(getattr(node, 'lineno', 0), ast.get_docstring(node, clean=False))
           for node in ast.walk(tree) if isinstance(node, nodes)]
  return [docstring for _, docstring in sorted(found, key=lambda x: x[0]) if docstring]


def source_files() -> Iterator[pathlib.Path]:
  """Every Python file of the standard library and of PACKAGES, without their tests."""
  roots = [pathlib.Path(sysconfig.get_paths()['stdlib'])]
  for package in PACKAGES:
    spec = importlib.util.find_spec(package)
    roots += map(pathlib.Path, spec.submodule_search_locations or () if spec else ())
  for root in roots:
    for file in sorted(root.rglob('*.py')):
      if not _SKIPPED_DIRECTORIES & set(file.relative_to(root).parts[:-1]):
        yield file


def documents() -> Iterator[list[str]]:
  """One document a module, each paragraph used once in the whole corpus."""
  from pydoc_data import topics
  seen = set()
  sources = ([topics.topics[name]] for name in sorted(topics.topics))
  for docstrings in (*sources, *map(module_docstrings, source_files())):
    document = []
    for paragraph in (p for d in docstrings for p in paragraphs(d)):
      if paragraph not in seen:
        seen.add(paragraph)
        document.append(paragraph)
    if sum(len(p.split()) for p in document) >= _MIN_WORDS:
      yield document


def extract(path: epath.Path):
  """Writes the corpus to `path` (.txt.gz, the format that every text source has), atomically."""
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.parent / (path.name + '.partial')
  with partial.open('wb') as raw, gzip.GzipFile(fileobj=raw, mode='wb', mtime=0) as f:
    for document in documents():
      f.write(('\n'.join(document) + '\n\n').encode('utf-8', 'replace'))
  partial.replace(path)
