"""What differs between the two ways, and whether it does so again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.ecosystem.pytorch_suite.runs import Run, Runner

TIMES = 3


@dataclass
class Suspect:
    """A test that passed without Shoal and did not pass with it."""

    file: str
    test: str
    why: str
    alone: tuple[int, int] = (0, 0)  # passes without and with, of TIMES
    together: tuple[int, int] | None = None  # the same after the tests of its class that precede it
    again: str = ""  # why it failed with Shoal when it ran again

    @property
    def differs(self) -> bool:
        """Steady without Shoal, and not with it."""
        counts = [self.alone, *([self.together] if self.together else [])]
        return any(without == TIMES and with_shoal < TIMES for without, with_shoal in counts)


@dataclass
class FileResult:
    without: Run
    with_shoal: Run
    suspects: list[Suspect] = field(default_factory=list)

    @property
    def counted(self) -> list[str]:
        return self.without.passed()

    @property
    def differences(self) -> list[Suspect]:
        return [suspect for suspect in self.suspects if suspect.differs]

    @property
    def unsteady(self) -> list[Suspect]:
        """Suspects that do not fail because of Shoal: without it they fail now and then, too, or
        what was seen once did not come again."""
        return [suspect for suspect in self.suspects if not suspect.differs]

    @property
    def added(self) -> list[str]:
        """Tests that exist only with Shoal: torch's tests took it for a usable device."""
        if self.without.broken:
            return []
        return sorted(set(self.with_shoal.collected) - set(self.without.collected))

    @property
    def woke(self) -> list[str]:
        """Tests that made a program which did not ask for Shoal load more of it."""
        return [test for test, outcome in self.with_shoal.outcomes.items() if outcome.imported]


def suspects(without: Run, with_shoal: Run) -> list[Suspect]:
    found = []
    for test in without.passed():
        outcome = with_shoal.outcomes.get(test)
        if outcome is None or outcome.result != "passed":
            why = f"{outcome.result}: {outcome.why}" if outcome else "not run"
            found.append(Suspect(without.file, test, why))
    return found


def run_again(runner: Runner, result: FileResult, suspect: Suspect) -> None:
    """Three times each way alone; if that shows nothing, together with its class."""
    suspect.alone = _passes(runner, suspect, [suspect.test])
    if not suspect.differs and suspect.alone[0] == TIMES:
        suspect.together = _passes(runner, suspect, _up_to(result.counted, suspect.test))


def _passes(runner: Runner, suspect: Suspect, tests: list[str]) -> tuple[int, int]:
    counts = {False: 0, True: 0}
    for _ in range(TIMES):
        for shoal in (False, True):
            run = runner.run(suspect.file, shoal=shoal, wanted=tests)
            outcome = run.outcomes[suspect.test]
            counts[shoal] += outcome.result == "passed"
            if shoal and outcome.result != "passed":
                suspect.again = f"{outcome.result}: {outcome.why}"
    return counts[False], counts[True]


def _up_to(tests: Iterable[str], last: str) -> list[str]:
    cls = last.partition("::")[0]
    found = []
    for test in tests:
        if test.partition("::")[0] == cls:
            found.append(test)
        if test == last:
            break
    return found
