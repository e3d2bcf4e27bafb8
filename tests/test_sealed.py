"""Sealed files: vectors, round trips, and what a reader or a writer must refuse."""

import dataclasses
import inspect
import json
import mmap
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock import chunks, sealed
from interlock.canon import digest_bytes
from interlock.errors import Conflict, Malformed, NotFound, Refusal, Untrusted
from tests.vectors import make_sealed

C = 65_536
KEY, RUN, STEP = make_sealed.KEY, "run_1", 7
DATA = bytes(range(256)) * 1024  # four chunks of 64 KiB


def vectors(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((make_sealed.HERE / name).read_text())
    return found


@pytest.fixture
def fd() -> Iterator[int]:
    """An empty file in memory."""
    found = os.memfd_create("sealed")
    yield found
    os.close(found)


def write(fd: int, *items: bytes, chunk: int = C) -> int:
    writer = sealed.Writer(fd, KEY, b"wrapped", RUN, STEP, chunk)
    for n, data in enumerate(items):
        assert writer.add("w", (n,), data) == n
    return writer.finish()


def spoil(fd: int, at: int) -> None:
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)


def outcome(work: Callable[[], Any]) -> str:
    try:
        work()
    except Refusal as refusal:
        return refusal.code
    return "ok"


# ---- vectors ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("case", vectors("file.json"), ids=lambda c: c["name"])
@pytest.mark.parametrize("mapped", [True, False])
def test_file_vector(case: dict[str, Any], mapped: bool, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not mapped:
        monkeypatch.setattr(mmap, "mmap", _no_map)
    os.write(fd, bytes.fromhex(case["file"]))

    def work() -> None:
        reader = sealed.Reader(fd, bytes.fromhex(case["key"]), case["run"], case["step"])
        reader.verify()
        for n, item in enumerate(case["items"]):
            assert (reader.items[n].name, list(reader.items[n].offset)) == (item["name"], item["offset"])
            assert reader.read(n).hex() == item["data"]
        assert sealed.wrapped_of(fd).hex() == case["wrapped"]
        reader.close()

    assert outcome(work) == case["expect"]


@pytest.mark.parametrize("case", vectors("file-key.json"), ids=lambda c: c["name"])
def test_file_key_vector(case: dict[str, Any]) -> None:
    run_key, wrapped = bytes.fromhex(case["run_key"]), bytes.fromhex(case["wrapped"])

    def work() -> None:
        assert sealed.unwrap_file_key(run_key, wrapped, case["run"], case["step"], case["file"]).hex() \
            == case["file_key"]

    assert outcome(work) == case["expect"]


def test_files_are_what_the_code_makes() -> None:
    for name, text in make_sealed.build().items():
        assert (make_sealed.HERE / name).read_text() == text, f"{name}: run python -m tests.vectors.make_sealed"


# ---- round trips -----------------------------------------------------------------------------------

def _no_map(*_: object, **__: object) -> mmap.mmap:
    raise OSError("no address space")


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("chunk", sealed.CHUNKS)
def test_round_trip_at_every_edge_of_a_chunk(
    chunk: int, mapped: bool, fd: int, monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not mapped:
        monkeypatch.setattr(mmap, "mmap", _no_map)
    whole = (DATA * (2 * chunk // len(DATA) + 1))[: 2 * chunk]
    sizes = [0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk]
    assert write(fd, *(whole[:s] for s in sizes), chunk=chunk) == os.fstat(fd).st_size
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    assert [i.size for i in reader.items] == sizes
    assert [bytes(reader.read(n)) for n in range(len(sizes))] == [whole[:s] for s in sizes]
    for start, size in [(0, 1), (1, chunk), (chunk - 1, 2), (chunk, chunk), (2 * chunk - 1, 1), (2 * chunk, 0)]:
        target = bytearray(size)
        reader.read_into(5, target, start)
        assert target == whole[start : start + size], (start, size)
    reader.verify()
    reader.close()


def test_takes_any_contiguous_buffer_and_gives_into_any(fd: int) -> None:
    numbers = array("d", [0.5, -1.0, 3.25])
    grid = memoryview(bytes(12)).cast("B", (3, 4))
    writer = sealed.Writer(fd, KEY, b"w", RUN, STEP, C)
    for n, data in enumerate([numbers, grid, array("d"), memoryview(b"").cast("B"), bytearray(b"x")]):
        writer.add("item", (n,), data)
    writer.finish()
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    target = array("d", [9.0] * 3)
    reader.read_into(0, target)
    assert target == numbers
    assert [i.size for i in reader.items] == [24, 12, 0, 0, 1]
    reader.close()


def test_ranges_read_only_the_chunks_they_cover(fd: int) -> None:
    write(fd, DATA)
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    spoil(fd, reader.items[0].start + 5)  # the first chunk of four
    target = bytearray(2 * C)
    reader.read_into(0, target, 2 * C)
    assert target == DATA[2 * C :]
    assert outcome(lambda: reader.read_into(0, target, 1)) == "untrusted.sealed"
    reader.close()


def test_threads_read_items_at_the_same_time(fd: int) -> None:
    write(fd, *(bytes([n]) * (C + n) for n in range(8)))
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    wrong: list[int] = []

    def work(n: int) -> None:
        if any(reader.read(n) != bytes([n]) * (C + n) for _ in range(20)):
            wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    reader.close()


def test_items_beyond_four_gib_are_found(tmp_path: Path) -> None:
    """A sparse hole stands for an item of 5 GiB; its index row is true, its chunks are not read."""
    path = tmp_path / "large.sealed"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        hole = 5 << 30
        writer = sealed.Writer(fd, KEY, b"w", RUN, STEP)
        writer._rows.append({"name": "hole", "offset": [], "start": writer._end, "size": hole})
        writer._end += hole + sealed.TAG * chunks.chunk_count(hole, 4 << 20)
        writer.add("after", (2**40,), b"found")
        assert writer.finish() > hole
        reader = sealed.Reader(fd, KEY, RUN, STEP)
        assert reader.items[1].start > 2**32
        assert reader.read(1) == b"found"
        target = bytearray(b"x" * 10)
        with pytest.raises(Untrusted):
            reader.read_into(0, target, hole - 10)
        assert target == bytes(10)
        reader.close()
    finally:
        os.close(fd)
        path.unlink()


# ---- refusals of a reader --------------------------------------------------------------------------

@pytest.mark.parametrize("mapped", [True, False])
def test_refuses_when_a_tag_fails_and_leaves_the_target_zeroed(
    mapped: bool, fd: int, monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not mapped:
        monkeypatch.setattr(mmap, "mmap", _no_map)
    write(fd, DATA)
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    target = bytearray(len(DATA))
    reader.read_into(0, target)
    assert target == DATA
    spoil(fd, reader.items[0].start + 2 * (C + sealed.TAG))  # the third chunk: two good ones come first
    target = bytearray(b"\xff" * len(DATA))
    with pytest.raises(Untrusted) as caught:
        reader.read_into(0, target)
    assert target == bytes(len(DATA))
    assert caught.value.__cause__ is None
    for work in (lambda: reader.read(0), reader.verify):
        assert outcome(work) == "untrusted.sealed"
    reader.close()


def test_refuses_when_a_chunk_stands_in_another_place(fd: int) -> None:
    """Repeated, exchanged and taken from another item: each chunk is whole, and in the wrong place."""
    size = C + sealed.TAG
    write(fd, bytes(4 * C), bytes(4 * C))
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    one, two = (i.start for i in reader.items)
    good = os.pread(fd, 8 * size, one)
    reader.verify()
    for source, target in [(one, one + size), (one + size, one), (one, two), (one + 2 * size, one + 3 * size)]:
        os.pwrite(fd, good[source - one : source - one + size], target)
        assert outcome(reader.verify) == "untrusted.sealed", (source, target)
        os.pwrite(fd, good, one)
    reader.verify()
    reader.close()


def test_refuses_when_an_item_of_another_file_of_the_same_key_is_put_in(fd: int) -> None:
    """Same key, run, step, name and offset: the salt and the header still tell the two files apart."""
    write(fd, b"one")
    other = os.memfd_create("other")
    write(other, b"two")
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    reader.verify()
    start = reader.items[0].start
    os.pwrite(fd, os.pread(other, 3 + sealed.TAG, start), start)
    assert outcome(reader.verify) == "untrusted.sealed"
    reader.close()
    os.close(other)


def test_authenticates_the_last_chunk_of_the_index_first(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = sealed.Writer(fd, KEY, b"w", RUN, STEP, C)
    for n in range(1500):
        writer.add("name" * 10, (n,), b"")
    writer.finish()
    seen: list[int] = []
    real = chunks.Chunks.open

    def spy(self: chunks.Chunks, number: int, data: memoryview, out: memoryview) -> None:
        seen.append(number)
        real(self, number, data, out)

    monkeypatch.setattr(chunks.Chunks, "open", spy)
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    assert seen[0] == len(seen) - 1 > 0
    assert len(reader.items) == 1500
    reader.close()


def test_refuses_when_the_range_or_the_item_is_not_there(fd: int) -> None:
    write(fd, b"12345")
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    assert reader.read(0) == b"12345"
    for n in (1, -1, True):
        with pytest.raises(NotFound):
            reader.read(n)
    target = bytearray(b"zzz")
    for start in (3, -1, 2**60):
        assert outcome(lambda start=start: reader.read_into(0, target, start)) == "malformed.range"
    assert target == b"zzz"
    assert outcome(lambda: reader.read_into(0, bytes(5))) == "malformed.item"
    reader.read_into(0, target, 2)
    assert target == b"345"
    reader.close()


def test_refuses_when_it_is_no_regular_file(fd: int) -> None:
    write(fd, b"12345")
    assert outcome(lambda: sealed.Reader(fd, KEY, RUN, STEP).close()) == "ok"
    for path in ("/dev/zero", "/"):
        other = os.open(path, os.O_RDONLY)
        assert outcome(lambda other=other: sealed.Reader(other, KEY, RUN, STEP)) == "malformed.sealed"
        os.close(other)


def test_sizes_are_checked_before_anything_is_allocated(fd: int) -> None:
    """An index of 3 MiB that the file does not hold is refused by arithmetic."""
    size = write(fd, b"x")
    start = int.from_bytes(os.pread(fd, 8, size - 24), "big")
    assert outcome(lambda: sealed.Reader(fd, KEY, RUN, STEP).close()) == "ok"
    for claimed in (3 << 20, sealed.MAX_INDEX + 1, 2**63):
        os.pwrite(fd, chunks.FOOTER.pack(start, claimed, chunks.END), size - 24)
        assert outcome(lambda: sealed.Reader(fd, KEY, RUN, STEP)) == "malformed.sealed"


def test_refuses_when_the_index_is_larger_than_any_writer_makes_it(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its size alone: the index is broken as well, and nobody gets as far as that."""
    size = write(fd, b"x")
    sealed.Reader(fd, KEY, RUN, STEP).close()
    spoil(fd, size - 25)
    assert outcome(lambda: sealed.Reader(fd, KEY, RUN, STEP)) == "untrusted.sealed"
    monkeypatch.setattr(sealed, "MAX_INDEX", 20)
    assert outcome(lambda: sealed.Reader(fd, KEY, RUN, STEP)) == "malformed.sealed"


def test_a_chunk_whose_tag_failed_leaves_zeros() -> None:
    """The cipher library writes the bytes before it has looked at the tag."""
    header = chunks.Header(C, bytes(7), bytes(32), b"w")
    piece = chunks.Chunks(KEY, header, chunks.item_context(RUN, STEP, "w", ()), 5)
    out, raw = memoryview(bytearray(5)), bytearray(5 + sealed.TAG)
    piece.seal(0, memoryview(b"plain"), memoryview(raw))
    piece.open(0, memoryview(raw), out)
    assert out == b"plain"
    raw[-1] ^= 1
    with pytest.raises(Untrusted):
        piece.open(0, memoryview(raw), out)
    assert out == bytes(5)


def test_refuses_when_the_counter_would_overflow() -> None:
    assert chunks.chunk_count(2**32 * C, C) == 2**32
    assert chunks.chunk_count(0, C) == 1
    for size in (2**32 * C + 1, -1):
        with pytest.raises(Malformed):
            chunks.chunk_count(size, C)


@pytest.mark.parametrize("mapped", [True, False])
def test_prove_checks_every_chunk_and_returns_the_digest_of_the_file(
    mapped: bool, fd: int, monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not mapped:
        monkeypatch.setattr(mmap, "mmap", _no_map)
    size = write(fd, DATA, b"", DATA * 9)
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    assert reader.prove() == digest_bytes(os.pread(fd, size, 0))
    spoil(fd, reader.items[2].start - 1)  # the tag of the empty item
    with pytest.raises(Untrusted):
        reader.prove()
    reader.close()


# ---- refusals of a writer --------------------------------------------------------------------------

def test_refuses_when_a_name_and_offset_occur_twice(fd: int) -> None:
    writer = sealed.Writer(fd, KEY, b"w", RUN, STEP, C)
    writer.add("w", (0,), b"a")
    with pytest.raises(Conflict) as caught:
        writer.add("w", (0,), b"b")
    assert caught.value.code == "conflict.item"
    writer.add("w", (1,), b"b")
    writer.add("w", (), b"c")
    writer.finish()
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    assert [i.offset for i in reader.items] == [(0,), (1,), ()]
    reader.close()


@pytest.mark.parametrize(("name", "offset", "data"), [
    ("", (), b""), ("x" * 513, (), b""), (b"x", (), b""), ("\ud800", (), b""), ("x", [0], b""), ("x", (-1,), b""),
    ("x", (True,), b""), ("x", (2**53,), b""), ("x", (0,) * 17, b""), ("x", (), "text"), ("x", (), 5),
    ("x", (), memoryview(b"abcd")[::2]),
])
def test_refuses_when_an_item_cannot_be_named_or_read(name: Any, offset: Any, data: Any, fd: int) -> None:
    writer = sealed.Writer(fd, KEY, b"w", RUN, STEP, C)
    with pytest.raises(Malformed):
        writer.add(name, offset, data)
    assert writer.add("x", (), b"good") == 0  # nothing was written, so the writer goes on
    writer.finish()


def test_refuses_when_the_file_is_not_empty(fd: int) -> None:
    write(fd, b"x")
    assert outcome(lambda: write(fd, b"x")) == "conflict.file"
    os.ftruncate(fd, 0)
    assert write(fd, b"x")


@pytest.mark.parametrize("data", [b"x", DATA])  # DATA has several chunks: they are written by another thread
def test_refuses_to_go_on_when_a_write_failed_or_the_file_is_finished(
    data: bytes, fd: int, monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = sealed.Writer(fd, KEY, b"w", RUN, STEP, C)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", _disk_full)
        with pytest.raises(OSError, match="full"):
            writer.add("w", (), data)
    for work in (lambda: writer.add("w", (1,), b"x"), writer.finish):
        assert outcome(work) == "conflict.file"
    os.ftruncate(fd, 0)
    writer = sealed.Writer(fd, KEY, b"w", RUN, STEP, C)
    writer.add("w", (), b"x")
    writer.finish()
    for work in (lambda: writer.add("w", (1,), b"x"), writer.finish):
        assert outcome(work) == "conflict.file"


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_refuses_when_one_chunk_of_a_large_item_was_not_written(
    failing: int, fd: int, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failure of each chunk, the last one too, is raised by the `add` that wrote it."""
    writer = sealed.Writer(fd, KEY, b"w", RUN, STEP, C)
    real, calls = os.pwrite, iter(range(9))

    def write_but_one(f: int, data: memoryview, at: int) -> int:
        return _disk_full() if next(calls) == failing else real(f, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write_but_one)
        with pytest.raises(OSError, match="full"):
            writer.add("w", (), DATA)
    assert outcome(writer.finish) == "conflict.file"


def _disk_full(*_: object) -> int:
    raise OSError(28, "disk is full")


def test_a_finished_file_was_flushed_to_the_disk(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fsync", lambda f: flushed.append((f, os.fstat(f).st_size)))
    size = write(fd, b"x")
    assert flushed == [(fd, size)]


def test_a_flush_can_be_left_to_whoever_commits(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    writer = sealed.Writer(fd, KEY, b"w", RUN, STEP, C)
    writer.finish(sync=False)
    assert flushed == []


def test_one_thread_writes_the_same_as_two(fd: int) -> None:
    writer = sealed.Writer(fd, KEY, b"w", RUN, STEP, C, beside=False)
    writer.add("w", (), bytes(range(256)) * 1024)
    writer.finish()
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    assert reader.read(0) == bytes(range(256)) * 1024
    reader.close()


def test_short_writes_are_carried_on(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda f, data, at: real(f, data[: max(1, len(data) // 2)], at))
    write(fd, DATA)
    monkeypatch.undo()
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    assert reader.read(0) == DATA
    reader.close()


def test_refuses_when_key_owner_or_chunk_are_off(fd: int) -> None:
    good: dict[str, Any] = {"key": KEY, "wrapped": b"w", "run": RUN, "step": STEP, "chunk": C}
    for changed in ({"key": b"k" * 16}, {"key": bytearray(32)}, {"wrapped": b""}, {"wrapped": bytes(513)}, {"run": ""},
                    {"step": -1}, {"step": True}, {"chunk": C * 2}, {"chunk": 0}):
        with pytest.raises(Malformed):
            sealed.Writer(fd, **{**good, **changed})
    sealed.Writer(fd, **good).finish()


def test_refuses_when_the_index_would_be_too_large(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "MAX_INDEX", 200)
    writer = sealed.Writer(fd, KEY, b"w", RUN, STEP, C)
    writer.add("x" * 60, (0,), b"")
    with pytest.raises(Malformed, match="too many items"):
        writer.add("x" * 60, (1,), b"")
    writer.finish()
    sealed.Reader(fd, KEY, RUN, STEP).close()


def test_no_caller_can_name_a_nonce(fd: int) -> None:
    for work in (sealed.Writer, sealed.Writer.add, sealed.Reader, sealed.wrap_file_key):
        assert not {"nonce", "iv", "salt", "prefix"} & set(inspect.signature(work).parameters)
    with pytest.raises(TypeError):
        sealed.Writer(fd, KEY, b"w", RUN, STEP, C, nonce=bytes(12))  # type: ignore[call-arg]


def test_each_file_has_its_own_randomness_and_each_item_its_own_key(fd: int) -> None:
    """The same bytes under the same key never give the same ciphertext."""
    write(fd, bytes(100), bytes(100))
    other = os.memfd_create("other")
    write(other, bytes(100), bytes(100))
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    pieces = [os.pread(f, 100, i.start) for f in (fd, other) for i in reader.items]
    assert len(set(pieces)) == 4
    assert os.pread(fd, 39, 14) != os.pread(other, 39, 14)
    wraps = {sealed.wrap_file_key(KEY, KEY, RUN, STEP, "a.sealed") for _ in range(4)}
    assert len(wraps) == 4
    reader.close()
    os.close(other)


def test_errors_carry_no_key_and_no_plaintext(fd: int) -> None:
    write(fd, b"the weights")
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    spoil(fd, reader.items[0].start)
    with pytest.raises(Untrusted) as caught:
        reader.read(0)
    told = str(caught.value.as_json()) + repr(caught.value)
    assert KEY.hex() not in told
    assert "weights" not in told
    assert dataclasses.is_dataclass(sealed.Item)
    reader.close()


def test_a_proof_ends_at_the_first_chunk_that_is_off(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest can make a file of any length that costs it nothing; what it costs us is a few chunks."""
    write(fd, DATA)
    reader = sealed.Reader(fd, KEY, RUN, STEP)
    assert reader.prove() == digest_bytes(os.pread(fd, 1 << 30, 0))  # control
    real, asked, begun = reader._source.at, [], threading.Event()

    @contextmanager
    def at(offset: int, size: int, *, keep: bool = False) -> Iterator[memoryview]:
        if not keep:  # the digest: slow, and of a file that has no end
            asked.append(offset)
            begun.set()
            time.sleep(0.001)
            offset = size = 0
        with real(offset, size, keep=keep) as piece:
            yield piece

    def broken(*_: object, **__: object) -> None:
        begun.wait(5)
        raise Untrusted("off", code="sealed")

    monkeypatch.setattr(reader._source, "at", at)
    monkeypatch.setattr(reader._source, "size", 3000 << 20)
    monkeypatch.setattr(reader, "_verify", broken)
    with pytest.raises(Untrusted):
        reader.prove()
    assert len(asked) < 1000
    reader.close()
