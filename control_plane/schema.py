"""Refuse a database that is not at this program's version."""

from sqlalchemy import Engine

from control_plane.store.versions import current, latest
from interlock.errors import Conflict


def refuse_old(engine: Engine) -> None:
    """Raise Conflict (``conflict.schema``) unless the database is at this program's version."""
    found, wanted = current(engine), latest()
    if found != wanted:
        raise Conflict(f"the database is at version {found}, this program needs {wanted}", code="schema",
                       next_step="python -I -m control_plane migrate --state STATE")
