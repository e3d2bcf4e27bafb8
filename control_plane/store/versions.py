"""Move a database to a version of its tables, as one transaction: all of it or nothing.

There is no alembic.ini: its template puts the current directory first on sys.path. The scripts' place is
absolute; alembic loads them as files, so nothing here imports the layer above. From a shell:
``python -I -m control_plane migrate``.
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine

from control_plane.store.db import reading, writing
from interlock.errors import Conflict

_FOLDER = Path(__file__).resolve().parents[2] / "migrations"


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def latest() -> str:
    """Return the newest version this code knows."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


def current(engine: Engine) -> str | None:
    """Return the version of the database, None for an empty one. Raises Unavailable."""
    with reading(engine) as connection:
        return MigrationContext.configure(connection).get_current_revision()


def upgrade(engine: Engine, version: str = "head") -> None:
    """Bring the database to `version`. Raises Conflict (made by a newer program) or Unavailable."""
    _move(engine, version, up=True)


def downgrade(engine: Engine, version: str = "base") -> None:
    """Take the database back to `version`; tables that it does not have are dropped with their rows."""
    _move(engine, version, up=False)


def _move(engine: Engine, version: str, *, up: bool) -> None:
    try:
        with writing(engine) as connection:
            (command.upgrade if up else command.downgrade)(_config(connection), version)
    except CommandError as error:
        raise Conflict(
            f"the database is at a version that this program does not know: {error}", code="schema",
            next_step="start the program version that made it, or restore a backup",
        ) from error
