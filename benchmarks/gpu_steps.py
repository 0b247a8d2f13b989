"""Training steps of several models on one GPU: all compile at once, then each is timed alone.

  python -m benchmarks.gpu_steps --records=records/wiki --out=runs/gpu/steps

Writes OUT/NAME.json as soon as a model is timed: milliseconds, tokens per second, memory,
seconds of compilation, cold and from the cache. OUT/NAME.txt has the time of each module
by the profiler. A model that has its file does not run again. RECORDS has 30,522 entries.
"""

import collections
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from absl import app, flags
from etils import epath
import jax

from benchmarks import train_steps, turns
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.planning import hlo, traffic
from bert_jax.training import state as state_lib

_RECORDS = flags.DEFINE_string('records', None, 'Folder of token records.', required=True)
_OUT = flags.DEFINE_string('out', None, 'Folder for the results.', required=True)
_NAMES = flags.DEFINE_list('names', None, 'Some of the models; by default all.')
_STEPS = flags.DEFINE_integer('steps', 20, 'Timed steps.')
_LAYERS = flags.DEFINE_integer('layers', 0, 'Of each model, for a trial; 0 = its own.')
_ROWS = flags.DEFINE_integer('rows', 0, 'Of each batch, for a trial; 0 = its own.')
_DO = flags.DEFINE_enum('do', '', ['', 'compile', 'time'], 'Internal: the part of a child.')

# name: (size, L, rows, other fields)
MODELS = {
    'base_128': ('base', 128, 256, {}),
    'base_128_xla': ('base', 128, 256, {'model.attention': 'xla'}),
    'base_128_scan': ('base', 128, 256, {'model.scan_unroll': 1}),
    'large_512': ('large', 512, 32, {}),
    'large_512_xla': ('large', 512, 32, {'model.attention': 'xla'}),
    'large_512_no_attention_dropout': ('large', 512, 32, {'model.attention_dropout': 0.0}),
    'large_512_no_attention_dropout_triton': (
        'large', 512, 32, {'model.attention_dropout': 0.0, 'model.attention': 'triton'})}
_SHOWN = 40  # modules


def _compiled(name: str):
  """(the job, the initial state, the compiled step, seconds of its compilation)."""
  size, length, rows, fields = MODELS[name]
  config = {'model.dtype': 'bfloat16', 'phases': (), 'train_steps': 100_000,
            'max_len': length, 'batch_size': _ROWS.value or rows,
            'data.source': _RECORDS.value, **fields}
  if _LAYERS.value:
    config |= {'model.num_layers': _LAYERS.value,
               'model.scan_unroll': min(_LAYERS.value, fields.get('model.scan_unroll', 99))}
  mesh = mesh_lib.make_mesh()
  workdir = epath.Path(_OUT.value) / f'{name}.run'
  config, job = train_steps.make_job(
      {'size': size, 'workdir': str(workdir), 'config': config}, True, mesh)
  init, abstract, step = state_lib.make_programs(job.task, config, mesh, job.train_steps)
  batch = mesh_lib.put_batch(job.data.rows(0), mesh)
  began = time.perf_counter()
  program = step.lower(abstract, batch).compile()
  return job, init, program, time.perf_counter() - began


def _modules(folder: pathlib.Path, text: str) -> list[str]:
  """The time of each module and operation in a trace, the longest first."""
  instructions = {x.name: x for computation in hlo.Module(text).computations.values()
                  for x in computation.values()}
  times = collections.Counter()
  for path in folder.glob('**/*.xplane.pb'):
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
      for line in plane.lines:
        for event in line.events:
          name = next((value for key, value in event.stats if key == 'hlo_op'), event.name)
          if name in instructions:
            times[traffic.place(instructions[name])] += event.duration_ns
  total = sum(times.values()) or 1
  return [f'{100 * ns / total:5.1f}%  {"  ".join(place)}'
          for place, ns in times.most_common(_SHOWN)]


def _time(name: str):
  """Times a model and writes its files."""
  job, init, program, seconds = _compiled(name)
  mesh, state = mesh_lib.make_mesh(), init(state_lib.root_key(0))
  batches = [mesh_lib.put_batch(job.data.rows(i), mesh) for i in range(turns.BATCHES)]
  real = statistics.mean(float((batch.tokens.text_ids > 0).sum()) for batch in batches)
  times, trace = [], pathlib.Path(_OUT.value) / f'{name}.trace'
  for i in range(_STEPS.value + 3):  # the first ones warm up
    began = time.perf_counter()
    state, metrics = program(state, batches[i % len(batches)])
    jax.block_until_ready(metrics)
    times.append(time.perf_counter() - began)
  with jax.profiler.trace(str(trace)):
    for batch in batches[:3]:
      state, metrics = program(state, batch)
    jax.block_until_ready(metrics)
  median, memory = statistics.median(times[3:]), program.memory_analysis()
  figures = {'ms': 1e3 * median, 'real_tokens_per_second': real / median,
             'temporaries': memory.temp_size_in_bytes, 'seconds_from_cache': seconds,
             'device': jax.devices()[0].device_kind, 'jax': jax.__version__}
  cold = pathlib.Path(_OUT.value, f'{name}.compiled')
  figures['seconds_to_compile'] = float(cold.read_text()) if cold.exists() else None
  pathlib.Path(_OUT.value, f'{name}.txt').write_text(
      '\n'.join(_modules(trace, program.as_text())) + '\n')
  pathlib.Path(_OUT.value, f'{name}.json').write_text(json.dumps(figures) + '\n')
  print(name, json.dumps(figures), flush=True)


def main(_):
  """Compiles all models in parallel, and times one after another."""
  names, out = _NAMES.value or list(MODELS), pathlib.Path(_OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  if _DO.value == 'compile':
    pathlib.Path(out, f'{names[0]}.compiled').write_text(str(_compiled(names[0])[3]))
  elif _DO.value == 'time':
    _time(names[0])
  if _DO.value:
    return
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(out / 'programs'))
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
  os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'  # the processes share the GPU
  names = [name for name in names if not (out / f'{name}.json').exists()]

  def start(name, part):
    return subprocess.Popen([sys.executable, '-m', 'benchmarks.gpu_steps', *sys.argv[1:],
                             f'--names={name}', f'--do={part}'])

  for process in [start(name, 'compile') for name in names]:
    process.wait()
  failed = [name for name in names if start(name, 'time').wait()]
  sys.exit(f'failed: {", ".join(failed)}' if failed else 0)


if __name__ == '__main__':
  app.run(main)
