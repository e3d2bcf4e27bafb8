"""The tree as it lies in the tables: its size, its nodes, and whether an event is in it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, func, select, tuple_
from sqlalchemy.exc import InterfaceError, OperationalError

from audit.merkle import Nodes
from audit.tables import LedgerTables
from interlock.errors import Conflict, Unavailable

_CHUNK = 500


def now_us() -> int:
    """Return microseconds since the epoch, for people; no order and no deadline comes from it."""
    return time.time_ns() // 1000


@contextmanager
def answering() -> Iterator[None]:
    """Turn a database that is away into ``unavailable.database``."""
    try:
        yield
    except (OperationalError, InterfaceError):
        raise Unavailable("the ledger's database does not answer", code="database",
                          next_step="see the disk and the database server") from None


class StoredTree:
    """Reads the tree in the caller's transaction."""

    def __init__(self, tables: LedgerTables) -> None:
        self._leaves, self._nodes = tables.leaves, tables.nodes

    def size(self, connection: Connection) -> int:
        """Return the number of leaves."""
        last = connection.execute(select(func.max(self._leaves.c.log_index))).scalar_one()
        return 0 if last is None else int(last) + 1

    def present(self, connection: Connection, ids: list[str]) -> set[str]:
        """Return those of the event `ids` that are leaves."""
        query = select(self._leaves.c.event_id).where(self._leaves.c.event_id.in_(ids))
        return {str(i) for i in connection.execute(query).scalars()}

    def gather(self, connection: Connection, *asks: Callable[[Nodes], object]) -> Nodes:
        """Return a reader of the nodes that `asks` (functions of merkle, bound but for the reader) will want.

        They run once on blanks to learn which, then all are read in few statements. The reader raises
        Conflict (``conflict.fork``) where the database lacks one.
        """
        wanted: dict[tuple[int, int], None] = {}

        def note(level: int, position: int) -> bytes:
            wanted[level, position] = None
            return bytes(32)

        for ask in asks:
            ask(note)
        found = self._read(connection, list(wanted))

        def stored(level: int, position: int) -> bytes:
            try:
                return found[level, position]
            except KeyError:
                raise Conflict("a node of the tree is missing in the database", code="fork",
                               next_step="restore the newest database") from None

        return stored

    def _read(self, connection: Connection, wanted: list[tuple[int, int]]) -> dict[tuple[int, int], bytes]:
        leaves, nodes = self._leaves, self._nodes
        found: dict[tuple[int, int], bytes] = {}
        for at in range(0, len(wanted), _CHUNK):
            part = wanted[at : at + _CHUNK]
            low = [position for level, position in part if not level]
            high = [(level, position) for level, position in part if level]
            if low:
                query = select(leaves.c.log_index, leaves.c.leaf_hash).where(leaves.c.log_index.in_(low))
                found.update(((0, int(i)), bytes(h)) for i, h in connection.execute(query))
            if high:
                key = tuple_(nodes.c.level, nodes.c.position)
                rows = connection.execute(select(nodes.c.level, nodes.c.position, nodes.c.hash).where(key.in_(high)))
                found.update(((int(k), int(p)), bytes(h)) for k, p, h in rows)
        return found
