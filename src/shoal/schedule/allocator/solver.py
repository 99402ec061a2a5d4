"""States linear and integer programs, which HiGHS solves on one thread.

The answer depends on nothing but the program: one thread, a fixed seed, and limits counted in
iterations and nodes instead of seconds. The same program gives the same answer on a busy machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
INFINITY = float("inf")


def sums(places: Ints, values: Floats, length: int) -> Floats:
    """Sum the values of each index."""
    total: Floats = np.zeros(length)
    np.add.at(total, places, values)
    return total


@dataclass(frozen=True, slots=True)
class Solution:
    """Values of the columns, prices of the rows. `proven` is false where a limit cut the search."""

    values: Floats
    prices: Floats  # Change of the objective per unit of each row's bound; empty for integers.
    objective: float
    bound: float  # No feasible point has a lower objective.
    proven: bool


class Program:
    """Minimize cost·x subject to lower <= A·x <= upper, built a block at a time.

    >>> program = Program()
    >>> x = program.columns(np.array([-1.0, -2.0]), upper=4.0)
    >>> row = program.rows(np.full(1, -INFINITY), np.array([5.0]))
    >>> program.add(np.repeat(row, 2), x, np.ones(2))
    >>> program.solve().values.tolist()
    [1.0, 4.0]
    """

    def __init__(self) -> None:
        self._costs: list[Floats] = []
        self._uppers: list[Floats] = []
        self._integers: list[npt.NDArray[np.bool_]] = []
        self._row_lowers: list[Floats] = []
        self._row_uppers: list[Floats] = []
        self._entries: list[tuple[Ints, Ints, Floats]] = []
        self.column_count = 0
        self.row_count = 0

    def columns(
        self, cost: Floats, upper: Floats | float = INFINITY, integer: bool = False
    ) -> Ints:
        """Add columns with lower bound 0; return their numbers."""
        count = len(cost)
        self._costs.append(np.asarray(cost, dtype=np.float64))
        self._uppers.append(np.broadcast_to(np.asarray(upper, dtype=np.float64), (count,)))
        self._integers.append(np.full(count, integer))
        self.column_count += count
        return np.arange(self.column_count - count, self.column_count)

    def rows(self, lower: Floats, upper: Floats) -> Ints:
        """Add empty rows; return their numbers."""
        count = len(lower)
        self._row_lowers.append(np.asarray(lower, dtype=np.float64))
        self._row_uppers.append(np.asarray(upper, dtype=np.float64))
        self.row_count += count
        return np.arange(self.row_count - count, self.row_count)

    def at_most(self, upper: Floats) -> Ints:
        """Add rows that are at most `upper`."""
        return self.rows(np.full(len(upper), -INFINITY), upper)

    def equal(self, value: Floats) -> Ints:
        """Add rows that equal `value`."""
        return self.rows(value, value)

    def add(self, rows: Ints, columns: Ints, values: Floats) -> None:
        """Add entries; the three arrays are of one length."""
        assert len(rows) == len(columns) == len(values)
        self._entries.append((rows, columns, np.asarray(values, dtype=np.float64)))

    def use(self, values: Floats) -> None:
        """Fix these values of the columns, and subtract what they use from the rows."""
        assert len(self._row_uppers) > 0
        uppers = np.concatenate(self._row_uppers)
        for rows, columns, entries in self._entries:
            np.subtract.at(uppers, rows, entries * values[columns])
        self._row_uppers = [uppers]

    def solve(
        self,
        method: str = "choose",
        iterations_max: int = 2_000_000,
        nodes_max: int = 500,
        gap: float = 1e-4,
    ) -> Solution | None:
        """Solve. Return None if no feasible point exists, or none was found within the limits.

        `method`: "choose", "simplex", "ipm", or "interior", which stays in the middle of the best
        face instead of going to one of its corners.
        """
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        options: dict[str, bool | int | float | str] = {
            "output_flag": False,
            "threads": 1,
            "parallel": "off",
            "random_seed": 0,
            "solver": "ipm" if method == "interior" else method,
            "simplex_iteration_limit": iterations_max,
            "ipm_iteration_limit": 400,
            "run_crossover": "off" if method == "interior" else "on",
            "mip_max_nodes": nodes_max,
            "mip_rel_gap": gap,
        }
        for name, value in options.items():
            solver.setOptionValue(name, value)
        solver.passModel(self._model())
        solver.run()
        info = solver.getInfo()
        if info.primal_solution_status != 2:  # kSolutionStatusFeasible
            return None
        optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        integral = any(block.any() for block in self._integers)
        solution = solver.getSolution()
        objective = float(info.objective_function_value)
        return Solution(
            values=np.array(solution.col_value),
            prices=np.array([] if integral else solution.row_dual),
            objective=objective,
            bound=float(info.mip_dual_bound) if integral else (objective if optimal else -INFINITY),
            proven=optimal,
        )

    def _model(self) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_ = self.column_count
        model.num_row_ = self.row_count
        model.col_cost_ = np.concatenate(self._costs)
        model.col_lower_ = np.zeros(self.column_count)
        model.col_upper_ = np.concatenate(self._uppers)
        model.row_lower_ = np.concatenate(self._row_lowers)
        model.row_upper_ = np.concatenate(self._row_uppers)
        rows = np.concatenate([entry[0] for entry in self._entries])
        columns = np.concatenate([entry[1] for entry in self._entries])
        values = np.concatenate([entry[2] for entry in self._entries])
        # Entries that are added twice count twice: a group may hold a row more than once.
        places, inverse = np.unique(columns * self.row_count + rows, return_inverse=True)
        values = sums(inverse, values, len(places))
        columns, rows = np.divmod(places, self.row_count)
        starts: npt.NDArray[np.int32] = np.zeros(self.column_count + 1, dtype=np.int32)
        np.cumsum(np.bincount(columns, minlength=self.column_count), out=starts[1:])
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_ = starts
        model.a_matrix_.index_ = rows.astype(np.int32)
        model.a_matrix_.value_ = values
        integer = np.concatenate(self._integers)
        if integer.any():
            model.integrality_ = [
                highspy.HighsVarType.kInteger if flag else highspy.HighsVarType.kContinuous
                for flag in integer
            ]
        return model
