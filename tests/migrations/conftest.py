"""A throw-away SQLite file, and a throw-away PostgreSQL on a unix socket under an unprivileged uid."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from control_plane.store.db import open_engine


def _binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


def _uid() -> tuple[int, int] | None:
    """PostgreSQL refuses root: borrow a system user when we are root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            row = pwd.getpwnam(name)
        except KeyError:
            continue
        return row.pw_uid, row.pw_gid
    pytest.skip("no unprivileged user to run PostgreSQL as")


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """Start PostgreSQL in a folder of its own; nothing listens on the network."""
    binaries = _binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server here: install the package postgresql")
    ids = _uid()
    folder = Path(tempfile.mkdtemp(prefix="ilpg-", dir="/tmp"))
    who = {"user": ids[0], "group": ids[1], "extra_groups": []} if ids else {}
    if ids:
        os.chown(folder, *ids)
    data = folder / "d"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": "/"}
    try:
        subprocess.run(
            [binaries / "initdb", "-D", data, "-A", "trust", "-U", "interlock", "-N", "--locale=C", "-E", "UTF8"],
            check=True, **quiet, **who)
        server = subprocess.Popen(
            [binaries / "postgres", "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off",
             "-c", "shared_buffers=16MB"], **quiet, **who)
        try:
            for _ in range(100):
                ready = subprocess.run([binaries / "pg_isready", "-q", "-h", folder, "-t", "1"], check=False, **quiet)
                if ready.returncode == 0:
                    break
                try:
                    server.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
                raise AssertionError("PostgreSQL ended at once")
            yield f"postgresql://interlock@/postgres?host={folder}"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(20)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An engine on an empty database of each kind."""
    if request.param == "sqlite":
        made = open_engine(f"sqlite:///{tmp_path / 'control.db'}")
    else:
        made = open_engine(request.getfixturevalue("postgres_url"))
    try:
        yield made
    finally:
        if request.param == "postgresql":
            with made.begin() as connection:
                connection.exec_driver_sql("DROP SCHEMA public CASCADE")
                connection.exec_driver_sql("CREATE SCHEMA public")
        made.dispose()
