"""Sealed files: items of any bytes, encrypted and authenticated in chunks. Format: docs/formats/sealed.md.

A file key serves one file. Each item has its own key, derived from the file key and from what the item is (run,
step, name, offset), so that a chunk fits one place of one file of one run and no other. Nobody gets bytes of a
chunk whose tag failed.
"""

import hashlib
import mmap
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from interlock.canon import canonical, parse
from interlock.chunks import (
    CHUNKS,
    END,
    FOOTER,
    KEY_BYTES,
    MAX_WRAPPED,
    TAG,
    Chunks,
    Header,
    bytes_of,
    check_names,
    check_owner,
    chunk_count,
    index_context,
    item_context,
    not_sealed,
    read_exactly,
    read_header,
    zero,
)
from interlock.errors import Conflict, Malformed, NotFound, Untrusted

__all__ = [
    "CHUNKS", "KEY_BYTES", "MAX_WRAPPED", "TAG", "Item", "Reader", "Writer", "unwrap_file_key", "wrap_file_key",
    "wrapped_of",
]

MAX_INDEX: Final = 4 << 20
_NONCE = 12


@dataclass(frozen=True)
class Item:
    """One item of a file: `offset` tells parts of one name apart, `start` is its first byte in the file, `size`
    its bytes in the clear."""

    name: str
    offset: tuple[int, ...]
    start: int
    size: int


class Writer:
    """Writes one sealed file into an empty file, item by item. One thread at a time.

    Args: `fd` open for writing, the file empty; `key` the 32-byte file key, used for this file only; `wrapped`
    the same key as it is wrapped, 1 to 512 bytes; `run` and `step` whose file it is; `chunk` one of CHUNKS, in
    bytes; `beside` write in a second thread while the first one seals, where there is a core for it. A failure in
    `add` makes the file useless: the writer refuses to go on (Conflict). Raises Malformed, Conflict when the file
    is not empty, OSError.
    """

    def __init__(
        self, fd: int, key: bytes, wrapped: bytes, run: str, step: int, chunk: int = 4 << 20, *, beside: bool = True,
    ) -> None:
        check_owner(key, run, step)
        if chunk not in CHUNKS or not 1 <= len(wrapped) <= MAX_WRAPPED:
            raise Malformed(f"a chunk is one of {CHUNKS} bytes, a wrapped key at most {MAX_WRAPPED}", code="sealed")
        if os.fstat(fd).st_size:
            raise Conflict("a sealed file is never written over another", code="file", next_step="write a new file")
        self._fd, self._key, self._run, self._step = fd, key, run, step
        self._header = Header(chunk, os.urandom(7), os.urandom(32), bytes(wrapped))
        self._buffers = (memoryview(bytearray(chunk + TAG)), memoryview(bytearray(chunk + TAG)))
        self._rows: list[dict[str, object]] = []
        self._known: set[tuple[str, tuple[int, ...]]] = set()
        self._index_size = len(canonical({"items": []}))
        self._end, self._beside = 0, beside
        self._open = True
        self._put(memoryview(self._header.raw()))

    def _put(self, data: memoryview) -> None:
        while data:
            wrote = os.pwrite(self._fd, data, self._end)
            self._end += wrote
            data = data[wrote:]

    def _must_be_open(self) -> None:
        if not self._open:
            raise Conflict(
                "this sealed file is finished, or a write of it failed", code="file", next_step="write a new file",
            )

    def _seal(self, chunks: Chunks, plain: memoryview) -> None:
        """Seal and write one item. Of two buffers one is written while the other is filled; all is written, or its
        failure raised, when this returns."""
        if chunks.count == 1 or not self._beside:
            for number in range(chunks.count):
                self._put(self._sealed(chunks, number, plain, self._buffers[0]))
            return
        with ThreadPoolExecutor(1) as writing:
            last: Future[None] | None = None
            for number in range(chunks.count):
                out = self._sealed(chunks, number, plain, self._buffers[number % 2])
                if last is not None:
                    last.result()
                last = writing.submit(self._put, out)
            if last is not None:
                last.result()

    def _sealed(self, chunks: Chunks, number: int, plain: memoryview, buffer: memoryview) -> memoryview:
        begin, length = chunks.begin(number), chunks.length(number)
        out = buffer[: length + TAG]
        chunks.seal(number, plain[begin : begin + length], out)
        return out

    def add(self, name: str, offset: tuple[int, ...], data: Any) -> int:
        """Seal one item and return its number.

        Args: `name` and `offset` together occur once in a file; `data` any contiguous buffer, also an empty one.
        Raises Malformed, Conflict (the item is there already, the writer is closed), OSError.
        """
        self._must_be_open()
        check_names(name, offset)
        if (name, offset) in self._known:  # the same context twice would be the same key and nonce twice
            raise Conflict("an item with this name and offset is in the file already", code="item")
        with bytes_of(data) as plain:
            row: dict[str, object] = {"name": name, "offset": list(offset), "start": self._end, "size": len(plain)}
            grown = self._index_size + len(canonical(row)) + 1
            if grown > MAX_INDEX:
                raise Malformed("a file has too many items", code="item", next_step="spread them over more files")
            context = item_context(self._run, self._step, name, offset)
            chunks = Chunks(self._key, self._header, context, len(plain))
            self._known.add((name, offset))
            self._open = False  # stays so when a write fails: half an item must not be counted
            self._seal(chunks, plain)
        self._open = True
        self._index_size = grown
        self._rows.append(row)
        return len(self._rows) - 1

    def finish(self, *, sync: bool = True) -> int:
        """Write index and footer, fsync, and return the bytes of the file; raises Conflict, OSError.

        Args: `sync` False leaves the fsync to whoever commits the file.
        """
        self._must_be_open()
        self._open = False
        index = canonical({"items": self._rows})
        footer = FOOTER.pack(self._end, len(index), END)
        context = index_context(self._run, self._step)
        self._seal(Chunks(self._key, self._header, context, len(index), footer), memoryview(index))
        self._put(memoryview(footer))
        if sync:
            os.fsync(self._fd)
        return self._end


