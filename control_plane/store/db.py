"""The database: one way to open it, one way to write, one way to read.

Rules: a write transaction holds the only write lock from its first statement (SQLite BEGIN IMMEDIATE,
PostgreSQL an advisory lock), so that a check and the write it guards cannot be split; a commit has reached
the disk when `writing` returns; a database that does not answer is the typed refusal ``unavailable.database``.
Never open a second write transaction inside the first.
"""

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from interlock.errors import Unavailable, Untrusted, Usage

BUSY_TIMEOUT_MS = 5000
_READ = "interlock_read"
_WRITER_LOCK = 0x696E746C  # "intl": one writer at a time on PostgreSQL, as on SQLite
_PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    "PRAGMA foreign_keys=ON",
    f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}",
    "PRAGMA trusted_schema=OFF",
)


def now_us() -> int:
    """Return microseconds since the epoch: for people and for order of display, never a run's deadline."""
    return time.time_ns() // 1000


def _private_file(path: Path) -> None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Unavailable(
            f"cannot open the database file {path}: {error.strerror}", code="database",
            next_step="check the folder and its owner",
        ) from None
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
    finally:
        os.close(fd)
    if mode & 0o077:
        raise Untrusted(f"others can read {path}", code="database_mode", next_step=f"chmod 600 {path}")


def _sqlite(url: URL) -> Engine:
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        raise Usage("the database is a file with an absolute path", code="database")
    _private_file(Path(url.database))
    engine = create_engine(url, pool_size=16, max_overflow=48, pool_timeout=10)

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver's own BEGIN comes too late for IMMEDIATE
        cursor = connection.cursor()
        for pragma in _PRAGMAS:
            cursor.execute(pragma)
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        read = connection.get_execution_options().get(_READ, False)
        connection.exec_driver_sql("BEGIN" if read else "BEGIN IMMEDIATE")

    return engine


def _postgresql(url: URL) -> Engine:
    options = f"-c lock_timeout={BUSY_TIMEOUT_MS} -c statement_timeout=15000 -c synchronous_commit=on"
    return create_engine(
        url.set(drivername="postgresql+psycopg"), pool_size=16, max_overflow=16, pool_timeout=10, pool_pre_ping=True,
        connect_args={"options": options, "connect_timeout": 5},
    )


def open_engine(url: str) -> Engine:
    """Return the engine of ``sqlite:////absolute/path`` or ``postgresql://…``; opens no connection yet.

    A SQLite file is created with mode 0600. Raises Usage (another kind of database), Untrusted (others can
    read the file) or Unavailable (the file cannot be opened). Messages never hold the URL's password.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise Usage("the database URL cannot be read", code="database") from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        return _sqlite(parsed)
    if backend == "postgresql":
        return _postgresql(parsed)
    raise Usage("the database is SQLite or PostgreSQL", code="database", next_step="use sqlite:////path/control.db")


@contextmanager
def _answering() -> Iterator[None]:
    """Turn a database that is away, locked, full or broken into the refusal; a wrong statement stays what it is."""
    try:
        yield
    except PoolTimeout as error:
        raise _away("pool") from error
    except (DatabaseError, InterfaceError) as error:
        name = str(getattr(error.orig, "sqlite_errorname", "") or getattr(error.orig, "sqlstate", "") or "")
        if type(error) not in (DatabaseError, OperationalError, InterfaceError) or name == "SQLITE_ERROR":
            raise
        raise _away(name or type(error.orig).__name__) from error


def _away(reason: str) -> Unavailable:
    return Unavailable(
        "the database does not answer", code="database", next_step="see the disk and the database server",
        details={"reason": reason},
    )


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """Yield a connection in a write transaction; it is durable when the block ends, undone when it raises.

    Raises Unavailable (``unavailable.database``) when the lock is not had in 5 s or the database is away.
    IntegrityError of the block's own statements passes through.
    """
    with _answering(), engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITER_LOCK})")
        yield connection


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Yield a connection in a read transaction; takes no write lock. Raises Unavailable."""
    with _answering(), engine.connect() as plain:
        connection = plain.execution_options(**{_READ: True})
        with connection.begin():
            yield connection
