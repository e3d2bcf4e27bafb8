"""Landlock by its three system calls: what a run may do with files, TCP, abstract sockets and signals.

Stand-alone: run init loads this file inside the sandbox, where nothing else of ours exists. The numbers
444 to 446 are the same on every architecture. Source: landlock(7), linux/landlock.h.
"""

import ctypes
import os
import struct

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
_FILES = (1 << 13) - 1  # ABI 1: everything up to MAKE_SYM
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_TCP = 3
_SCOPES = 3

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(number: int, *args: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *args))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def abi() -> int:
    """Return the ABI of this kernel, 0 when it has none or has it switched off."""
    try:
        return _call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    except OSError:
        return 0


def handled(version: int) -> tuple[int, int, int]:
    """Return the rights (files, TCP, scopes) that a kernel of this ABI lets us take away."""
    files = _FILES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    files |= _IOCTL_DEV if version >= 5 else 0
    return files, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= EXECUTE | WRITE_FILE | READ_FILE | _TRUNCATE | _IOCTL_DEV
        rule = struct.pack("=Qi", rights, fd)
        _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(fd)


def restrict(writable: list[str], minimum: int, tcp: bool = False) -> int:
    """Restrict the calling thread for good: read and execute everywhere, write below `writable`, use of
    devices in /dev, no TCP unless `tcp`, no signals or abstract sockets to the outside, each where the kernel
    knows it.

    Returns the ABI in force; raises OSError when the kernel has less than `minimum`. Needs no_new_privs.
    """
    version = abi()
    if version < max(1, minimum):
        raise OSError(95, f"landlock ABI {version} is below {minimum}")
    files, ports, scopes = handled(version)
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = struct.pack("=QQQ", files, 0 if tcp else ports, scopes)[:size]
    ruleset = _call(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        _allow(ruleset, "/", files & (EXECUTE | READ_FILE | READ_DIR))
        _allow(ruleset, "/dev", files & (READ_FILE | READ_DIR | WRITE_FILE | _IOCTL_DEV))
        for path in writable:
            _allow(ruleset, path, files)
        _call(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)
    return version
