"""Segments of a stream on disk: frames, and reading them back after a crash.

    header  "interlock-spool-1 " + first seq (20 digits) + " " + digest of the record before + newline
    frame   u32 BE length | u32 BE CRC-32 of the leaf | leaf bytes
    rest    zeros (space is allocated ahead, so that a full disk is met before anything is written)

Every open goes through a directory descriptor and never follows a link: the folder may belong to a
less trusted user than the reader.
"""

import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from audit.leaf import chain
from interlock.errors import NotRecorded

MAGIC = b"interlock-spool-1 "
HEADER_BYTES = len(MAGIC) + 20 + 1 + 71 + 1
SEGMENT_BYTES = 8 << 20
_FRAME = struct.Struct(">II")
_STREAM = re.compile(r"^(.+)-(\d{8})-([0-9a-f]{8})$")
_FILE = re.compile(r"^(\d{20})\.seg$")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Segment:
    """What one file holds: `end` is the offset after the last whole frame, `torn` the bytes behind it."""

    first: int
    prev: str
    bodies: tuple[bytes, ...]
    end: int
    torn: int


class Named(NamedTuple):
    """A stream folder by the parts of its name; sorted, the older stream of a writer comes first."""

    name: str
    number: int
    stream: str


def streams(folder: Path) -> list[Named]:
    """Return every stream in `folder`; a folder that is not there holds none."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(Named(m[1], int(m[2]), n) for n in names if (m := _STREAM.match(n)))


@contextmanager
def opened(folder: Path, stream: str) -> Iterator[int]:
    """Yield a descriptor of the stream folder, never through a link; raises OSError."""
    fd = open_folder(str(folder / stream))
    try:
        yield fd
    finally:
        os.close(fd)


def corrupt(what: str) -> NotRecorded:
    """Return the refusal for a spool folder that cannot be read back."""
    return NotRecorded(
        f"the spool is damaged: {what}", code="spool_corrupt",
        next_step="move the spool folder aside, keep it as evidence, and start again",
    )


def file_name(first: int) -> str:
    """Return the name of the segment whose first record is `first`."""
    return f"{first:020d}.seg"


def header(first: int, prev: str) -> bytes:
    """Return the header of a segment."""
    return b"%b%020d %b\n" % (MAGIC, first, prev.encode())


def frame(body: bytes) -> bytes:
    """Return one framed leaf."""
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def open_folder(name: str, parent: int | None = None) -> int:
    """Return a descriptor of a folder, never through a link; raises OSError."""
    return os.open(name, _FOLDER, dir_fd=parent)


def segments(folder: int) -> list[int]:
    """Return the first seqs of the segments in the stream folder `folder`, in order."""
    return sorted(int(found[1]) for name in os.listdir(folder) if (found := _FILE.match(name)))


def parse(data: bytes, first: int) -> Segment:
    """Parse the bytes of the segment `first`; a broken end is counted as torn, a broken header refused."""
    head = data[:HEADER_BYTES]
    if len(head) < HEADER_BYTES or not head.startswith(header(first, "")[:-1]):
        raise corrupt(f"segment {first} has no header")
    bodies, at = [], HEADER_BYTES
    while at + _FRAME.size <= len(data):
        length, check = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + length]
        if not length or len(body) != length or zlib.crc32(body) != check:
            break
        bodies.append(body)
        at += _FRAME.size + length
    return Segment(first, head[-72:-1].decode("ascii", "replace"), tuple(bodies), at, len(data[at:].rstrip(b"\0")))


def read(folder: int, first: int) -> Segment:
    """Read the segment `first` of the stream folder `folder`; raises NotRecorded or OSError."""
    fd = os.open(file_name(first), _READ, dir_fd=folder)
    with os.fdopen(fd, "rb") as source:
        if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            raise corrupt(f"segment {first} is no regular file")
        return parse(source.read(SEGMENT_BYTES * 4), first)


def truncate(folder: int, found: Segment) -> None:
    """Cut what lies behind the last whole frame, zeros included, and make that durable; raises OSError."""
    fd = os.open(file_name(found.first), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.ftruncate(fd, found.end)
        os.fsync(fd)
    finally:
        os.close(fd)


def tip(folder: int) -> tuple[Segment | None, int, str]:
    """Return the last segment, the next seq and the digest of the last record of a stream folder.

    Raises NotRecorded or OSError.
    """
    starts = segments(folder)
    if not starts:
        return None, 0, ""
    last = read(folder, starts[-1])
    digest = chain(last.bodies[-1]) if last.bodies else last.prev
    return last, last.first + len(last.bodies), digest


def create(folder: int, first: int, prev: str, allocate: int) -> int:
    """Make the segment `first` with `allocate` bytes of space and return its descriptor.

    File and folder are on disk when this returns. Raises OSError; nothing half-made keeps the name.
    """
    fresh = ".new"
    drop(folder, fresh)
    fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        os.posix_fallocate(fd, 0, allocate)
        os.pwrite(fd, header(first, prev), 0)
        os.fsync(fd)
        os.rename(fresh, file_name(first), src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except OSError:
        os.close(fd)
        drop(folder, fresh)
        raise
    return fd


def drop(folder: int, name: str) -> None:
    """Remove `name` when it is there."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
