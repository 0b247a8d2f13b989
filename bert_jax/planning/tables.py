"""Formats plans as text for people who are about to rent chips."""

from collections.abc import Iterator, Sequence

from bert_jax.planning.estimate import Estimate, Largest
from bert_jax.runtime.console import markdown_table

_GIB = 2**30
_LARGEST_OPERATIONS = 10


def _amount(value: float, unit: str) -> str:
  """Formats a value with its unit: 1234567, 'B' -> '1.23 MB'."""
  for scale, prefix in ((1e15, 'P'), (1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if value >= scale:
      return f'{value / scale:.3g} {prefix}{unit}'
  return f'{value:.3g} {unit}'


def _number(value: float) -> str:
  """Formats a number: 1234.5 -> '1,234', 1.2345 -> '1.23', 1e-4 -> 'less than 0.001'."""
  if value < 0.001:
    return 'less than 0.001'
  return f'{value:,.0f}' if value >= 1000 else f'{value:.3g}'


def _compiled(memory: dict[str, int] | None, seconds: float) -> str:
  """The memory of a program, and the time to compile it."""
  if memory is None:
    return 'does not fit'
  # Parts below a megabyte would show as 0.00.
  parts = ', '.join(
      f'{name} {size / _GIB:.2f}' for name, size in memory.items() if size > 1e6)
  return f'{sum(memory.values()) / _GIB:.2f} GiB ({parts}), compiled in {seconds:.0f} s'


def lines(e: Estimate, price: float) -> Iterator[tuple[str, str]]:
  """Yields (name, value) lines about one phase; `price` is for a chip-hour, 0 = none."""
  if e.missing:
    yield 'fits', f'NO: each device lacks {e.missing / _GIB:.2f} GiB of memory'
  elif e.chip:
    of = '' if e.limit == e.chip.memory else f' of {e.chip.memory / _GIB:.0f}'
    yield 'fits', f'yes, in {e.limit / _GIB:.0f}{of} GiB'
  yield 'training', _compiled(e.memory, e.compile_seconds[0])
  yield 'evaluation', _compiled(e.eval_memory, e.compile_seconds[1])
  if not e.flops:
    return
  per_device = e.tokens / e.devices
  yield 'a step', (
      f'{_amount(e.flops, "FLOP")} and {_amount(e.traffic, "B")} of memory traffic on '
      f'each device; for each token {_amount(e.flops / per_device, "FLOP")} and '
      f'{_amount(e.traffic / per_device, "B")}')
  # The compiler sees no FLOPs inside kernels. Then `flops` are the model's own.
  if e.counted_flops < e.flops:
    yield 'counted', (
        f'only {_amount(e.counted_flops / per_device, "FLOP")} for each token: the '
        "FLOPs above are the model's own, without recomputation")
  if cycles := sum(x.cycles for x in e.operations):
    yield 'expected', (
        f'{_amount(cycles, "cycles")} by the compiler, without kernels, copies and '
        'exchanges: use it to compare settings')
  for c in e.collectives:
    yield c.kind, (
        f'{_amount(c.bytes, "B")} over {" and ".join(c.axes)} in {c.count:.0f} '
        f'operations: each device sends {_amount(c.sent, "B")}')
  # Without peak rates, as on a CPU, no times follow.
  if not e.chip:
    return
  slowest = max(e.seconds, key=e.seconds.get)
  parts = ', '.join(f'{name} {1e3 * value:.1f}' for name, value in e.seconds.items())
  yield 'roofline', (f'{1e3 * e.step_seconds:.1f} ms, bound by {slowest} ({parts}), '
                     f'{_amount(e.tokens / e.step_seconds, "tokens/s")}')
  yield 'MFU', f'{e.mfu:.1%} at the roofline'
  if e.expected:
    yield 'expected', (
        f'{1e3 * e.expected:.1f} ms, {_amount(e.tokens / e.expected, "tokens/s")}, by a '
        'rule of thumb from an H200, without exchanges')
  hours = e.chip_hours / e.chips
  cost = f', {_number(e.chip_hours * price)} at {price:g} an hour' if price else ''
  yield 'all steps', (f'{e.phase.steps:,}: {_number(hours)} hours at the roofline, '
                      f'{_number(e.chip_hours)} chip-hours{cost}')


def weak_scaling(e: Estimate) -> str:
  """A table of the bytes that a device sends in a step, by the number of devices."""
  return markdown_table([
      ['devices', *map(str, e.weak_scaling)],
      ['sent', *(_amount(size, 'B') for size in e.weak_scaling.values())]])


def operations(e: Estimate) -> str:
  """A table of the operations with the most memory traffic, and their modules."""
  # Only the TPU compiler estimates cycles.
  all_cycles = sum(x.cycles for x in e.operations)
  rows = [['traffic', 'share', *(['cycles'] if all_cycles else []), 'part of the step',
           'module', 'operation', 'instructions']]
  for x in e.operations[:_LARGEST_OPERATIONS]:
    cycles = [f'{x.cycles / all_cycles:.0%}'] if all_cycles else []
    rows.append([_amount(x.bytes, 'B'), f'{x.bytes / e.traffic:.0%}', *cycles,
                 x.part or "the compiler's copies", x.module, x.kind, str(x.count)])
  return markdown_table(rows)


def compared(plans: dict[str, list[Estimate]], price: float) -> str:
  """A table of the whole run, with a row for each slice."""
  rows = [['slice', 'chips', 'fits', 'ms a step', 'MFU', 'hours', 'chip-hours',
           *(['cost'] if price else [])]]
  for name, phases in plans.items():
    cells = [name, str(phases[0].chips),
             'no' if any(e.missing for e in phases) else 'yes']
    # A slice on which a step does not fit has no times, even if its program compiles.
    if all(e.chip and e.flops and not e.missing for e in phases):
      total = sum(e.chip_hours for e in phases)
      cells += [' / '.join(f'{1e3 * e.step_seconds:.1f}' for e in phases),
                ' / '.join(f'{e.mfu:.0%}' for e in phases),
                f'{total / phases[0].chips:,.1f}',
                f'{total:,.0f}',
                *([f'{total * price:,.0f}'] if price else [])]
    rows.append(cells + [''] * (len(rows[0]) - len(cells)))
  return markdown_table(rows)


def largest(results: Sequence[Largest]) -> str:
  """A table of the results of a search."""
  return markdown_table([
      ['sharding', 'remat', 'rows a device', 'GiB'],
      *([x.preset, x.remat, str(x.rows) if x.rows else 'none', f'{x.memory / _GIB:.2f}']
        for x in results)])
