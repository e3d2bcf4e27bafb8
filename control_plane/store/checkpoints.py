"""Queries about committed checkpoints: what a node reported, once for each manifest."""

from typing import Any

from sqlalchemy import Connection, Row, insert, select

from control_plane.store.tables import checkpoints


def one(connection: Connection, digest: str) -> Row[Any] | None:
    """Return the checkpoint whose manifest has that digest, or None."""
    return connection.execute(select(checkpoints).where(checkpoints.c.digest == digest)).one_or_none()


def of_run(connection: Connection, run: str) -> list[Row[Any]]:
    """Return the checkpoints of a run, oldest first."""
    rows = select(checkpoints).where(checkpoints.c.run == run).order_by(checkpoints.c.step, checkpoints.c.committed_us)
    return list(connection.execute(rows))


def newest(connection: Connection, run: str) -> Row[Any] | None:
    """Return the checkpoint that a run goes on from: the highest step, of one step the latest attempt; or None."""
    rows = select(checkpoints).where(checkpoints.c.run == run)
    return connection.execute(rows.order_by(checkpoints.c.step.desc(), checkpoints.c.attempt.desc()).limit(1)).first()


def add(connection: Connection, **row: object) -> bool:
    """Keep a checkpoint; the same one twice is one row. Returns whether it was new."""
    if one(connection, str(row["digest"])) is not None:
        return False
    connection.execute(insert(checkpoints).values(**row))
    return True
