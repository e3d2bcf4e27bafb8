"""The spool: durable append on one host, one stream a writing process. No network, no database.

Promises
  1. record() returns only after the record's bytes were fsynced in a file that still has our name.
  2. Each record carries the digest of the one before; seq counts from 0 without a gap. The first record
     (stream.opened) names the stream before, the last (stream.closed) closes this one.
  3. Group commit without a timer: the batch is whoever waits when the last fsync returns.
  4. After one failed write or fsync nothing is ever reported as recorded again by this object.
  5. A full disk refuses before anything is written; the stream goes on when there is space again. Space is
     allocated ahead and RESERVE of it is kept, so that the closing record still fits.
`_state` guards seq, prev and the open batch; `_io` guards the file and is held by one leader at a time.
"""

import errno
import fcntl
import os
import secrets
import threading
from pathlib import Path
from typing import Any

from audit import segment
from audit.leaf import CONTROL, GENESIS, chain, check_name, encode
from audit.shipping import Shipment, ack, marks, unshipped
from interlock.errors import Conflict, Malformed, NotRecorded, Refusal
from interlock.event import Event, EventType, Written

__all__ = ["Shipment", "Spool", "ack", "marks", "unshipped"]
CHUNK = 1 << 20
RESERVE = 64 << 10
_FULL = (errno.ENOSPC, errno.EDQUOT)
_RESTART = "repair the disk and restart this program; it opens a new stream"


