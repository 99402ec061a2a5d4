"""Chooses the number of groups and stages by predicted step times. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from shoal.train.group.batch_split import CostFit, divide
from shoal.train.model.partition import CannotPartition, partition_fitting
from shoal.train.model.stage_costs import Limits, Stage, StageDevice, Unit, timing
from shoal.units import show_bytes

#: Bytes that the exchange moves for each byte of weights: out to the owner and back.
EXCHANGE_WAYS = 2
#: The fraction that a step takes longer for each micro-batch after the first, which compute less well.
#: (Eight instead of one cost a GPT 0.10, a CNN 0.18 and an MLP 0.31 of its speed.)
MICRO_BATCH_COST = 0.02


@dataclass(frozen=True, slots=True)
class Option:
    """One way to use the devices, with its predicted time."""

    layout: tuple[tuple[int, ...], ...]  # devices of each group
    stages: tuple[tuple[Stage, ...], ...]  # of each group
    step_s: float | None  # None: impossible
    memory_bytes: int  # of the fullest device
    why: str

    @property
    def name(self) -> str:
        depth = {len(group) for group in self.layout}
        groups = len(self.layout)
        return (
            f"{groups} x {depth.pop()}" if len(depth) == 1 else str([len(g) for g in self.layout])
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """All options and the best of them."""

    options: tuple[Option, ...]
    best: Option

    def table(self) -> Table:
        """Return the table that `groups="auto"` shows before training starts."""
        table = Table(
            title="groups x stages",
            title_justify="left",
            caption="▶ the shortest predicted step that fits into memory",
            caption_justify="left",
        )
        for heading in ("", "groups x stages", "step", "fullest device", "why"):
            table.add_column(heading)
        for option in self.options:
            step = f"{option.step_s * 1e3:.1f} ms" if option.step_s is not None else "–"
            memory = show_bytes(option.memory_bytes) if option.step_s is not None else "–"
            mark = "▶" if option is self.best else ""
            table.add_row(mark, option.name, step, memory, option.why)
        return table


def layouts(devices: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return the ways to put all devices into groups of equal size, and one device alone.

    >>> layouts(4)
    [((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), ((0, 1, 2, 3),), ((0,),)]
    """
    found = []
    for depth in range(1, devices + 1):
        if devices % depth == 0:
            firsts = range(0, devices, depth)
            found.append(tuple(tuple(range(i, i + depth)) for i in firsts))
    if devices > 1:
        found.append(((0,),))
    return found


def choose(
    units: Sequence[Unit],
    devices: Sequence[StageDevice],
    batch: int,
    profiled_samples: int,
    *,
    micro_batches: Callable[[int], int],
    weight_copies: float = 4.0,
    link_bytes_per_s: float = 2e9,
) -> Choice:
    """Choose the layout with the shortest predicted step for a batch of so many samples.

    Args:
        units: profiled with `profiled_samples` samples on a device of speed 1.
        micro_batches: returns their number for a group of so many stages.
    """
    fastest_first = sorted(range(len(devices)), key=lambda i: -devices[i].speed)
    options = []
    for layout in layouts(len(devices)):
        placed = tuple(tuple(sorted(fastest_first[i] for i in group)) for group in layout)
        if len(layout) == 1 and len(layout[0]) == 1:
            placed = ((fastest_first[0],),)
        options.append(
            _option(
                placed,
                units,
                devices,
                batch,
                profiled_samples,
                micro_batches(len(layout[0])),
                weight_copies,
                link_bytes_per_s,
            )
        )
    possible = [o for o in options if o.step_s is not None]
    if not possible:
        raise CannotPartition("; ".join(f"{o.name}: {o.why}" for o in options))
    best = min(possible, key=lambda o: (o.step_s, sum(len(g) for g in o.layout)))
    return Choice(tuple(options), best)


def _option(
    layout: tuple[tuple[int, ...], ...],
    units: Sequence[Unit],
    devices: Sequence[StageDevice],
    batch: int,
    profiled: int,
    micros: int,
    weight_copies: float,
    link: float,
) -> Option:
    depth = len(layout[0])
    scale = batch / len(layout) / micros / profiled  # from the profile to a micro-batch
    sized = [_scaled(unit, scale) for unit in units]
    limits = Limits(micros, weight_copies, link)
    try:
        cuts = [partition_fitting(sized, [devices[i] for i in group], limits) for group in layout]
    except CannotPartition as error:
        return Option(layout, (), None, 0, str(error))
    stages = tuple(cut for cut, _ in cuts)
    if batch < len(layout) * micros:
        why = f"a batch of {batch} has fewer samples than {len(layout)} x {micros} micro-batches"
        return Option(layout, stages, None, 0, why)
    seconds, bubbles = [], []
    for group, (cut, used) in zip(layout, cuts, strict=True):
        expected = timing(sized, cut, [devices[i] for i in group], used)
        seconds.append(expected.total_s * (1 + MICRO_BATCH_COST * (micros - 1)))
        bubbles.append(expected.bubble)
    per_group = batch / len(layout)
    split = divide(batch, [CostFit(0.0, s / per_group, True) for s in seconds])
    compute = max(s * n / per_group for s, n in zip(seconds, split, strict=True))
    weights = max(sum(u.weight_bytes for u in units[s.start : s.stop]) for c in stages for s in c)
    groups = len(layout)
    exchange = EXCHANGE_WAYS * weights * (groups - 1) / groups / link if groups > 1 else 0.0
    exposed = exchange / 2  # the copy to the owner overlaps the backward pass
    memory = max(stage.memory_bytes for cut in stages for stage in cut)
    why = f"compute {compute * 1e3:.1f} ms, exchange {exposed * 1e3:.1f} ms"
    if depth > 1:
        why += f", bubble {max(bubbles) * 100:.0f} %"
    if len(set(split)) > 1:
        why += f", samples {':'.join(map(str, split))}"
    return Option(layout, stages, compute + exposed, memory, why)


def _scaled(unit: Unit, scale: float) -> Unit:
    return replace(
        unit,
        forward_s=unit.forward_s * scale,
        backward_s=unit.backward_s * scale,
        activation_bytes=int(unit.activation_bytes * scale),
        output_bytes=int(unit.output_bytes * scale),
    )
