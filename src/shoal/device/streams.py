"""`torch.shoal.Stream` and `Event`. A device has one op stream; all torch streams of it share that."""

from __future__ import annotations

from typing import Any

import torch

from shoal import _core


def _device(device: Any) -> torch.device:
    from shoal.device import module

    _core.want()  # the program names the device, maybe for the first time
    return torch.device("shoal", module._index(device))


class Stream(torch.Stream):
    """A torch stream of the device. Work on all of them runs in program order.

    >>> stream = torch.shoal.Stream()
    >>> with torch.shoal.stream(stream):
    ...     y = x @ x
    """

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, _device(device), priority=priority)


def Event(
    device: Any = None,
    enable_timing: bool = False,
    blocking: bool = False,
    interprocess: bool = False,
) -> torch.Event:
    """A point in the op stream, with the device's own time.

    A function, because torch compares events only with its own class.

    >>> start = torch.shoal.Event(enable_timing=True)
    >>> stop = torch.shoal.Event(enable_timing=True)
    >>> start.record()
    >>> y = x @ x
    >>> stop.record()
    >>> stop.synchronize()
    >>> print(start.elapsed_time(stop), "ms")
    """
    return torch.Event(_device(device), enable_timing=enable_timing)


def current_stream(device: Any = None) -> torch.Stream:
    """Return the torch stream that this thread's work is said to go to.

    >>> torch.shoal.current_stream().synchronize()
    """
    return torch.accelerator.current_stream(_device(device))


def default_stream(device: Any = None) -> torch.Stream:
    """Return the stream of a thread that has chosen none.

    >>> torch.shoal.default_stream().synchronize()
    """
    return torch.Stream(stream_id=0, device_index=_device(device).index, device_type=20)


def set_stream(stream: torch.Stream) -> None:
    """Make a stream the current one of its device in this thread.

    >>> torch.shoal.set_stream(torch.shoal.default_stream())
    """
    torch.accelerator.set_stream(stream)


class stream:
    """Context manager: `with torch.shoal.stream(s): …`.

    >>> with torch.shoal.stream(torch.shoal.Stream()):
    ...     y = x @ x
    """

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream
        self._before: torch.Stream | None = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = current_stream(_core.current_device())
            set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            set_stream(self._before)
