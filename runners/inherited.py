"""What a program under a user of its own inherits from the launcher (runners/unprivileged.py is the launcher's end).

A control socket that root made, a permit key in a pipe, and nothing else. Keys or prompts will lie in its memory, so
that is closed before anything is read.
"""

import ctypes
import os
import resource
import socket

from interlock.errors import Unavailable, Untrusted
from runners.guest_line import peer_uid
from runners.unprivileged import KEY_BYTES

_PR_SET_DUMPABLE, _PR_GET_DUMPABLE = 4, 3


def close_memory() -> None:
    """Keep this process's memory out of core dumps and of debuggers of its own uid; raises Unavailable."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise Unavailable(f"memory cannot be closed: {os.strerror(ctypes.get_errno())}", code="memory",
                          next_step="start the node on a kernel that has PR_SET_DUMPABLE")


def read_key(fd: int) -> bytes:
    """Return the permit key and close its pipe; raises Untrusted (``untrusted.permit``) for anything but 32 bytes."""
    with os.fdopen(fd, "rb") as source:
        key = source.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise Untrusted(f"no permit key of {KEY_BYTES} bytes came through the pipe", code="permit",
                        next_step="start the node: it starts this program")
    return key


def open_control(fd: int, program: str) -> socket.socket:
    """Return the control socket; raises Untrusted when root did not make it, or when `program` runs as root."""
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)
    try:
        if peer_uid(control) != 0:
            raise Untrusted("the control socket was not made by root", code="peer",
                            next_step=f"start the node: it starts the {program}")
        if os.geteuid() == 0:
            raise Untrusted(f"the {program} never runs as root", code="uid",
                            next_step=f"start the node: it starts the {program}")
    except BaseException:
        control.close()
        raise
    return control
