"""The system calls that a program in a sandbox does not get, as a filter for the kernel.

Namespaces hold the rest. Refused are sockets that no network namespace separates (of virtual machines,
Bluetooth, …), io_uring, which would open them unseen, keyrings, and ways into the kernel that programs
do not need.
"""

from __future__ import annotations

import errno
import os
import struct

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000  # with an errno in the low bits
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_FAMILIES = (1, 2, 10, 16)  # Unix, IPv4, IPv6, netlink: all of them are per namespace
_X32 = 0x40000000

#: Machine -> (its number for audit, socket, calls that are refused).
_MACHINES = {
    "x86_64": (0xC000003E, 41, {
        "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298,
        "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
        "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313,
        "open_by_handle_at": 304, "ptrace": 101, "process_vm_writev": 311, "quotactl": 179,
        "acct": 163, "syslog": 103,
    }),
    "aarch64": (0xC00000B7, 198, {
        "add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280, "perf_event_open": 241,
        "userfaultfd": 282, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
        "kexec_load": 104, "kexec_file_load": 294, "init_module": 105, "finit_module": 273,
        "open_by_handle_at": 265, "ptrace": 117, "process_vm_writev": 271, "quotactl": 60,
        "acct": 89, "syslog": 116,
    }),
}  # fmt: skip


def program(machine: str | None = None) -> bytes:
    """Return the filter as the kernel reads it. Raise KeyError for a machine that has none."""
    audit, socket_number, refused = _MACHINES[machine or os.uname().machine]
    code = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, audit, 1, 0),
        _step(_RETURN, _REFUSE | errno.ENOSYS),  # the calls of another architecture
        _step(_LOAD, _NUMBER),
        _step(_AT_LEAST, _X32, 0, 1),
        _step(_RETURN, _REFUSE | errno.ENOSYS),
    ]
    for number in sorted(refused.values()):
        code += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _REFUSE | errno.EPERM)]
    code += [_step(_EQUAL, socket_number, 1, 0), _step(_RETURN, _ALLOW)]
    code.append(_step(_LOAD, _FIRST_ARGUMENT))
    for family in _FAMILIES:
        code += [_step(_EQUAL, family, 0, 1), _step(_RETURN, _ALLOW)]
    code.append(_step(_RETURN, _REFUSE | errno.EAFNOSUPPORT))
    return b"".join(code)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
