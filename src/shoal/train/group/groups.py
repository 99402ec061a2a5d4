"""Worker groups: the devices that hold one replica of a model, with the thread that drives them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
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
    """The devices of one replica and their thread, which runs its work in order.

    >>> groups[0].call(lambda group: torch.ones(2, device=group.device).sum().item()).result()
    2.0
    """

    def __init__(self, index: int, members: Sequence[Member]) -> None:
        self.index = index
        self.members = tuple(members)
        self.lost: DeviceLostError | None = None  # set once one of its devices is gone
        self.silent: set[Member] = set()  # remote devices without a recent heartbeat
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"shoal-group-{index}", daemon=True)
        self._thread.start()

    @property
    def device(self) -> Any:
        """The first device, which gets the batches."""
        return self.members[0].device

    @property
    def devices(self) -> list[Any]:
        return [member.device for member in self.members]

    def has_ended(self) -> bool:
        """Return whether one of its workers on this machine has ended."""
        return any(train_devices.has_ended(member) for member in self.members)

    def call(self, work: Callable[[WorkerGroup], T]) -> Future[T]:
        """Run `work(group)` in the group's thread, with its first device as the current one."""
        future: Future[T] = Future()
        self._queue.put((future, lambda: work(self)))
        return future

    def error(self, cause: BaseException, step: int | None = None) -> GroupError:
        """Wrap `cause` in an error that carries the group, its devices and the step."""
        return group_error(self.index, self.members, cause, step)

    def close(self) -> bool:
        """End the thread after its present work. Return False if it did not end in time."""
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
            except BaseException as error:  # the future carries it to the caller
                del work  # and its tensors, before the caller learns that it is done
                future.set_exception(error)
            else:
                del work
                future.set_result(result)
                del result
            del future  # keep no tensor alive while waiting

    def __repr__(self) -> str:
        return f"<WorkerGroup {self.index} [{', '.join(m.name for m in self.members)}]>"


def group_error(
    index: int, members: Sequence[Member], cause: BaseException, step: int | None
) -> GroupError:
    kind = GroupLostError if isinstance(cause, DeviceLostError) else GroupError
    why = str(cause) if isinstance(cause, TrainError) else f"{type(cause).__name__}: {cause}"
    error = kind(index, [str(m) for m in members], step, why)
    error.__cause__ = cause
    error.device = device_at_fault(cause)
    error.operator = getattr(cause, "operator", None)
    error.line = getattr(cause, "line", None)
    return error


class WorkerGroups:
    """All groups of a training. A context manager: leaving it ends their threads.

    With `groups="auto"` the trainer forms the groups when it knows the model and a batch.

    >>> with shoal.train.worker_groups(groups=2) as groups:
    ...     print([group.call(lambda group: str(group.device)).result() for group in groups])
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
        self._listeners: list[Callable[[WorkerGroup, DeviceLostError], None]] = []
        self._step: Callable[[], int | None] = _no_step  # of the trainer on these groups
        self._closed = False
        self._watch: train_devices.Watch | None = None
        if layout is not None:
            self.form(layout)

    def form(self, layout: Sequence[Sequence[int]]) -> None:
        """Make the groups; each entry lists indices of `members`."""
        used = [index for group in layout for index in group]
        known = range(len(self.members))
        if not used or any(not g for g in layout) or any(i not in known for i in used):
            raise TrainError(
                f"{layout!r} is not a layout of {len(self.members)} devices; write for example "
                "[[0, 1], [2]]: two groups, the first with two devices"
            )
        if len(set(used)) != len(used):
            raise TrainError(f"{layout!r} uses a device twice")
        if self._groups:
            raise TrainError(
                "these groups are formed already. Make new ones with shoal.train.worker_groups()"
            )
        self._groups = [
            WorkerGroup(i, [self.members[index] for index in indices])
            for i, indices in enumerate(layout)
        ]
        watched = [self.members[index] for index in used]
        self._watch = train_devices.Watch(watched, self._on_trouble, self._on_silent)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of devices of each group."""
        return tuple(len(group.members) for group in self._groups)

    def call(self, work: Callable[[WorkerGroup], T]) -> list[T]:
        """Run `work(group)` in every group at once and return the results in order.

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
        self,
        listener: Callable[[WorkerGroup, DeviceLostError], None],
        step: Callable[[], int | None],
    ) -> Callable[[], None]:
        """Call `listener(group, error)` when a device is gone. `step()` gives the step for warnings.
        Return a function that ends this."""
        self._listeners.append(listener)
        self._step = step

        def forget() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
                self._step = _no_step

        return forget

    def _on_trouble(self, member: Member, why: str) -> None:
        group = next(g for g in self._groups if member in g.members)
        # The trainer may still wait for other devices: name this one before that.
        _log.warning("shoal: %s: %s", self._name(group, member), why)
        train_devices.give_up(member.device)
        if group.lost is None:
            group.lost = DeviceLostError(why, member.name)
            for listener in list(self._listeners):
                listener(group, group.lost)

    def _on_silent(self, member: Member, seconds: float | None) -> None:
        """Name a remote device that has fallen silent, before it is known to be lost."""
        group = next(g for g in self._groups if member in g.members)
        name = self._name(group, member)
        if seconds is None:
            group.silent.discard(member)
            _log.warning("shoal: %s: heartbeats are back", name)
            return
        group.silent.add(member)
        _log.warning(
            "shoal: %s: no heartbeat for %.1f s; it counts as lost when its connection times out",
            name, seconds,
        )  # fmt: skip

    def _name(self, group: WorkerGroup, member: Member) -> str:
        """Return group, device and step, as errors show them."""
        step = self._step()
        when = f", step {step}" if step is not None else ""
        return f"group {group.index} ({member}){when}"

    def close(self) -> None:
        """End the groups' threads, and the pool if it was started for them."""
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

    def __exit__(self, *_: object) -> None:
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
    """Return None: no trainer uses the groups yet."""


def worker_groups(
    groups: int | Literal["auto"] | Sequence[Sequence[int]] = 1, devices: int | None = None
) -> WorkerGroups:
    """Form groups of the lease's devices, each with its own thread and one replica of the model.

    A program without a lease gets one. Without a pool, a local one starts, and ends with the groups.

    Args:
        groups: their number; or "auto": the trainer chooses groups and stages when it knows model and
            batch; or the devices by their index in the lease, as in `[[0, 1], [2]]`.
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
            raise TrainError(
                f"groups and devices must be at least 1 (got {groups} and {per_group})"
            )
        layout = [list(range(g * per_group, (g + 1) * per_group)) for g in range(groups)]
    elif isinstance(groups, str):
        raise TrainError(f'groups={groups!r}: pass a number, "auto", or a list like [[0, 1], [2]]')
    else:
        layout = [list(indices) for indices in groups]
    needed = max((index for indices in layout for index in indices), default=0) + 1
    pool = train_devices.lease_devices(needed)
    return WorkerGroups(layout, train_devices.members(), pool)
