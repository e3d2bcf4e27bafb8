"""The tree as it lies in the tables: its size, its nodes, and whether an event is in it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from sqlalchemy import Connection, func, select
from sqlalchemy.exc import InterfaceError, OperationalError

from audit.merkle import Nodes
from audit.tables import LedgerTables
from interlock.errors import Conflict, Unavailable


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

    def nodes(self, connection: Connection) -> Nodes:
        """Return a reader of complete subtrees; raises Conflict (``conflict.fork``) where one is missing."""

        @lru_cache(maxsize=1 << 16)
        def stored(level: int, position: int) -> bytes:
            query = select(self._leaves.c.leaf_hash).where(self._leaves.c.log_index == position)
            if level:
                nodes = self._nodes
                query = select(nodes.c.hash).where(nodes.c.level == level, nodes.c.position == position)
            found = connection.execute(query).scalar_one_or_none()
            if found is None:
                raise Conflict("a node of the tree is missing in the database", code="fork",
                               next_step="restore the newest database")
            return bytes(found)

        return stored
