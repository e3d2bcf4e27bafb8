"""Bring the database to this program's version.

`migrations` is the layer above this one (it reads all tables), so it is looked up by name and not imported:
the only such edge in the control plane, taken by the local commands `init` and `migrate` and by the check at start.
"""

import pkgutil

from sqlalchemy import Engine

from interlock.errors import Conflict


def upgrade(engine: Engine) -> None:
    """Upgrade to the newest version; raises Conflict (made by a newer program) or Unavailable."""
    pkgutil.resolve_name("migrations.run:upgrade")(engine)


def refuse_old(engine: Engine) -> None:
    """Raise Conflict (``conflict.schema``) unless the database is at this program's version."""
    found = pkgutil.resolve_name("migrations.run:current")(engine)
    wanted = pkgutil.resolve_name("migrations.run:latest")()
    if found != wanted:
        raise Conflict(f"the database is at version {found}, this program needs {wanted}", code="schema",
                       next_step="python -I -m control_plane migrate --state STATE")