class _Batch:
    """Records that share one fsync; refused until it is shown that they are durable."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.tip: tuple[int, str] = (0, "")
        self.done = threading.Event()
        self.error: Refusal | None = NotRecorded("the write was interrupted", code="interrupted")

    @property
    def failed(self) -> bool:
        """Return whether an earlier batch took this one down with it."""
        return self.done.is_set()


class Spool:
    """One stream of this process in `folder`.

    Args: `folder` private folder of the user that writes; `node` the id of this node; `name` the kind of
    writer (``launcher``, ``broker``). A second live writer of the same name is a Conflict
    (``conflict.second_start``). Raises NotRecorded when the folder cannot be used or is damaged.
    """

    def __init__(self, folder: Path, node: str, name: str) -> None:
        self.node = check_name(node, 64)
        if node == CONTROL:
            raise Malformed("no node is named control", code="name")
        self._name, self._path, self._pid = check_name(name, 64), folder, os.getpid()
        self._state, self._io = threading.Lock(), threading.Lock()
        self._open: _Batch | None = None
        self._dead: NotRecorded | None = None
        self._closed = False
        self._seq, self._prev = 0, GENESIS
        self._durable = (0, GENESIS)
        self._fd = self._folder = self._lock = -1
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock_name(folder, name)
            self._begin()
        except BaseException as error:
            self._let_go()
            if isinstance(error, OSError):
                raise _cannot(error) from None
            raise

    def _begin(self) -> None:
        facts, number = _recover(self._path, self._name)
        self.stream = f"{self._name}-{number:08d}-{secrets.token_hex(4)}"
        parent = segment.open_folder(str(self._path))
        try:
            os.mkdir(self.stream, 0o700, dir_fd=parent)
            self._folder = segment.open_folder(self.stream, parent)
            os.close(os.open("acked.0", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._folder))
            os.fsync(parent)
        finally:
            os.close(parent)
        self._allocated = CHUNK
        self._fd = segment.create(self._folder, 0, GENESIS, CHUNK)
        self._first, self._at = 0, segment.HEADER_BYTES
        self.record(Event(EventType.STREAM_OPENED, f"node/{self.node}", facts=facts))
        _cut(self._path, facts)  # only now: the loss is on record

    def _let_go(self) -> None:
        for fd in (self._fd, self._folder, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._folder = self._lock = -1

    def record(self, event: Event) -> Written:
        """Make `event` durable and say where; thread-safe, blocks for one fsync.

        Raises NotRecorded (``.full``, ``.failed``, ``.unlinked``, ``.closed``) or Malformed (a float, an odd
        key, over 64 KiB).
        """
        return self._record(event, last=False)

    def _record(self, event: Event, *, last: bool) -> Written:
        encoded = event.canonical()
        batch, leads, seq = self._join(encoded, last=last)
        if leads:
            self._lead(batch, reserve=0 if last else RESERVE)
        batch.done.wait()
        if batch.error is not None:
            raise type(batch.error)(
                batch.error.message, code=batch.error.code.partition(".")[2], next_step=batch.error.next_step
            )
        return Written(event.id, self.stream, seq)

    def _join(self, encoded: bytes, *, last: bool) -> tuple[_Batch, bool, int]:
        """Put one record into the open batch; the first to come leads it."""
        with self._state:
            self._check_alive()
            seq = self._seq
            body = encode(self.node, self.stream, seq, self._prev, encoded)
            batch, leads = self._open, False
            if batch is None:
                batch, leads = _Batch(), True
                self._open = batch
            batch.frames.append(segment.frame(body))
            self._seq, self._prev = seq + 1, chain(body)
            batch.tip = (self._seq, self._prev)
            self._closed = last
            return batch, leads, seq

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise NotRecorded(self._dead.message, code="failed", next_step=_RESTART)
        if self._closed:
            raise NotRecorded("the stream is closed", code="closed", next_step="open a new spool")
        if os.getpid() != self._pid:
            raise NotRecorded("a forked child may not write its parent's stream", code="forked",
                              next_step="open a spool of its own name in the child")

    def _lead(self, batch: _Batch, *, reserve: int) -> None:
        """Write one batch; everybody who came while the batch before was written is in it."""
        with self._io:
            with self._state:
                if self._open is batch:
                    self._open = None
            if batch.failed:
                return
            try:
                data = b"".join(batch.frames)
                self._make_room(len(data), reserve)
                self._write(data)
            except OSError as error:
                self._fail(batch, _cannot(error), dead=True)
            except NotRecorded as error:
                self._fail(batch, error, dead=error.code != "not_recorded.full")
            except BaseException:
                self._fail(batch, NotRecorded("the write was interrupted", code="interrupted"), dead=True)
                raise
            else:
                self._durable, batch.error = batch.tip, None
            finally:
                batch.done.set()

    def _make_room(self, size: int, reserve: int) -> None:
        """Allocate before writing; a full disk is refused here, with nothing written."""
        try:
            if self._at + size > segment.SEGMENT_BYTES and self._at > segment.HEADER_BYTES:
                self._rotate(size)
            needed = self._at + size + reserve
            if needed > self._allocated:
                self._allocate(needed)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise NotRecorded(
                "the disk under the spool is full", code="full",
                next_step="free space; nothing is permitted until records fit again",
            ) from None

    def _allocate(self, needed: int) -> None:
        chunk = max(self._allocated + CHUNK, needed)
        try:
            os.posix_fallocate(self._fd, self._allocated, chunk - self._allocated)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            os.posix_fallocate(self._fd, self._allocated, needed - self._allocated)
            chunk = needed
        self._allocated = chunk

    def _rotate(self, size: int) -> None:
        seq, prev = self._durable
        room = max(CHUNK, segment.HEADER_BYTES + size + RESERVE)
        fresh = segment.create(self._folder, seq, prev, room)
        os.ftruncate(self._fd, self._at)
        os.close(self._fd)
        self._fd, self._first, self._at, self._allocated = fresh, seq, segment.HEADER_BYTES, room

    def _write(self, data: bytes) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], self._at + done)
        os.fsync(self._fd)
        self._check_ours()
        self._at += len(data)

    def _check_ours(self) -> None:
        """Refuse when the file was deleted or replaced under us: it is durable for nobody."""
        info = os.fstat(self._fd)
        try:
            named = os.stat(self._path / self.stream / segment.file_name(self._first), follow_symlinks=False)
        except OSError:
            named = None
        if info.st_nlink != 1 or named is None or (named.st_ino, named.st_dev) != (info.st_ino, info.st_dev):
            raise NotRecorded(
                "the spool file was deleted or replaced while in use", code="unlinked",
                next_step="find out who did it; restart this program to open a new stream",
            )

    def _fail(self, batch: _Batch, error: NotRecorded, *, dead: bool) -> None:
        """Refuse the batch and whoever chained on to it; go back to what is durable."""
        with self._state:
            if dead:
                self._dead = error
            self._seq, self._prev = self._durable
            self._closed = False
            behind, self._open = self._open, None
        batch.error = error
        if behind is not None:
            behind.error = error
            behind.done.set()

    def mark(self) -> tuple[str, int, str]:
        """Return (stream, highest durable seq, its digest) for a signed mark."""
        seq, digest = self._durable
        return self.stream, seq - 1, digest

    def close(self) -> None:
        """Write the closing record and let go of the stream; a spool that has failed just lets go."""
        if self._fd < 0:
            return
        try:
            if self._dead is None:
                self._record(Event(EventType.STREAM_CLOSED, f"node/{self.node}"), last=True)
                os.ftruncate(self._fd, self._at)
        except OSError as error:
            raise _cannot(error) from None
        finally:
            self._closed = True
            self._let_go()


def _cannot(error: OSError) -> NotRecorded:
    full = error.errno in _FULL
    return NotRecorded(
        f"the spool cannot be written: {error.strerror}", code="full" if full else "failed",
        next_step="free space on the disk of the spool" if full else _RESTART,
    )


def _lock_name(folder: Path, name: str) -> int:
    fd = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise Conflict(
            f"another process writes the stream {name} here", code="second_start",
            next_step="stop the other one first",
        ) from None
    return fd


def _recover(folder: Path, name: str) -> tuple[dict[str, Any], int]:
    """Read the tips of the dead streams of `name`; return the facts of the new one and its number.

    A stream that died before its first record is removed: it holds nothing.
    """
    facts: dict[str, Any] = {}
    number = -1
    for each in segment.streams(folder):
        if each.name != name:
            continue
        number = each.number
        with segment.opened(folder, each.stream) as fd:
            last, seq, digest = segment.tip(fd)
        if last is None or seq == 0:
            _remove_empty(folder / each.stream)
            continue
        facts = {"predecessor": {"stream": each.stream, "next_seq": seq, "hash": digest, "torn_bytes": last.torn}}
    return facts, number + 1


def _cut(folder: Path, facts: dict[str, Any]) -> None:
    """Cut the torn tail of the predecessor."""
    if "predecessor" not in facts:
        return
    with segment.opened(folder, facts["predecessor"]["stream"]) as fd:
        last, _, _ = segment.tip(fd)
        if last is not None:
            segment.truncate(fd, last)


def _remove_empty(path: Path) -> None:
    for entry in path.iterdir():
        entry.unlink()
    path.rmdir()
