"""How the database is opened: private, durable, one writer, typed when it is away."""

import os
import sqlite3
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from control_plane.store import db
from control_plane.store import versions as run
from interlock.errors import Unavailable, Untrusted, Usage


def test_sqlite_is_private_durable_and_checks_foreign_keys(tmp_path: Path) -> None:
    path = tmp_path / "control.db"
    engine = db.open_engine(f"sqlite:///{path}")
    with db.reading(engine) as connection:
        pragma = {p: connection.exec_driver_sql(f"PRAGMA {p}").scalar_one()
                  for p in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")}
    assert pragma == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    engine.dispose()


def test_refuses_when_others_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "control.db"
    db.open_engine(f"sqlite:///{path}").dispose()
    path.chmod(0o640)
    with pytest.raises(Untrusted) as caught:
        db.open_engine(f"sqlite:///{path}")
    assert caught.value.code == "untrusted.database_mode"


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://u:geheim@h/d", "nonsense"])
def test_refuses_when_the_url_is_another_database(url: str) -> None:
    with pytest.raises(Usage) as caught:
        db.open_engine(url)
    assert "geheim" not in str(caught.value)


def test_refuses_when_the_folder_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        db.open_engine(f"sqlite:///{tmp_path}/no/control.db")


def test_refuses_when_the_database_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "_PRAGMAS", (*db._PRAGMAS, "PRAGMA busy_timeout=50"))
    engine = db.open_engine(f"sqlite:///{tmp_path / 'c.db'}")
    run.upgrade(engine)
    other = sqlite3.connect(tmp_path / "c.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable) as caught, db.writing(engine):
        pass
    assert caught.value.code == "unavailable.database"
    other.execute("ROLLBACK")
    other.close()
    with db.writing(engine) as connection:
        connection.execute(text("INSERT INTO site VALUES ('a', 'b')"))
    engine.dispose()


@pytest.mark.parametrize("open_", [db.reading, db.writing])
def test_refuses_when_the_file_is_no_database(tmp_path: Path, open_: Callable[..., Any]) -> None:
    (tmp_path / "c.db").write_bytes(b"not a database, but long enough to be read as the header of one" * 20)
    (tmp_path / "c.db").chmod(0o600)
    engine = db.open_engine(f"sqlite:///{tmp_path / 'c.db'}")
    with pytest.raises(Unavailable) as caught, open_(engine) as connection:
        connection.execute(text("SELECT 1 FROM site"))
    assert caught.value.details["reason"] == "SQLITE_NOTADB"
    engine.dispose()


def test_a_wrong_statement_is_no_refusal(engine: Engine) -> None:
    with pytest.raises(DBAPIError, match="nowhere"), db.reading(engine) as connection:
        connection.execute(text("SELECT 1 FROM nowhere"))


def test_a_check_and_its_write_are_one(engine: Engine) -> None:
    """16 threads read a number and write the next one: no step is lost on either database."""
    run.upgrade(engine)
    with db.writing(engine) as connection:
        connection.execute(text("INSERT INTO site (key, value) VALUES ('n', '0')"))

    def step() -> None:
        for _ in range(5):
            with db.writing(engine) as connection:
                value = int(connection.execute(text("SELECT value FROM site WHERE key='n'")).scalar_one())
                connection.execute(text("UPDATE site SET value=:v WHERE key='n'"), {"v": str(value + 1)})

    threads = [threading.Thread(target=step) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with db.reading(engine) as connection:
        assert connection.execute(text("SELECT value FROM site")).scalar_one() == "80"


def test_a_read_takes_no_write_lock(tmp_path: Path) -> None:
    engine = db.open_engine(f"sqlite:///{tmp_path / 'c.db'}")
    run.upgrade(engine)
    with db.writing(engine) as writer, db.reading(engine) as reader:
        writer.execute(text("INSERT INTO site VALUES ('a', 'b')"))
        assert reader.execute(text("SELECT count(*) FROM site")).scalar_one() == 0
    engine.dispose()


def test_a_failing_block_leaves_nothing(engine: Engine) -> None:
    run.upgrade(engine)

    def twice() -> None:
        with db.writing(engine) as connection:
            connection.execute(text("INSERT INTO site VALUES ('a', 'b')"))
            connection.execute(text("INSERT INTO site VALUES ('a', 'c')"))

    with pytest.raises(IntegrityError):
        twice()
    with db.reading(engine) as connection:
        assert connection.execute(text("SELECT count(*) FROM site")).scalar_one() == 0
