"""The filter, run by an interpreter of classic BPF: what each call gets, on both architectures."""

import errno
import socket
import struct
from dataclasses import replace

import pytest

from interlock.errors import LayerMissing
from sandbox import seccomp
from sandbox.profile import STANDARD, STRICT, Bounds, Mount, Profile
from sandbox.syscalls import AUDIT_ARCH, NEWEST, NUMBERS, SETS

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
PROFILE = Profile(STRICT, 60_001, Bounds(1, 1, 1, 1, 1, 1), (), (), "/usr/bin/python3")


def answer(program: bytes, nr: int, *args: int, arch: int = AUDIT_ARCH["x86_64"]) -> int:
    """Run the program on one seccomp_data."""
    words = (*args, *([0] * (6 - len(args))))
    data = struct.pack("=IIQ6Q", nr, arch, 0, *(w & (2**64 - 1) for w in words))
    rows = [struct.unpack_from("=HBBI", program, i) for i in range(0, len(program), 8)]
    at, accumulator = 0, 0
    while True:
        code, yes, no, k = rows[at]
        at += 1
        if code == 0x06:
            return k
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, k)[0]
            continue
        holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x25: accumulator > k, 0x45: bool(accumulator & k)}
        at += yes if holds[code] else no


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
@pytest.mark.parametrize("shape", [STANDARD, STRICT])
def test_refuses_when_a_call_is_on_the_list(arch: str, shape: object) -> None:
    profile = replace(PROFILE, shape=shape)
    program = seccomp.program(profile, arch)
    table, native = NUMBERS[arch], AUDIT_ARCH[arch]
    for name in SETS[profile.syscalls]:
        if name in table:
            assert answer(program, table[name], arch=native) == EPERM, name
    assert answer(program, table["clone3"], arch=native) == ENOSYS
    assert answer(program, 0, arch=native) == ALLOW  # the positive control: read (or io_setup)


def test_refuses_when_the_number_is_x32_before_any_other_comparison() -> None:
    program = seccomp.program(PROFILE, "x86_64")
    assert answer(program, 0x40000000) == KILL
    assert answer(program, 0x40000000 | NUMBERS["x86_64"]["ptrace"]) == KILL
    assert answer(program, 39) == ALLOW


def test_refuses_when_the_architecture_differs() -> None:
    program = seccomp.program(PROFILE, "x86_64")
    assert answer(program, 39, arch=0x40000003) == KILL
    with pytest.raises(LayerMissing) as caught:
        seccomp.program(PROFILE, "riscv64")
    assert caught.value.code == "layer_missing.seccomp"


def test_refuses_when_a_call_is_newer_than_the_table() -> None:
    program = seccomp.program(PROFILE, "x86_64")
    assert answer(program, NEWEST + 1) == ENOSYS
    assert answer(program, NEWEST) == ALLOW


@pytest.mark.parametrize("flag", [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000])
def test_refuses_when_clone_asks_for_a_namespace(flag: int) -> None:
    program = seccomp.program(PROFILE, "x86_64")
    assert answer(program, 56, flag | 17) == EPERM
    assert answer(program, 56, 0x3D0F00) == ALLOW  # what pthread_create asks


def test_refuses_when_a_terminal_is_typed_into_also_with_high_bits() -> None:
    program = seccomp.program(PROFILE, "x86_64")
    for request in (0x5412, 0x541C, 0x1_0000_5412, 0xFFFFFFFF_0000_541C):
        assert answer(program, 16, 0, request) == EPERM
    assert answer(program, 16, 0, 0x5401) == ALLOW


def test_refuses_when_a_family_is_not_the_internet() -> None:
    program = seccomp.program(PROFILE, "x86_64")
    for family in (socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET, 38, 40, 15):
        assert answer(program, 41, int(family)) == EPERM
    assert answer(program, 41, int(socket.AF_UNIX) | 1 << 32) == EPERM
    assert answer(program, 41, int(socket.AF_INET)) == ALLOW


def test_sockets_in_the_profile_open_unix_and_ranks_open_route_only() -> None:
    listed = replace(PROFILE, sockets=(Mount("socket", "/x", "/y"),))
    assert answer(seccomp.program(listed, "x86_64"), 41, int(socket.AF_UNIX)) == ALLOW
    ranks = seccomp.program(replace(PROFILE, ranks=2), "x86_64")
    assert answer(ranks, 41, 16, 3, 0) == ALLOW
    assert answer(ranks, 41, 16, 3, 9) == EPERM
    assert answer(ranks, 41, int(socket.AF_UNIX)) == EPERM
    assert listed.digest() != PROFILE.digest() != replace(PROFILE, ranks=2).digest()
