"""The rooms of the package: imports point down one list of rooms and form no cycle."""

import ast
import graphlib
import pathlib

PACKAGE = pathlib.Path(__file__).parents[1] / 'bert_jax'
# A room imports only earlier rooms. The commands and `from_pretrained` are above all rooms.
ROOMS = ('errors', 'config_fields', 'config_files', 'runtime', 'data', 'parallel', 'model',
         'objectives', 'labelled', 'tasks', 'reporting', 'training', 'interop', 'inference',
         'mteb', 'fields', 'config', 'runs', 'evaluation', 'planning', 'views', 'commands')
COMMANDS = {'__init__', 'main', 'prepare', 'convert', 'predict', 'plan', 'explore', 'evaluate',
            'mine'}


def imports() -> dict[str, set[str]]:
  """{module: the modules of the package that it imports, also inside functions}."""
  files = {'.'.join(path.relative_to(PACKAGE.parent).with_suffix('').parts): path
           for path in PACKAGE.rglob('*.py')}
  graph = {}
  for module, path in files.items():
    graph[module] = set()
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('bert_jax'):
        for name in node.names:
          whole = f'{node.module}.{name.name}'
          graph[module].add(whole if whole in files else node.module)
      if isinstance(node, ast.Import):
        graph[module] |= {name.name for name in node.names}
  return {module: names & files.keys() for module, names in graph.items()}


def room(module: str) -> str:
  return module.split('.')[1]


def test_imports_point_down():
  above = []
  for module, names in imports().items():
    for name in names:
      if room(module) == room(name) or room(module) in COMMANDS:
        continue
      if room(name) in COMMANDS or ROOMS.index(room(name)) > ROOMS.index(room(module)):
        above.append(f'{module} imports {name}')
  assert not above


def test_imports_form_no_cycle():
  list(graphlib.TopologicalSorter(imports()).static_order())  # raises CycleError, which names them


def test_file_names_are_unique():
  names = [path.stem for path in PACKAGE.rglob('*.py') if path.stem != '__init__']
  assert not {name for name in names if names.count(name) > 1}


def test_only_parallel_and_planning_name_mesh_axes():
  """All other rooms name logical axes."""
  for path in PACKAGE.rglob('*.py'):
    if path.parent.name in ('parallel', 'planning'):
      continue
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Call) and ast.unparse(node.func).endswith('PartitionSpec'):
        assert not any(isinstance(x, ast.Constant) and isinstance(x.value, str)
                       for x in ast.walk(node)), path
