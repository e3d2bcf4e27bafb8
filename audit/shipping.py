"""What of a spool folder is still to be sent, and taking away what has arrived.

The shipper may be root while the folder belongs to a lesser user: everything goes through directory
descriptors, links are never followed, sizes are bounded. Reading needs no lock: a frame that is still
being written ends the reading, nothing more.
"""

import os
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from audit import segment
from interlock.errors import Conflict, NotRecorded

BATCH_RECORDS = 500
BATCH_BYTES = 1 << 20
_ACKED = re.compile(r"^acked\.(\d{1,16})$")


@dataclass(frozen=True)
class Shipment:
    """Records of one stream in order; `first` is the seq of the first."""

    stream: str
    first: int
    bodies: tuple[bytes, ...]

    @property
    def records(self) -> list[tuple[int, bytes]]:
        """Return (seq, leaf bytes) pairs, what Ledger.intake takes."""
        return [(self.first + i, body) for i, body in enumerate(self.bodies)]


def unshipped(folder: Path) -> list[Shipment]:
    """Return at most one shipment a stream, oldest stream first (500 records, about 1 MiB each).

    Raises NotRecorded (``not_recorded.spool_corrupt``) when a segment cannot be read back.
    """
    found = []
    for each in segment.streams(folder):
        try:
            with segment.opened(folder, each.stream) as fd:
                shipment = _next(fd, each.stream)
        except FileNotFoundError:
            continue  # its writer removed it just now, or it holds nothing
        except OSError as error:
            raise segment.corrupt(f"{each.stream}: {error.strerror}") from None
        if shipment is not None:
            found.append(shipment)
    return found


def _next(fd: int, stream: str) -> Shipment | None:
    acked = _acked(fd)
    bodies: list[bytes] = []
    size = 0
    for first in _from(segment.segments(fd), acked):
        found = segment.read(fd, first)
        if first > acked + len(bodies):
            raise segment.corrupt(f"{stream} has no record {acked + len(bodies)}")
        for body in found.bodies[acked + len(bodies) - first :]:
            if len(bodies) == BATCH_RECORDS or size + len(body) > BATCH_BYTES:
                return Shipment(stream, acked, tuple(bodies))
            bodies.append(body)
            size += len(body)
    return Shipment(stream, acked, tuple(bodies)) if bodies else None


def _from(starts: list[int], seq: int) -> list[int]:
    """Return the segments from the one that holds `seq` on."""
    older = [s for s in starts if s <= seq]
    return older[-1:] + [s for s in starts if s > seq]


def _acked(fd: int) -> int:
    """Return the number in the name ``acked.N``: renaming works on a full disk, where writing does not."""
    numbers = [int(m[1]) for name in os.listdir(fd) if (m := _ACKED.match(name))]
    return max(numbers, default=0)


def ack(folder: Path, stream: str, next_seq: int) -> None:
    """Note that the ledger has everything below `next_seq` of `stream`, and remove what that frees.

    The newest segment stays while its writer may live; a stream goes when all of it has arrived and a newer
    one of the same writer exists. Raises Conflict (``conflict.ack``) when the ledger claims records that are
    not here, NotRecorded when the folder cannot be read.
    """
    try:
        with segment.opened(folder, stream) as fd:
            last, end, _ = segment.tip(fd)
            if next_seq > end:
                raise Conflict(f"the ledger acknowledged {next_seq} records of {stream}, here are {end}", code="ack",
                               next_step="find out who else writes under this node's name")
            acked = _acked(fd)
            if next_seq > acked:
                os.rename(f"acked.{acked}", f"acked.{next_seq}", src_dir_fd=fd, dst_dir_fd=fd)
                os.fsync(fd)
            for first, after in _pairs(segment.segments(fd)):
                if after <= next_seq:
                    segment.drop(fd, segment.file_name(first))
        if last is not None and next_seq == end and _superseded(folder, stream):
            _remove(folder, stream)
    except OSError as error:
        raise NotRecorded(f"the spool folder cannot be used: {error.strerror}", code="failed",
                          next_step="check the disk and the owner of the spool") from None


def _pairs(starts: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(starts))


def _superseded(folder: Path, stream: str) -> bool:
    """Return whether a newer stream of the same writer has its first record: then this one's is dead."""
    known = segment.streams(folder)
    mine = next((s for s in known if s.stream == stream), None)
    newer = [s.stream for s in known if mine is not None and s.name == mine.name and s.number > mine.number]
    for each in newer:
        with segment.opened(folder, each) as fd:
            if segment.tip(fd)[1] > 0:
                return True
    return False


def _remove(folder: Path, stream: str) -> None:
    parent = segment.open_folder(str(folder))
    try:
        with segment.opened(folder, stream) as fd:
            for name in os.listdir(fd):
                segment.drop(fd, name)
        os.rmdir(stream, dir_fd=parent)
    finally:
        os.close(parent)


def marks(folder: Path) -> list[tuple[str, int, str]]:
    """Return (stream, highest seq, its digest) of every stream in `folder` that holds a record.

    For the folders of other writers; a writer's own Spool.mark() says what is durable. Raises NotRecorded.
    """
    found = []
    for each in segment.streams(folder):
        try:
            with segment.opened(folder, each.stream) as fd:
                last, seq, digest = segment.tip(fd)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise segment.corrupt(f"{each.stream}: {error.strerror}") from None
        if last is not None and seq:
            found.append((each.stream, seq - 1, digest))
    return found
