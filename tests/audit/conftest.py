"""A ledger on a throw-away database, one key for all tests."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Engine, MetaData, create_engine, event, text

from audit.ledger import Ledger
from audit.tables import LedgerTables, define
from interlock.event import Event, EventType

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
ORIGIN = "interlock/test"
METADATA = MetaData()
TABLES: LedgerTables = define(METADATA)


def step(number: int, **facts: object) -> Event:
    """Return one small event."""
    return Event(EventType.RUN_STEP, "person/ada", tenant="lab", run=f"run_{number % 3}", facts={"n": number, **facts})


def sqlite_engine(path: Path) -> Engine:
    """Open SQLite as the product does: WAL, full fsync, writers take the lock at once."""
    engine = create_engine(f"sqlite:///{path}")

    @event.listens_for(engine, "connect")
    def _connect(connection: object, _record: object) -> None:
        connection.isolation_level = None  # type: ignore[attr-defined]
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000"):
            connection.execute(f"PRAGMA {pragma}")  # type: ignore[attr-defined]

    @event.listens_for(engine, "begin")
    def _begin(connection: object) -> None:
        read = connection.get_execution_options().get("interlock_read")  # type: ignore[attr-defined]
        connection.exec_driver_sql("BEGIN" if read else "BEGIN IMMEDIATE")  # type: ignore[attr-defined]

    return engine


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a short path, gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="ilkau-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    """An empty SQLite database with the ledger's tables."""
    made = sqlite_engine(folder / "control.db")
    METADATA.create_all(made)
    yield made
    made.dispose()


@pytest.fixture
def ledger(engine: Engine, folder: Path) -> Ledger:
    """A ledger on SQLite."""
    return Ledger(engine, TABLES, KEY, ORIGIN, last_head=folder / "last-head")


def _postgres_bin() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return found[-1].parent if found else None


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A throw-away PostgreSQL on a unix socket, run by a user that is not root."""
    binaries = _postgres_bin()
    if binaries is None:
        pytest.skip("no PostgreSQL server binary under /usr/lib/postgresql")
    home = Path(tempfile.mkdtemp(prefix="ilkap-", dir="/tmp"))
    who: dict[str, int] = {}
    if os.geteuid() == 0:
        os.chown(home, 65534, 65534)
        who = {"user": 65534, "group": 65534}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": home, **who}
    data = home / "d"
    server = None
    try:
        subprocess.run(
            [binaries / "initdb", "-D", data, "-U", "ilk", "-A", "trust", "--no-sync"], check=True, **quiet  # type: ignore[call-overload]
        )
        server = subprocess.Popen(
            [binaries / "postgres", "-D", data, "-k", home, "-c", "listen_addresses=", "-c", "max_connections=90"],
            **quiet,  # type: ignore[call-overload]
        )
        subprocess.run(
            [binaries / "pg_isready", "-h", home, "-U", "ilk", "-t", "20"], check=False, **quiet  # type: ignore[call-overload]
        )
        _await_server(binaries, home, quiet)
        yield f"postgresql+psycopg://ilk@/postgres?host={home}"
    finally:
        if server is not None:
            server.send_signal(2)  # fast shutdown
            server.wait(20)
        shutil.rmtree(home, ignore_errors=True)


def _await_server(binaries: Path, home: Path, quiet: dict[str, object]) -> None:
    import time

    for _ in range(100):
        asked = subprocess.run([binaries / "pg_isready", "-h", home, "-U", "ilk"], **quiet)  # type: ignore[call-overload]
        if asked.returncode == 0:
            return
        time.sleep(0.1)
    raise RuntimeError("PostgreSQL did not start")


@pytest.fixture
def postgres_engine(postgres_url: str) -> Iterator[Engine]:
    """An empty schema with the ledger's tables on PostgreSQL."""
    made = create_engine(postgres_url)
    METADATA.create_all(made)
    yield made
    METADATA.drop_all(made)
    with made.begin() as connection:
        connection.execute(text("SELECT 1"))
    made.dispose()
