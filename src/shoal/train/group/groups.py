"""Worker groups: the devices that hold one replica of a model, with the thread that drives them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, TypeVar

import shoal
from shoal.errors import DeviceLostError
from shoal.train.group import devices as train_devices
from shoal.train.group.devices import Member
from shoal.train.group.errors import GroupError, GroupLostError, TrainError, device_at_fault

T = TypeVar("T")
_log = logging.getLogger("shoal.train")
CLOSE_TIMEOUT_S = 10.0


class WorkerGroup:
    """One replica's devices and their thread. Work given to it runs in order.

    >>> groups[0].call(lambda group: torch.ones(2, device=group.device).sum().item()).result()
    2.0
    """

    def __init__(self, index: int, members: Sequence[Member]) -> None:
        self.index = index
        self.members = tuple(members)
        self.lost: str | None = None  # why, once a device of it is gone
        self.silent: set[Member] = set()  # devices elsewhere that are not heard of
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"shoal-group-{index}", daemon=True)
        self._thread.start()

    @property
    def device(self) -> Any:
        """The first device, where batches come in."""
        return self.members[0].device

    @property
    def devices(self) -> list[Any]:
        return [member.device for member in self.members]

    def has_ended(self) -> bool:
        """Whether a worker of it, on this machine, is no more."""
        return any(train_devices.has_ended(member) for member in self.members)

    def call(self, work: Callable[[WorkerGroup], T]) -> Future[T]:
        """Runs `work(group)` in the group's thread, with its first device as the current one."""
        future: Future[T] = Future()
        self._queue.put((future, lambda: work(self)))
        return future

    def error(self, cause: BaseException, step: int | None = None) -> GroupError:
        """Wrap `cause` in an error that carries the group, its devices and the step."""
        kind = GroupLostError if isinstance(cause, DeviceLostError) else GroupError
        why = (
            f"{type(cause).__name__}: {cause}" if not isinstance(cause, TrainError) else str(cause)
        )
        error = kind(self.index, [str(m) for m in self.members], step, why)
        error.__cause__ = cause
        error.device = device_at_fault(cause)
        error.operator = getattr(cause, "operator", None)
        error.line = getattr(cause, "line", None)
        return error

    def close(self) -> bool:
        """Ends the thread after the work it has; False if it did not end in time."""
        self._queue.put(None)
        self._thread.join(0 if self.lost else CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        current = False
        while (item := self._queue.get()) is not None:
            future, work = item
            del item
            try:
                if not current:
                    train_devices.set_current(self.device)
                    current = True
                result = work()
            except BaseException as error:  # the future carries it to whoever asked
                del work  # and its tensors, before anybody learns that it is done
                future.set_exception(error)
            else:
                del work
                future.set_result(result)
                del result
            del future  # keep no tensor alive while waiting

    def __repr__(self) -> str:
        return f"<WorkerGroup {self.index} [{', '.join(m.name for m in self.members)}]>"


class WorkerGroups:
    """All groups of a training. A context manager: leaving it ends their threads.

    With `groups="auto"` the groups are made when a trainer has seen the model and a batch.
    """

    def __init__(
        self,
        layout: Sequence[Sequence[int]] | None,
        members: Sequence[Member],
        pool: shoal.Pool | None = None,
    ) -> None:
        self.members = tuple(members)
        self.automatic = layout is None
        self._pool = pool
        self._groups: list[WorkerGroup] = []
        self._listeners: list[Callable[[WorkerGroup, str], None]] = []
        self._step: Callable[[], int | None] = _no_step  # of whoever trains on these groups
        self._closed = False
        self._watch: train_devices.Watch | None = None
        if layout is not None:
            self.form(layout)

    def form(self, layout: Sequence[Sequence[int]]) -> None:
        """Makes the groups; each entry lists places in `members`."""
        used = [place for group in layout for place in group]
        known = range(len(self.members))
        if not used or any(not g for g in layout) or any(p not in known for p in used):
            raise TrainError(
                f"{layout!r} is no layout of {len(self.members)} devices; write for example "
                "[[0, 1], [2]]: two groups, the first with two devices"
            )
        if len(set(used)) != len(used):
            raise TrainError(f"{layout!r} uses a device twice")
        if self._groups:
            raise TrainError("these groups are formed already; make new ones")
        self._groups = [
            WorkerGroup(i, [self.members[place] for place in places])
            for i, places in enumerate(layout)
        ]
        watched = [self.members[place] for place in used]
        self._watch = train_devices.Watch(watched, self._on_trouble, self._on_silent)

    @property
    def shape(self) -> tuple[int, ...]:
        """Devices of each group."""
        return tuple(len(group.members) for group in self._groups)

    def call(self, work: Callable[[WorkerGroup], T]) -> list[T]:
        """Runs `work(group)` in every group at once and returns the results in order.

        >>> groups.call(lambda group: group.index)
        [0, 1]
        """
        futures = [(group, group.call(work)) for group in self._groups]
        results, first = [], None
        for group, future in futures:
            try:
                results.append(future.result())
            except BaseException as error:
                first = first or group.error(error)
        if first is not None:
            raise first
        return results

    def on_trouble(
        self, listener: Callable[[WorkerGroup, str], None], step: Callable[[], int | None]
    ) -> Callable[[], None]:
        """Calls `listener(group, why)` when a device is gone, and `step()` to say when one is silent;
        returns how to stop that."""
        self._listeners.append(listener)
        self._step = step

        def forget() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
                self._step = _no_step

        return forget

    def _on_trouble(self, member: Member, why: str) -> None:
        group = next(g for g in self._groups if member in g.members)
        # Whoever trains may still wait for other devices: it is named before that.
        _log.warning("shoal: %s: %s", self._name(group, member), why)
        train_devices.give_up(member.device)
        if group.lost is None:
            group.lost = why
            for listener in list(self._listeners):
                listener(group, why)

    def _on_silent(self, member: Member, seconds: float | None) -> None:
        """Names a device elsewhere that has fallen silent before anybody knows whether it is lost."""
        group = next(g for g in self._groups if member in g.members)
        name = self._name(group, member)
        if seconds is None:
            group.silent.discard(member)
            _log.warning("shoal: %s: is heard again", name)
            return
        group.silent.add(member)
        _log.warning(
            "shoal: %s: nothing heard for %.1f s; it counts as lost when its connection gives it up",
            name, seconds,
        )  # fmt: skip

    def _name(self, group: WorkerGroup, member: Member) -> str:
        """Group, device and step, as errors give them."""
        step = self._step()
        when = f", step {step}" if step is not None else ""
        return f"group {group.index} ({member}){when}"

    def close(self) -> None:
        """Ends the groups' threads, and the pool if it was started for them."""
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        late = [group.index for group in self._groups if not group.close()]
        if self._pool is not None:
            from shoal.device import leases

            lease = leases.current()
            if lease is not None and lease.url == self._pool.url:
                lease.close()
            self._pool.close()
        if late and not any(group.lost for group in self._groups):
            raise TrainError(f"the threads of groups {late} did not end in {CLOSE_TIMEOUT_S:g} s")

    def __enter__(self) -> WorkerGroups:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> WorkerGroup:
        return self._groups[index]

    def __iter__(self) -> Iterator[WorkerGroup]:
        return iter(self._groups)

    def __repr__(self) -> str:
        if not self._groups:
            return f"<WorkerGroups of {len(self.members)} devices, formed by the first batch>"
        return f"<WorkerGroups {[[m.name for m in g.members] for g in self._groups]}>"


def _no_step() -> None:
    """Nobody trains yet."""


def worker_groups(
    groups: int | Literal["auto"] | Sequence[Sequence[int]] = 1, devices: int | None = None
) -> WorkerGroups:
    """Groups of the lease's devices, each with its own thread and one replica of the model.

    A program without a lease gets one; without a pool, one on this machine starts and ends with the
    groups.

    Args:
        groups: how many; or "auto": groups and stages are chosen when model and batch are known; or
            which devices, by their places in the lease, as in `[[0, 1], [2]]`.
        devices: of each group (default 1). With "auto": of all groups (default: the whole lease).

    >>> with shoal.train.worker_groups(groups=2, devices=2) as groups:
    ...     trainer = shoal.train.Trainer(model, loss, optimizer, groups)
    """
    if groups == "auto":
        pool = train_devices.lease_devices(devices or 1)
        found = train_devices.members()
        return WorkerGroups(None, found[: devices or len(found)], pool)
    if isinstance(groups, int):
        per_group = 1 if devices is None else devices
        if groups < 1 or per_group < 1:
            raise TrainError(f"{groups} groups of {per_group} devices: both are at least 1")
        layout = [list(range(g * per_group, (g + 1) * per_group)) for g in range(groups)]
    elif isinstance(groups, str):
        raise TrainError(f'groups={groups!r}: give a number, "auto", or a list like [[0, 1], [2]]')
    else:
        layout = [list(places) for places in groups]
    needed = max((place for places in layout for place in places), default=0) + 1
    pool = train_devices.lease_devices(needed)
    return WorkerGroups(layout, train_devices.members(), pool)