class _Source:
    """The bytes of a regular file: mapped, or read piece by piece where it cannot be mapped."""

    def __init__(self, fd: int) -> None:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise not_sealed("it is no regular file")
        self.size = found.st_size
        self._fd = fd
        self._map: mmap.mmap | None = None
        if self.size:
            with suppress(OSError, ValueError):  # no address space, a file system without maps, a file that shrank
                self._map = mmap.mmap(fd, self.size, prot=mmap.PROT_READ)

    @contextmanager
    def at(self, offset: int, size: int, *, keep: bool = False) -> Iterator[memoryview]:
        """Give `size` bytes from `offset`; with `keep` somebody else is about to read them too."""
        if self._map is None:
            yield memoryview(read_exactly(self._fd, size, offset))
            return
        with memoryview(self._map) as whole, whole[offset : offset + size] as piece:
            yield piece
        if size >= CHUNKS[0] and not keep:  # what was read once is not kept in this process's memory
            first = offset - offset % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, offset + size - first)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()


class Reader:
    """Reads one sealed file; opening it authenticates the index, reading authenticates each chunk.

    Args: `fd` open for reading, owned by the caller, a regular file that nobody writes any more; `key` the file
    key; `run` and `step` whose file it must be. Threads may read different items at the same time. Raises
    Malformed (`malformed.sealed`, `malformed.sealed_version`), Untrusted (`untrusted.sealed`), OSError.
    """

    def __init__(self, fd: int, key: bytes, run: str, step: int) -> None:
        check_owner(key, run, step)
        self._key, self._run, self._step = key, run, step
        self._source = _Source(fd)
        try:
            self._header = read_header(fd)
            self.items: tuple[Item, ...] = self._read_index()
        except BaseException:
            self._source.close()
            raise

    def _read_index(self) -> tuple[Item, ...]:
        """Authenticate the index, its last chunk first, and return the items that fill the file exactly."""
        head, end = len(self._header.raw()), self._source.size - FOOTER.size
        if end < head:
            raise not_sealed("it is too short")
        with self._source.at(end, FOOTER.size) as raw:
            footer = bytes(raw)
        start, size, magic = FOOTER.unpack(footer)
        if magic != END or not head <= start <= end or size > MAX_INDEX:
            raise not_sealed("it does not end like one")
        if start + size + TAG * chunk_count(size, self._header.chunk) != end:
            raise not_sealed("its index is not as long as its end says")
        chunks = Chunks(self._key, self._header, index_context(self._run, self._step), size, footer)
        plain = bytearray(size)
        with memoryview(plain) as view:
            for number in (chunks.count - 1, *range(chunks.count - 1)):
                begin, length = chunks.begin(number), chunks.length(number)
                self._open_chunk(chunks, number, start, view[begin : begin + length])
        return _items(bytes(plain), self._header.chunk, head, start)

    def _open_chunk(self, chunks: Chunks, number: int, start: int, out: memoryview, *, keep: bool = False) -> None:
        """Decrypt chunk `number` of the item that starts at `start` into `out`, which has its length."""
        at = start + number * (self._header.chunk + TAG)
        with self._source.at(at, len(out) + TAG, keep=keep) as sealed:
            chunks.open(number, sealed, out)

    def _item(self, n: int) -> tuple[Item, Chunks]:
        if type(n) is not int or not 0 <= n < len(self.items):
            raise NotFound(f"the file has {len(self.items)} items, counted from 0", code="item")
        item = self.items[n]
        context = item_context(self._run, self._step, item.name, item.offset)
        return item, Chunks(self._key, self._header, context, item.size)

    def read(self, n: int) -> bytearray:
        """Return the bytes of item `n`; raises Untrusted, NotFound."""
        item, _ = self._item(n)
        out = bytearray(item.size)
        self.read_into(n, out)
        return out

    def read_into(self, n: int, target: Any, start: int = 0) -> None:
        """Fill `target` with the bytes of item `n` from byte `start` on.

        Args: `target` a contiguous writable buffer; `start` in bytes. Only chunks that it covers are read. When
        anything fails, all of `target` is zero. Raises Untrusted, NotFound, Malformed, OSError.
        """
        item, chunks = self._item(n)
        with bytes_of(target, writable=True) as out:
            if type(start) is not int or not 0 <= start <= item.size - len(out):
                raise Malformed("the range reaches past the item", code="range")
            try:
                self._fill(item, chunks, out, start)
            except BaseException:
                if out:
                    zero(out)
                raise

    def _fill(self, item: Item, chunks: Chunks, out: memoryview, start: int) -> None:
        spare: memoryview | None = None
        stop = start + len(out)
        first = min(start // self._header.chunk, chunks.count - 1)
        last = min(max(first, (stop - 1) // self._header.chunk), chunks.count - 1)
        for number in range(first, last + 1):
            begin, length = chunks.begin(number), chunks.length(number)
            low, high = max(start, begin), min(stop, begin + length)
            if (low, high) == (begin, begin + length):
                self._open_chunk(chunks, number, item.start, out[low - start : high - start])
                continue
            spare = spare or memoryview(bytearray(self._header.chunk))
            self._open_chunk(chunks, number, item.start, spare[:length])
            out[low - start : high - start] = spare[low - begin : high - begin]

    def verify(self) -> None:
        """Authenticate every chunk of every item; raises Untrusted, OSError."""
        self._verify(keep=False)

    def _verify(self, *, keep: bool) -> None:
        spare = memoryview(bytearray(self._header.chunk))
        for n in range(len(self.items)):
            item, chunks = self._item(n)
            for number in range(chunks.count):
                self._open_chunk(chunks, number, item.start, spare[: chunks.length(number)], keep=keep)

    def prove(self) -> str:
        """Authenticate every chunk and return ``sha256:<hex>`` of the whole file, both at the same time. The first
        chunk that is off ends both: what follows it is somebody's to make as long as he likes.

        Raises Untrusted, Malformed when the file shrank, OSError.
        """
        given_up = threading.Event()
        if self._source.size < CHUNKS[1]:  # a thread would cost more than it saves
            self._verify(keep=True)
            return self._digest(given_up)
        with ThreadPoolExecutor(1) as hashing:
            digest = hashing.submit(self._digest, given_up)
            try:
                self._verify(keep=True)
            except BaseException:
                given_up.set()
                raise
            return digest.result()

    def _digest(self, given_up: threading.Event) -> str:
        found = hashlib.sha256()
        for at in range(0, self._source.size, CHUNKS[1]):
            if given_up.is_set():
                break
            with self._source.at(at, min(CHUNKS[1], self._source.size - at)) as piece:
                found.update(piece)
        return "sha256:" + found.hexdigest()

    def close(self) -> None:
        """Give the map back; the descriptor stays the caller's."""
        self._source.close()


def _items(index: bytes, chunk: int, head: int, end: int) -> tuple[Item, ...]:
    """Parse an authenticated index: its items lie back to back from `head` to `end`, each once."""
    try:
        value = parse(index, limit=MAX_INDEX)
        rows = value["items"]
        found = tuple(Item(r["name"], tuple(r["offset"]), r["start"], r["size"]) for r in rows)
        exact = set(value) == {"items"} and all(set(r) == {"name", "offset", "start", "size"} for r in rows)
    except (Malformed, KeyError, TypeError):
        raise not_sealed("its index cannot be read") from None
    at = head
    for item in found:
        check_names(item.name, item.offset)
        if type(item.size) is not int or item.size < 0 or item.start != at:
            raise not_sealed("its items do not lie back to back")
        at += item.size + TAG * chunk_count(item.size, chunk)
    if at != end or not exact or len({(i.name, i.offset) for i in found}) != len(found):
        raise not_sealed("its items do not fill it exactly, each once")
    return found


def wrapped_of(fd: int) -> bytes:
    """Return the wrapped file key that the header carries, before any key is known; raises Malformed, OSError."""
    return read_header(fd).wrapped


def _file_context(run: str, step: int, name: str) -> bytes:
    return canonical({"run": run, "step": step, "file": name})


def wrap_file_key(run_key: bytes, file_key: bytes, run: str, step: int, name: str) -> bytes:
    """Wrap `file_key` under `run_key` for the file `name` of one step of `run`; raises Malformed."""
    check_owner(run_key, run, step)
    check_owner(file_key, run, step)
    nonce = os.urandom(_NONCE)
    return nonce + AESGCM(run_key).encrypt(nonce, file_key, _file_context(run, step, name))


def unwrap_file_key(run_key: bytes, wrapped: bytes, run: str, step: int, name: str) -> bytes:
    """Open `wrap_file_key`; raises Untrusted (`untrusted.file_key`) for another key, run, step or file."""
    check_owner(run_key, run, step)
    try:
        key = AESGCM(run_key).decrypt(wrapped[:_NONCE], wrapped[_NONCE:], _file_context(run, step, name))
    except (InvalidTag, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise Untrusted("a wrapped file key does not open for this run, step and file", code="file_key")
    return key
