"""One round as an integer program: which classes run together on which kind, how many times.

Columns are (kind, classes): a set of devices that runs one task of each class. Rows: devices of
each kind, tasks of each class, owners' quotas. Groups of classes are many, so they are priced out:
only those that would beat what the linear program has found so far are added.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shoal.schedule.allocator.policy import View
from shoal.schedule.allocator.prices import Groups, Work, add_horizon, class_speeds
from shoal.schedule.allocator.solver import Program, Solution
from shoal.schedule.allocator.task_classes import Classes, Ints
from shoal.schedule.model.throughputs import Floats

#: Columns added in one pricing, and pricings until the search settles for what it has.
COLUMNS_STEP = 600
PRICINGS_MAX = 8
#: Branches of the integer search. More than enough for most rounds; the rest degrade by a little.
NODES_MAX = 10
#: Columns in the integer search; with more, what the relaxation decided is kept and only the rest,
#: with the best columns for it, is searched.
SEARCH_COLUMNS_MAX = 1000
#: Up to this many classes, the last finish is part of the search; and columns in that search.
END_CLASSES_MAX = 64
END_COLUMNS_MAX = 600
#: Classes tried for a place in a group of three or more, the most valuable ones.
CHOICES_MAX = 3
#: A plan that moves nobody is this much better than an equal one that does.
STAY_BONUS = 1e-3


@dataclass(slots=True)
class Candidates:
    """Columns of one size: `members` has one row per column."""

    kinds: Ints
    members: Ints  # (columns, size): classes.
    parts: Floats  # (columns, size): part of each member that is done in the round.
    values: Floats

    def __getitem__(self, chosen: npt.NDArray[np.generic]) -> Candidates:
        kinds, members = self.kinds[chosen], self.members[chosen]
        return Candidates(kinds, members, self.parts[chosen], self.values[chosen])


@dataclass(slots=True)
class Chosen:
    """What runs: (kind, classes, times). No plan has a value above `bound`."""

    columns: list[tuple[int, tuple[int, ...], int]] = field(default_factory=list)
    value: float = 0.0
    early: float = 0.0  # The part of the value that is about completion times.
    bound: float = 0.0
    device_prices: Floats = field(default_factory=lambda: np.zeros(0))


def progress(view: View, classes: Classes, kinds: Ints, members: Ints, rates: Floats) -> Floats:
    """Part of each member that is done in the round, shape like `members`.

    When one finishes, the others go on as if it had never been there; for groups of more than two
    this is counted from the last finish on.
    """
    left = classes.steps[members]
    waits = restart_waits(classes, kinds, members)
    time_s = view.round_s - waits
    done = rates * time_s
    if members.shape[1] > 1:
        ends = np.minimum(view.round_s, waits + left / np.maximum(rates, 1e-300))
        alone = view.table.alone[classes.rows[members], kinds[:, None]]
        for place in range(members.shape[1]):
            others = np.delete(ends, place, axis=1).max(axis=1)
            rest_s = np.maximum(0.0, view.round_s - np.maximum(others, waits[:, place]))
            done[:, place] += (alone[:, place] - rates[:, place]) * rest_s
    part: Floats = np.minimum(np.maximum(done, 0.0) / left, 1.0)
    return part


def restart_waits(classes: Classes, kinds: Ints, members: Ints) -> Floats:
    """Return the seconds that each member loses because it resumes or moves."""
    at = classes.at[members]
    moves = classes.started[members] & (at != kinds[:, None])
    return np.where(moves, classes.restarts_s[members], 0.0)


@dataclass(frozen=True, slots=True)
class Worth:
    """Value of finishing one task of each class, in seconds of waiting.

    `early` counts completion times alone. `end_s` is the task's price in the time `least_s` of the
    last finish, of which a second is worth `end_weight`.
    """

    early: Floats
    end_s: Floats
    end_weight: float
    least_s: float

    @property
    def all(self) -> Floats:
        total: Floats = self.early + self.end_weight * self.end_s
        return total


class RoundProgram:
    """Chooses the columns with the most value."""

    def __init__(self, view: View, classes: Classes, groups: Groups, worth: Worth) -> None:
        self.view, self.classes, self.groups = view, classes, groups
        self.ends, self.worth = worth, worth.all
        self.by_row: dict[int, Ints] = {}
        for row in set(classes.rows.tolist()):
            self.by_row[row] = np.flatnonzero(classes.rows == row)
        self.singles = self._singles()
        self.shared = self._shared(groups)
        self.taken: list[Candidates] = [self.singles]
        self.owners = sorted(set(classes.owners) & set(view.pool.quotas))

    def _candidates(self, kinds: Ints, members: Ints, rates: Floats) -> Candidates:
        parts = progress(self.view, self.classes, kinds, members, rates)
        values = self._value(kinds, members, parts, self.worth)
        return Candidates(kinds, members, parts, values)

    def _value(self, kinds: Ints, members: Ints, parts: Floats, worth: Floats) -> Floats:
        stay = 1.0 + STAY_BONUS * (self.classes.at[members] == kinds[:, None])
        values: Floats = (parts * worth[members] * stay).sum(axis=1)
        return values

    def _singles(self) -> Candidates:
        number, kinds = np.nonzero(self.classes.allowed)
        members = number[:, None]
        rates = self.view.table.alone[self.classes.rows[number], kinds][:, None]
        return self._candidates(kinds, members, rates)

    def _shared(self, groups: Groups) -> list[Candidates]:
        """Return every way to fill every group with classes, by group size."""
        by_size: dict[int, list[tuple[Ints, Ints, Floats]]] = {}
        for kind, group, rates in zip(groups.kinds, groups.groups, groups.rates, strict=True):
            if len(group) == 1:
                continue
            members = self._fillings(int(kind), group)
            if len(members):
                kinds = np.full(len(members), kind)
                speeds = np.broadcast_to(np.array(rates), members.shape)
                by_size.setdefault(len(group), []).append((kinds, members, speeds))
        found = []
        for _, blocks in sorted(by_size.items()):
            kinds = np.concatenate([block[0] for block in blocks])
            members = np.concatenate([block[1] for block in blocks])
            speeds = np.concatenate([block[2] for block in blocks])
            found.append(self._candidates(kinds, members, speeds))
        return found

    def _fillings(self, kind: int, group: tuple[int, ...]) -> Ints:
        """Return classes for each position of the group; for long groups the most valuable ones."""
        places = []
        for row in group:
            usable = self.by_row[row][self.classes.allowed[self.by_row[row], kind]]
            if len(group) > 2:
                dear = np.argsort(-self.worth[usable] / self.classes.steps[usable], kind="stable")
                usable = np.sort(usable[dear[: group.count(row) - 1 + CHOICES_MAX]])
            places.append(usable)
        grid = np.stack([axis.ravel() for axis in np.meshgrid(*places, indexing="ij")], axis=1)
        # Equal rows are filled in one order only, and never with more tasks than there are.
        keep = np.ones(len(grid), dtype=np.bool_)
        for place in range(1, len(group)):
            if group[place] == group[place - 1]:
                keep &= grid[:, place] >= grid[:, place - 1]
        for place in range(len(group)):
            same = (grid == grid[:, place : place + 1]).sum(axis=1)
            keep &= same <= self.classes.count[grid[:, place]]
        return grid[keep]

    def solve(self) -> Chosen:
        """Price columns out, then search for the best whole plan; greedy where none is found."""
        relaxed = None
        complete = False
        for _ in range(PRICINGS_MAX):
            relaxed = self._program(integer=False).solve()
            assert relaxed is not None, "running nothing is always feasible"
            complete = not self._price_out(relaxed.prices)
            if complete:
                break
        assert relaxed is not None
        chosen = None
        if self.ends.end_weight > 0 and len(self.classes) <= END_CLASSES_MAX:
            chosen = self._search_to_the_end(relaxed)
        if chosen is None:
            chosen = self._whole(self._search(relaxed))
        kinds_count = len(self.view.pool.kinds)
        chosen.device_prices = np.maximum(0.0, -relaxed.prices[:kinds_count])
        chosen.bound = -relaxed.objective if complete else np.inf
        return chosen

    def _search(self, relaxed: Solution) -> Floats | None:
        """Search whole numbers near the relaxation; None if there are none."""
        total = sum(len(block.kinds) for block in self.taken)
        if total <= SEARCH_COLUMNS_MAX:
            found = self._program(integer=True).solve(nodes_max=NODES_MAX, gap=1e-6)
            return None if found is None else np.round(found.values)
        kept = np.floor(relaxed.values + 1e-6)
        loss = np.concatenate([self._loss(block, relaxed.prices) for block in self.taken])
        open_columns = np.zeros(total, dtype=np.bool_)
        open_columns[np.argsort(loss, kind="stable")[: SEARCH_COLUMNS_MAX // 4]] = True
        found = self._program(integer=True, kept=kept, open_columns=open_columns).solve(
            nodes_max=NODES_MAX, gap=1e-4
        )
        return kept if found is None else kept + np.round(found.values)

    def _search_to_the_end(self, relaxed: Solution) -> Chosen | None:
        """The search with the time of the last finish itself, instead of its price.

        The price is a slope: it holds for the first bit of progress, and chasing it every round
        ends late. Here the rest of the work is in the program, so the plan and the end fit. The
        time is convex in the work left, so the bound by prices holds for this value too.
        """
        total = sum(len(block.kinds) for block in self.taken)
        loss = np.concatenate([self._loss(block, relaxed.prices) for block in self.taken])
        near = np.zeros(total, dtype=np.bool_)
        near[np.argsort(loss, kind="stable")[:END_COLUMNS_MAX]] = True
        program = self._program(integer=True, open_columns=near, early=True)
        left = program.equal(self.classes.count)
        column = 0
        for block in self.taken:
            columns = np.arange(column, column + len(block.kinds))
            for place in range(block.members.shape[1]):
                program.add(left[block.members[:, place]], columns, block.parts[:, place])
            column += len(block.kinds)
        classes = self.classes
        work = Work(classes.rows, classes.steps, class_speeds(self.view, classes), classes.count)
        weight = self.ends.end_weight
        horizon = add_horizon(program, self.view, self.groups, work, left, weight, critical=True)
        found = program.solve(nodes_max=NODES_MAX, gap=1e-5)
        if found is None:
            return None
        chosen = self._whole(np.round(found.values[:total]))
        saved_s = self.ends.least_s - float(found.values[horizon[0]])
        chosen.value = chosen.early + weight * saved_s
        return chosen

    def _loss(self, block: Candidates, prices: Floats) -> Floats:
        """Return by how much a column costs more than its value, at these prices."""
        kinds_count = len(self.view.pool.kinds)
        device, task = -prices[:kinds_count], -prices[kinds_count : kinds_count + len(self.classes)]
        used = device[block.kinds] * self.classes.gangs[block.members[:, 0]]
        loss: Floats = used + task[block.members].sum(axis=1) - block.values
        return loss

    def _program(
        self,
        integer: bool,
        kept: Floats | None = None,
        open_columns: npt.NDArray[np.bool_] | None = None,
        early: bool = False,
    ) -> Program:
        """The round. `kept` is done already; only `open_columns` may be used beyond it.

        `early` leaves the last finish out of the values.
        """
        classes = self.classes
        program = Program()
        counts = np.array([float(kind.count) for kind in self.view.pool.kinds])
        devices = program.at_most(counts)
        tasks = program.at_most(classes.count)
        limits = np.array([float(self.view.pool.quotas[owner]) for owner in self.owners])
        quotas = program.at_most(limits)
        quota_of = dict(zip(self.owners, quotas.tolist(), strict=True))
        for block in self.taken:
            upper = np.full(len(block.kinds), INT_MAX)
            if open_columns is not None:
                upper[~open_columns[program.column_count :][: len(upper)]] = 0.0
            columns = program.columns(-self._values(block, early), upper, integer)
            program.add(devices[block.kinds], columns, classes.gangs[block.members[:, 0]])
            for place in range(block.members.shape[1]):
                member = block.members[:, place]
                program.add(tasks[member], columns, np.ones(len(columns)))
                for number in set(member.tolist()) if self.owners else ():
                    if classes.owners[number] in quota_of:
                        mine = columns[member == number]
                        row = np.full(len(mine), quota_of[classes.owners[number]])
                        program.add(row, mine, np.full(len(mine), classes.gangs[number]))
        if kept is not None:
            program.use(kept)
        return program

    def _values(self, block: Candidates, early: bool) -> Floats:
        if not early:
            return block.values
        return self._value(block.kinds, block.members, block.parts, self.ends.early)

    def _price_out(self, prices: Floats) -> bool:
        """Add the columns that the last prices undervalue. Return False if there are none."""
        added = False
        for number, block in enumerate(self.shared):
            profit = -self._loss(block, prices)
            worth = np.flatnonzero(profit > 1e-7 * np.maximum(1.0, np.abs(block.values)))
            if not len(worth):
                continue
            best = worth[np.argsort(-profit[worth], kind="stable")[:COLUMNS_STEP]]
            self.taken.append(block[best])
            rest = np.ones(len(block.kinds), dtype=np.bool_)
            rest[best] = False
            self.shared[number] = block[rest]
            added = True
        return added

    def _whole(self, times: Floats | None) -> Chosen:
        """Return the columns that were found, and all that still fit beside them."""
        kinds = np.concatenate([block.kinds for block in self.taken])
        members = [tuple(row) for block in self.taken for row in block.members.tolist()]
        values = np.concatenate([block.values for block in self.taken])
        times = self._fill(np.zeros(len(kinds)) if times is None else times, kinds, members, values)
        early = np.concatenate([self._values(block, early=True) for block in self.taken])
        chosen = Chosen(value=float(values @ times), early=float(early @ times))
        for column in np.flatnonzero(times > 0):
            chosen.columns.append((int(kinds[column]), members[column], int(times[column])))
        return chosen

    def _fill(
        self, times: Floats, kinds: Ints, members: list[tuple[int, ...]], values: Floats
    ) -> Floats:
        """Add columns greedily, most value per device first. Adds at least one if any task can run."""
        gangs = np.array([self.classes.gangs[m[0]] for m in members])
        free = [float(kind.count) for kind in self.view.pool.kinds]
        left = self.classes.count.copy()
        quota = {owner: float(limit) for owner, limit in self.view.pool.quotas.items()}
        for column in np.flatnonzero(times > 0):
            for _ in range(int(times[column])):
                took = self._take(members[column], left, quota, gangs[column])
                assert took, "the search keeps to the rows of the program"
            free[kinds[column]] -= gangs[column] * times[column]
        more = times.copy()
        for column in np.argsort(-values / gangs, kind="stable"):
            need = gangs[column]
            while free[kinds[column]] >= need and self._take(members[column], left, quota, need):
                free[kinds[column]] -= need
                more[column] += 1
        return more

    def _take(
        self, members: tuple[int, ...], left: Floats, quota: dict[str, float], need: float
    ) -> bool:
        owners = [self.classes.owners[m] for m in members]
        if any(left[m] < members.count(m) for m in members):
            return False
        if any(quota.get(o, np.inf) < need * owners.count(o) for o in owners):
            return False
        for member, owner in zip(members, owners, strict=True):
            left[member] -= 1
            if owner in quota:
                quota[owner] -= need
        return True


#: No column is used more often than there are devices anywhere.
INT_MAX = 1e6
