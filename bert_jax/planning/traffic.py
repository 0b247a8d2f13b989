"""The memory traffic of a compiled step on each device, by the module that causes it.

Only the memory of the chip counts. XLA's `bytes accessed` also include arrays that a TPU
keeps in the memory of its core. The branches of a conditional do not count.
"""

from collections.abc import Iterator, Sequence
import re
from typing import NamedTuple

from bert_jax.planning import hlo
from bert_jax.planning.hlo import Instruction

_SLICES = ('dynamic-slice', 'slice', 'gather')
# Instructions without traffic. A call-update passes operands on; the call reads them.
_FREE = ('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'iota',
         'after-all', 'conditional', 'opt-barrier', 'partition-id', 'replica-id',
         'call-update')
# On a GPU a fusion may run beside others, from its `-start` to its `-done`.
_FUSIONS = ('fusion', 'fusion-start')
_VIEWS = ('bitcast', 'convert', 'copy')  # they may wrap an update in place
# Moves between the two memories of a TPU.
_MOVES = ('copy-start', 'slice-start', 'dynamic-slice-start')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_WRAPPERS = re.compile(
    r'^(jit|jvp|transpose|vmap|shard_map|checkpoint|rematted_computation|while'
    r'|body|cond|closed_call|eval_jaxpr|branch_\d+_fun)\b')


class Operation(NamedTuple):
  """All instructions of one kind for one module."""

  part: str  # forward, backward, recomputed, update; '' = a copy by the compiler
  module: str  # such as layers/attention; '' = outside the model
  kind: str  # dot_general, convert_element_type, ...
  count: int  # instructions in the program; a loop body counts once
  bytes: float  # read and written in a step
  cycles: float  # in a step, by the TPU compiler; 0 for kernels, copies, exchanges


def _moved(module: hlo.Module, inside: dict[str, Instruction], x: Instruction) -> float:
  """Bytes that one execution of an instruction moves to and from the chip's memory."""
  # The start of an asynchronous operation already counts its bytes.
  if (x.opcode in _FREE or x.opcode.endswith('-done')
      or 'AllocateBuffer' in x.attributes):
    return 0
  # The result is (source, target, ...): one of the two is in the core's memory.
  if x.opcode in _MOVES:
    source, target = hlo.arrays(x.result)[:2]
    return (source.is_far + target.is_far) * min(source.size, target.size)
  reads = {}
  for i, name in enumerate(x.operands):
    if name in inside and all(array.is_far for array in hlo.arrays(inside[name].result)):
      # Several operands may be one array: a kernel that takes its parts reads it once.
      source = _source(inside, name)
      reads[source] = max(reads.get(source, 0), _read(module, inside, x, i))
  return (sum(reads.values())
          + sum(size for size, array in _written(module, inside, x) if array.is_far))


def _source(inside: dict[str, Instruction], name: str) -> tuple[str, ...]:
  """The array behind bitcasts: the instruction that made it, and its place in a tuple."""
  at = ()
  while name in inside:
    x = inside[name]
    if x.opcode == 'get-tuple-element':
      at = (re.search(r'index=(\d+)', x.attributes)[1], *at)
    elif x.opcode not in ('bitcast', 'opt-barrier'):
      break
    name = x.operands[0]
  return (name, *at)


def _read(module: hlo.Module, inside: dict[str, Instruction], x: Instruction,
          i: int) -> int:
  """Bytes that an instruction reads of its operand number `i`."""
  whole = _size(inside[x.operands[i]])
  # A slice reads only as much as it returns.
  if i == 0 and x.opcode in _SLICES:
    return min(whole, _size(x))
  # An update writes in place, and reads nothing of the array that it updates.
  if i == 0 and x.opcode == 'dynamic-update-slice':
    return 0
  if x.opcode not in _FUSIONS:
    return whole
  # A fusion may only slice its operand: look at how its instructions read it.
  fused = module.computations[x.called('calls')]
  parameter = next(y for y in fused.values()
                   if y.opcode == 'parameter' and y.operands[0] == str(i))
  return min(whole, _read_within(module, fused, parameter))


