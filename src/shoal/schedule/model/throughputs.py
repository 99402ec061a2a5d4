"""How fast each type of task runs on each kind of device, alone and beside others.

Types are rows: a row is a (type, gang size). Speeds are steps per second of the whole gang. A
group is a sorted tuple of rows that share one set of devices; all of one group have the same
gang size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shoal.schedule.model.entities import TOGETHER_MAX

Floats = npt.NDArray[np.float64]
Group = tuple[int, ...]

#: A group has to promise this much more than taking turns would give, or it is not considered:
#: below it, the measurement's own noise decides.
GAIN_MIN = 0.02


class Throughputs:
    """A table of speeds.

    Args:
        kinds: Names of the kinds, in the order of the arrays' last axis.
        rows: (type, devices) of each row.
        alone: steps/s, shape (rows, kinds); 0: cannot run there.
        memory_bytes: Need of a row on each device of its gang, shape (rows, kinds); 0: unknown.
        busy: Share of the device that a row keeps busy when alone, shape (rows, kinds, 2): compute
            and memory bandwidth. NaN: unknown, then only measured groups may run together.
        measured: (kind, group) -> steps/s of each member, in the group's order.
        unknown_shares: Whether tasks of unknown memory may share a device, as in traces without
            sizes. In a live pool they do not.

    >>> table = Throughputs(("v100",), [("lm", 1)], np.array([[10.0]]))
    >>> table.rates(0, (0,))
    (10.0,)
    """

    def __init__(
        self,
        kinds: tuple[str, ...],
        rows: list[tuple[str, int]],
        alone: Floats,
        memory_bytes: Floats | None = None,
        busy: Floats | None = None,
        measured: dict[tuple[int, Group], tuple[float, ...]] | None = None,
        source: str = "",
        unknown_shares: bool = True,
    ) -> None:
        self.kinds = kinds
        self.rows = rows
        self.alone = alone
        shape = alone.shape
        self.memory_bytes = np.zeros(shape) if memory_bytes is None else memory_bytes
        self.busy = np.full((*shape, 2), np.nan) if busy is None else busy
        self.measured = measured or {}
        self.source = source
        self.unknown_shares = unknown_shares
        self.row_of = {key: index for index, key in enumerate(rows)}
        assert shape == (len(rows), len(kinds)) == self.memory_bytes.shape
        self._rates_of: dict[tuple[int, Group], tuple[float, ...] | None] = {}
        self._groups: dict[tuple[object, ...], list[Group]] = {}

    def select(self, kinds: Iterable[str]) -> Throughputs:
        """The same table with only these kinds, in this order."""
        order = [self.kinds.index(kind) for kind in kinds]
        new_of = {old: new for new, old in enumerate(order)}
        measured = {
            (new_of[kind], group): rates
            for (kind, group), rates in self.measured.items()
            if kind in new_of
        }
        return Throughputs(
            tuple(self.kinds[old] for old in order),
            self.rows,
            self.alone[:, order],
            self.memory_bytes[:, order],
            self.busy[:, order],
            measured,
            self.source,
            self.unknown_shares,
        )

    @cached_property
    def best(self) -> Floats:
        """Fastest speed of each row on any kind, steps/s."""
        best: Floats = self.alone.max(axis=1)
        return best

    def rates(self, kind: int, group: Group) -> tuple[float, ...] | None:
        """As `_rates`, remembered: the same groups are asked for round after round."""
        key = (kind, group)
        if key not in self._rates_of:
            self._rates_of[key] = self._rates(kind, group)
        return self._rates_of[key]

    def _rates(self, kind: int, group: Group) -> tuple[float, ...] | None:
        """steps/s of each member of the group; None where they cannot run together.

        Measured where there is a measurement, else predicted: the members share compute and
        bandwidth in proportion, so all slow down by the most wanted of the two.
        """
        if len(group) == 1:
            rate = float(self.alone[group[0], kind])
            return (rate,) if rate > 0 else None
        found = self.measured.get((kind, group))
        if found is not None:
            return found if min(found) > 0 else None
        if len(group) > 2 and (kind, group[:2]) in self.measured:
            return self._from_pairs(kind, group)
        members = list(group)
        wanted = self.busy[members, kind].sum(axis=0)
        alone = self.alone[members, kind]
        if np.isnan(wanted).any() or alone.min() <= 0:
            return None
        return tuple((alone / max(1.0, float(wanted.max()))).tolist())

    def _from_pairs(self, kind: int, group: Group) -> tuple[float, ...] | None:
        """Each partner slows a member down as it does in a pair: the slowdowns multiply."""
        rates = []
        for place, row in enumerate(group):
            alone = float(self.alone[row, kind])
            rate = alone
            for other_place, other in enumerate(group):
                if other_place == place:
                    continue
                pair = (min(row, other), max(row, other))
                both = self.measured.get((kind, pair))
                if both is None or min(both) <= 0:
                    return None
                rate *= min(1.0, both[0 if row <= other else 1] / alone)
            rates.append(rate)
        return tuple(rates)

    def fits(self, kind: int, group: Group, memory_bytes: int) -> bool:
        """Do the members' predicted memories fit on each device?

        Unknown sizes fit if the task is alone, or with `unknown_shares`.
        """
        if not self.unknown_shares and len(group) > 1:
            sizes = self.memory_bytes[list(group), kind]
            if memory_bytes == 0 or bool((sizes <= 0).any()):
                return False
        if memory_bytes == 0:
            return True
        return float(self.memory_bytes[list(group), kind].sum()) <= memory_bytes

    def gain(self, kind: int, group: Group) -> float:
        """Progress of the group against taking turns: 1.3 is 30 % more. 0: impossible."""
        rates = self.rates(kind, group)
        if rates is None:
            return 0.0
        return sum(r / float(self.alone[m, kind]) for r, m in zip(rates, group, strict=True))

    def groups(
        self, kind: int, present: Iterable[int], memory_bytes: int, together_max: int
    ) -> list[Group]:
        """Groups of two and more that are worth running, found by growing good smaller ones.

        A group counts when it fits, and gains more than the group it was grown from.
        """
        rows = tuple(sorted(set(present)))
        key = (kind, rows, memory_bytes, together_max)
        if key not in self._groups:
            level: dict[Group, float] = {(row,): 1.0 for row in self._usable(kind, rows)}
            found: list[Group] = []
            for _ in range(1, min(together_max, TOGETHER_MAX)):
                level = {
                    group: gain
                    for parent, beat in level.items()
                    for group in self._children(kind, rows, parent, memory_bytes)
                    if (gain := self.gain(kind, group)) > beat + GAIN_MIN
                }
                found += sorted(level)
            self._groups[key] = found
        return self._groups[key]

    def useful_groups(
        self, kind: int, present: Iterable[int], memory_bytes: int, together_max: int
    ) -> list[Group]:
        """All groups that a schedule could have any use for: those that gain over taking turns.

        Many more than `groups`; nothing that could help is left out, so bounds hold.
        """
        rows = tuple(sorted(set(present)))
        level: list[Group] = [(row,) for row in self._usable(kind, rows)]
        found: list[Group] = []
        for _ in range(1, min(together_max, TOGETHER_MAX)):
            level = [g for p in level for g in self._children(kind, rows, p, memory_bytes)]
            found += [group for group in level if self.gain(kind, group) > 1.0]
        return found

    def _usable(self, kind: int, rows: tuple[int, ...]) -> list[int]:
        return [row for row in rows if self.alone[row, kind] > 0]

    def _children(
        self, kind: int, rows: tuple[int, ...], group: Group, memory_bytes: int
    ) -> Iterator[Group]:
        """The group with one more row, each once, where it fits and can run."""
        devices = self.rows[group[0]][1]
        for row in self._usable(kind, rows):
            if row >= group[-1] and self.rows[row][1] == devices:
                child = (*group, row)
                if self.fits(kind, child, memory_bytes) and self.rates(kind, child) is not None:
                    yield child
