"""The system-call filter: a profile becomes classic BPF bytes. Nothing here runs anything.

Order of the program, and it matters:
1. another architecture → kill; on x86_64 a number with the x32 bit → kill, before any other comparison;
2. numbers above the newest one known → ENOSYS; clone3 → ENOSYS, so that libc falls back to clone, whose
   namespace flags a filter can read;
3. the refused calls → EPERM;
4. clone with a namespace flag, socket of another family than allowed, ioctl that types into a terminal
   → EPERM. Arguments are compared on their LOW 32 bits only, as the kernel reads them (CVE-2019-10063).

Source: seccomp(2), linux/filter.h; sock_filter is 8 bytes: code u16, jt u8, jf u8, k u32.
"""

import errno
import platform
import socket
import struct
from collections.abc import Iterable

from interlock.errors import LayerMissing
from sandbox.profile import Profile
from sandbox.syscalls import AUDIT_ARCH, NEWEST, NUMBERS, SETS

_LD, _JEQ, _JGE, _JGT, _JSET, _RET = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_NR, _ARCH, _ARG0, _ARG1, _ARG2 = 0, 4, 16, 24, 32
_X32 = 0x40000000
_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_NETLINK = 16

Instruction = tuple[int, int, int, int]


def _load(offset: int) -> Instruction:
    return (_LD, 0, 0, offset)


def _ret(value: int) -> Instruction:
    return (_RET, 0, 0, value)


def _when(code: int, k: int, answer: int) -> list[Instruction]:
    """If the comparison holds, return `answer`; else go on."""
    return [(code, 0, 1, k), _ret(answer)]


def _head(arch: str) -> list[Instruction]:
    program = [_load(_ARCH), (_JEQ, 1, 0, AUDIT_ARCH[arch]), _ret(_KILL), _load(_NR)]
    if arch == "x86_64":
        program += _when(_JGE, _X32, _KILL)
    return program + _when(_JGT, NEWEST, _ENOSYS)


def _refused(table: dict[str, int], names: Iterable[str]) -> list[Instruction]:
    program = _when(_JEQ, table["clone3"], _ENOSYS)
    for name in names:
        if name in table:  # some calls exist on one architecture only
            program += _when(_JEQ, table[name], _EPERM)
    return program


def _guarded(number: int, body: list[Instruction]) -> list[Instruction]:
    """Run `body` (which ends in a return) for that call only."""
    return [(_JEQ, 0, len(body), number), *body]


def _families(profile: Profile) -> list[Instruction]:
    allowed = [int(socket.AF_INET), int(socket.AF_INET6)]
    if profile.sockets:
        allowed.append(int(socket.AF_UNIX))
    body = [_load(_ARG0)]
    for family in allowed:
        body += _when(_JEQ, family, _ALLOW)
    if profile.ranks > 1:  # gloo reads addresses by NETLINK_ROUTE; harmless in an own network namespace
        body += [(_JEQ, 0, 3, _NETLINK), _load(_ARG2), *_when(_JEQ, 0, _ALLOW)]
    return [*body, _ret(_EPERM)]


def instructions(profile: Profile, arch: str) -> list[Instruction]:
    """Return the program as (code, jt, jf, k) rows; raises LayerMissing for an unknown architecture."""
    if arch not in NUMBERS:
        raise LayerMissing(
            f"no table of system calls for {arch}", code="seccomp",
            next_step="run nodes on x86_64 or aarch64",
        )
    table = NUMBERS[arch]
    program = _head(arch) + _refused(table, SETS[profile.syscalls])
    program += _guarded(table["clone"], [_load(_ARG0), *_when(_JSET, _NEW_NAMESPACES, _EPERM), _ret(_ALLOW)])
    program += _guarded(table["socket"], _families(profile))
    typed = [*_when(_JEQ, _TIOCSTI, _EPERM), *_when(_JEQ, _TIOCLINUX, _EPERM)]
    program += _guarded(table["ioctl"], [_load(_ARG1), *typed, _ret(_ALLOW)])
    return [*program, _ret(_ALLOW)]


def program(profile: Profile, arch: str | None = None) -> bytes:
    """Return the filter that ``bwrap --seccomp`` reads; `arch` defaults to this machine's.

    Raises LayerMissing (``layer_missing.seccomp``) on an architecture without a table.
    """
    rows = instructions(profile, arch or platform.machine())
    return b"".join(struct.pack("=HBBI", *row) for row in rows)
