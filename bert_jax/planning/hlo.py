"""Parses the HLO text of a compiled program: instructions, sizes, execution counts."""

from collections.abc import Iterator
import math
import re
from typing import NamedTuple

_BYTES = {'pred': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2, 'f16': 2,
          's32': 4, 'u32': 4, 'f32': 4, 's64': 8, 'u64': 8, 'f64': 8}
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.-]+) \(.*\{\s*$')
_INSTRUCTION = re.compile(r'^\s+(ROOT )?%?([\w.-]+) = (.*)$')
_ARRAY = re.compile(r'(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?')
_SPACE = re.compile(r'S\((\d+)\)')  # memory space in a TPU layout: 1 is on the core
# The computations inside a fusion, an asynchronous exchange and a conditional.
_INSIDE = re.compile(r'\b(?:calls|(?:true|false)_computation|branch_computations)='
                     r'(%?[\w.-]+|\{[^}]*\})')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def integers(text: str) -> list[int]:
  """Parses a list of integers: '4,8' -> [4, 8]."""
  return [int(number) for number in text.split(',') if number]


class Array(NamedTuple):
  """An array in the result of an instruction."""

  size: int  # bytes
  is_far: bool  # in the memory of the chip (HBM, RAM), not in the memory of its core


def arrays(result: str) -> list[Array]:
  """The arrays of a result such as 'bf16[4,8]{1,0:T(8,128)S(1)}' or a tuple of these."""
  return [Array(_BYTES[dtype] * math.prod(integers(shape)), not _SPACE.search(layout))
          for dtype, shape, layout in _ARRAY.findall(result) if dtype in _BYTES]


class Instruction(NamedTuple):
  """One line of a computation."""

  name: str
  result: str  # type and layout
  opcode: str
  operands: tuple[str, ...]  # names
  attributes: str
  is_root: bool

  def called(self, attribute: str) -> str:
    """The computation in an attribute: `calls` of a fusion, `body` of a loop."""
    return re.search(rf'\b{attribute}=%?([\w.-]+)', self.attributes)[1]


def closing(text: str) -> int:
  """The index of the parenthesis that closes a parenthesis opened just before `text`."""
  depth = 1
  for i, letter in enumerate(text):
    depth += (letter == '(') - (letter == ')')
    if not depth:
      return i
  return len(text)


def _instruction(line: str) -> Instruction | None:
  match = _INSTRUCTION.match(line)
  if not match:
    return None
  root, name, rest = match.groups()
  # The type of a tuple contains spaces and nested parentheses.
  if rest.startswith('('):
    end = closing(rest[1:]) + 2
    result, rest = rest[:end], rest[end + 1:]
  else:
    result, _, rest = rest.partition(' ')
  opcode, _, rest = rest.partition('(')
  end = closing(rest)
  # A parameter has a number and a constant has a value, not names of instructions.
  names = (re.findall(r'%([\w.-]+)', rest[:end])
           if opcode not in ('parameter', 'constant') else [rest[:end]])
  return Instruction(name, result, opcode, tuple(names), rest[end + 1:], bool(root))


class Module:
  """The computations of a program, by name."""

  def __init__(self, text: str):
    self.computations: dict[str, dict[str, Instruction]] = {}
    current, self.entry = {}, ''
    for line in text.splitlines():
      if match := _COMPUTATION.match(line):
        current = self.computations.setdefault(match[2], {})
        self.entry = match[2] if match[1] else self.entry
      elif instruction := _instruction(line):
        current[instruction.name] = instruction

  def _trip_count(self, loop: Instruction) -> int:
    """The iterations of a loop: its known count, or the bound in its condition."""
    if match := _TRIPS.search(loop.attributes):
      return int(match[1])
    bounds = [int(x.operands[0])
              for x in self.computations[loop.called('condition')].values()
              if x.opcode == 'constant' and x.operands[0].isdigit()]
    return max(bounds, default=1)

  def walk(self, computation: str = '', times: int = 1, into_all: bool = False
           ) -> Iterator[tuple[str, Instruction, int]]:
    """Yields (name of the computation, instruction, execution count), also inside loops.

    A fusion or a conditional counts as one instruction; with `into_all` the walk also
    yields the instructions inside. A call yields only the instructions inside.
    """
    computation = computation or self.entry
    for instruction in self.computations[computation].values():
      if instruction.opcode == 'while':
        trips = times * self._trip_count(instruction)
        yield from self.walk(instruction.called('body'), trips, into_all)
      elif instruction.opcode in ('call', 'call-start'):
        # A call-start may run on another core (the SparseCore): its traffic counts, too.
        yield from self.walk(instruction.called('to_apply'), times, into_all)
      else:
        yield computation, instruction, times
        for names in _INSIDE.findall(instruction.attributes) if into_all else ():
          for name in re.findall(r'[\w.-]+', names):
            yield from self.walk(name, times, into_all)