def _read_within(module: hlo.Module, inside: dict[str, Instruction],
                 value: Instruction) -> int:
  """Bytes that the instructions of a fusion read of one of its values."""
  total = 0
  for x in inside.values():
    for i, name in enumerate(x.operands):
      if name == value.name and x.opcode != 'parameter':
        total += (_read_within(module, inside, x) if x.opcode == 'bitcast'
                  else _read(module, inside, x, i))
  return total


def _written(module: hlo.Module, inside: dict[str, Instruction], x: Instruction
             ) -> Iterator[tuple[int, hlo.Array]]:
  """Yields (bytes written, array) for each array in the result of an instruction."""
  arrays = hlo.arrays(x.result)
  # An exchange returns (operands, results, ...), or only its results.
  if x.opcode.endswith('-start') and x.opcode not in _FUSIONS:
    count = sum(len(hlo.arrays(inside[name].result)) for name in x.operands)
    results = arrays[count:2 * count] or arrays
    yield from ((array.size, array) for array in results)
    return
  roots, within = [x], inside
  if x.opcode in _FUSIONS:
    within = module.computations[x.called('calls')]
    root = next(y for y in within.values() if y.is_root)
    roots = ([within[name] for name in root.operands] if root.opcode == 'tuple'
             else [root])
  # The result of a fusion-start also contains the operands.
  if x.opcode == 'fusion-start':
    arrays = [array for root in roots for array in hlo.arrays(root.result)]
  # The result has nested tuples: take its arrays as they are.
  if len(roots) != len(arrays):
    yield from ((array.size, array) for array in arrays)
    return
  for root, array in zip(roots, arrays):
    while root.opcode in _VIEWS and root.operands[0] in within:
      root = within[root.operands[0]]
    # An update in place writes the update, not the whole array.
    is_update = root.opcode == 'dynamic-update-slice'
    yield _size(within[root.operands[1]]) if is_update else array.size, array


def _size(x: Instruction) -> int:
  return sum(array.size for array in hlo.arrays(x.result))


def parse_op_name(x: Instruction) -> tuple[str, str, str]:
  """(part, module, kind) of an instruction, parsed from JAX's name of the operation."""
  match = re.search(r'op_name="(jit\([^":]*)', x.attributes)
  if not match:
    return '', '', x.opcode
  name = match[1].rstrip(')')
  part = ('recomputed' if 'rematted_computation' in name
          else 'backward' if 'transpose(' in name
          else 'forward' if 'jvp(' in name else 'update')
  *modules, kind = name.split('/')
  # A method shows as `module.method`. Private methods and einsum letters add nothing.
  modules = [name.rpartition('.')[2] for name in modules
             if not _WRAPPERS.match(name) and '._' not in name and '->' not in name]
  return part, '/'.join(modules), kind


def operations(text: str) -> list[Operation]:
  """The operations in the HLO of a program, by decreasing memory traffic."""
  module, totals = hlo.Module(text), {}
  for computation, x, times in module.walk():
    match = _CYCLES.search(x.attributes)
    size = _moved(module, module.computations[computation], x)
    cycles = int(match[1]) if match else 0
    # Bookkeeping instructions cost nothing and would only fill the table.
    if size or cycles:
      key = parse_op_name(x)
      count, *sums = totals.get(key, (0, 0, 0))
      totals[key] = count + 1, sums[0] + times * size, sums[1] + times * cycles
  return sorted((Operation(*key, *values) for key, values in totals.items()),
                key=lambda operation: -operation.bytes)


def of_products(text: str) -> float:
  """Bytes that matrix products, and the operations fused with them, move in a step."""
  module, size = hlo.Module(text), 0.0
  for computation, x, times in module.walk():
    inside = module.computations[x.called('calls')] if x.opcode in _FUSIONS else {0: x}
    if any(y.opcode == 'dot' for y in inside.values()):
      size += times * _moved(module, module.computations[computation], x)
  return size


def total(operations: Sequence[Operation]) -> float:
  """The memory traffic of a step on each device, in bytes."""
  return sum(operation.bytes for operation in operations)
