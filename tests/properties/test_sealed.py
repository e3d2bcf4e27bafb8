"""Properties of sealed files: what goes in comes out, and no byte of a file can be another."""

import os
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from interlock import sealed
from interlock.errors import Malformed, Untrusted
from tests.vectors import make_sealed

KEY, RUN, STEP = make_sealed.KEY, make_sealed.RUN, make_sealed.STEP
C = sealed.CHUNKS[0]
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
offsets = st.lists(st.integers(0, 2**53 - 1), max_size=3).map(tuple)
sizes = st.one_of(st.integers(0, 40), st.sampled_from([C - 1, C, C + 1, 2 * C, 2 * C + 17]))


def _refused(fd: int) -> str:
    """Open and check the whole file; return the code of its refusal, or ok."""
    try:
        reader = sealed.Reader(fd, KEY, RUN, STEP)
    except (Malformed, Untrusted) as refusal:
        return refusal.code
    try:
        reader.verify()
    except (Malformed, Untrusted) as refusal:
        return refusal.code
    finally:
        reader.close()
    return "ok"


def test_each_changed_byte_is_refused() -> None:
    good = make_sealed.file_bytes()
    fd = os.memfd_create("property")
    try:
        os.write(fd, good)
        assert _refused(fd) == "ok"
        for at in range(len(good)):
            for other in (good[at] ^ 1, good[at] ^ 0x80, (good[at] + 1) % 256):
                os.pwrite(fd, bytes([other]), at)
                assert _refused(fd) in {"malformed.sealed", "malformed.sealed_version", "untrusted.sealed"}, at
            os.pwrite(fd, good[at : at + 1], at)
        assert _refused(fd) == "ok"
    finally:
        os.close(fd)


def test_each_length_but_one_is_refused() -> None:
    good = make_sealed.file_bytes()
    fd = os.memfd_create("property")
    try:
        os.write(fd, good)
        for size in range(len(good) + 60):
            os.ftruncate(fd, size)
            if size > len(good):
                os.pwrite(fd, good[-(size - len(good)) :], len(good))
            else:
                os.pwrite(fd, good[:size], 0)
            assert (_refused(fd) == "ok") is (size == len(good)), size
    finally:
        os.close(fd)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.dictionaries(st.tuples(names, offsets), sizes, max_size=6), st.integers(0, 2**32))
def test_round_trip(wanted: dict[tuple[str, tuple[int, ...]], int], seed: int) -> None:
    random = Random(seed)
    fd = os.memfd_create("property")
    try:
        data = {key: random.randbytes(size) for key, size in wanted.items()}
        writer = sealed.Writer(fd, KEY, b"w", RUN, STEP, C)
        for (name, offset), value in data.items():
            writer.add(name, offset, value)
        assert writer.finish() == os.fstat(fd).st_size
        reader = sealed.Reader(fd, KEY, RUN, STEP)
        assert {(i.name, i.offset): bytes(reader.read(n)) for n, i in enumerate(reader.items)} == data
        for n, item in enumerate(reader.items):
            start = random.randint(0, item.size)
            target = bytearray(random.randint(0, item.size - start))
            reader.read_into(n, target, start)
            assert target == data[item.name, item.offset][start : start + len(target)]
        reader.verify()
        reader.close()
    finally:
        os.close(fd)
