"""Settings, typed; what is unknown or unsafe is refused at start, never ignored.

Two files: ``STATE/site.json`` (site name, ports, node of this machine; `init` writes it) and
``STATE/control/settings.json`` (what an operator may change). Flags of the command win over both.
"""

import json
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from interlock.errors import Conflict, Malformed, Unavailable, Untrusted
from kms import assignment
from kms.assignment import Assignment

SITES = ("demo", "default")
PRODUCTION_COOLDOWN_MS = 600_000
_SITE_FIELDS = {"site", "people_port", "nodes_port", "gateway_port", "node"}
_FILE_FIELDS = {"production", "cooldown_ms", "on_unconfirmed", "database", "origin", "unconfirmed_ms", "silent_ms",
                "kms"}


@dataclass(frozen=True)
class Places:
    """Where things lie below STATE (docs/decisions/0001-seams.md §1)."""

    state: Path

    @property
    def control(self) -> Path:
        """Return the folder of the control plane's own state (0700)."""
        return self.state / "control"

    @property
    def keys(self) -> Path:
        """Return the folder of private keys."""
        return self.control / "keys"

    @property
    def orders(self) -> Path:
        """Return the order log's folder, outside the database's."""
        return self.state / "orders"

    @property
    def trust(self) -> Path:
        """Return the folder of public pins."""
        return self.state / "trust"

    @property
    def done(self) -> Path:
        """Return the file that `init` writes last."""
        return self.control / "init.done"


@dataclass(frozen=True)
class Settings:
    """What the control plane runs with. Durations in milliseconds.

    `cooldown_ms` between a stop and its resume; `on_unconfirmed` the argv that pages people (JSON on stdin,
    no shell); `unconfirmed_ms` after which a stop without proof pages; `silent_ms` after which a node that
    was not heard counts as unreachable; `origin` the name in the ledger's tree heads; `kms` which provider wraps
    run keys for which tier.
    """

    places: Places
    site: str = "default"
    production: bool = False
    people_port: int = 7070
    nodes_port: int = 7071
    node: str = ""
    cooldown_ms: int = PRODUCTION_COOLDOWN_MS
    on_unconfirmed: tuple[str, ...] = ()
    unconfirmed_ms: int = 5_000
    silent_ms: int = 5_000
    database: str = ""
    origin: str = "interlock"
    extra_hosts: tuple[str, ...] = field(default=())
    kms: Assignment = field(default_factory=Assignment)

    @property
    def database_url(self) -> str:
        """Return the database's URL; by default a file in the control folder."""
        return self.database or f"sqlite:///{self.places.control / 'control.db'}"

    @property
    def people_url(self) -> str:
        """Return the console's and API's address (a name, never an IP address: cookies need it)."""
        return f"http://localhost:{self.people_port}"

    @property
    def nodes_url(self) -> str:
        """Return the node link's address."""
        return f"https://localhost:{self.nodes_port}"


def read_object(path: Path, fields: set[str]) -> dict[str, Any]:
    """Return the JSON object in `path`, only `fields` admitted.

    Raises Unavailable (cannot be read), Untrusted (others may write it) or Malformed.
    """
    try:
        mode = path.stat().st_mode
        raw = path.read_bytes()
    except OSError as error:
        raise Unavailable(f"cannot read {path}: {error.strerror}", code="settings",
                          next_step="run python -I -m control_plane init") from None
    if stat.S_IMODE(mode) & 0o022:
        raise Untrusted(f"others can write {path}", code="settings_mode", next_step=f"chmod go-w {path}")
    try:
        value = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise Malformed(f"{path} is not JSON", code="settings") from None
    if not isinstance(value, dict) or set(value) - fields:
        raise Malformed(f"{path} holds an unknown field", code="settings",
                        next_step=f"known fields: {', '.join(sorted(fields))}")
    return value


def _port(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 65535:
        raise Malformed("a port is a number from 1 to 65535", code="port")
    return value


def _span(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 86_400_000:
        raise Malformed(f"{name} is a number of milliseconds up to a day", code="settings")
    return value


def _argv(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(x, str) and x for x in value):
        raise Malformed("on_unconfirmed is a list of words", code="settings")
    if value and not value[0].startswith("/"):
        raise Malformed("on_unconfirmed starts with an absolute path", code="settings")
    return tuple(value)


def _from_file(settings: Settings, value: dict[str, Any]) -> Settings:
    production = value.get("production", False)
    if not isinstance(production, bool):
        raise Malformed("production is true or false", code="settings")
    spans = {name: _span(value[name], name) for name in ("cooldown_ms", "unconfirmed_ms", "silent_ms") if name in value}
    words = {name: str(value[name]) for name in ("database", "origin") if name in value}
    return replace(settings, production=production, on_unconfirmed=_argv(value.get("on_unconfirmed", [])),
                   kms=assignment.read(value.get("kms", {})), **spans, **words)  # type: ignore[arg-type]


def refuse_unsafe(settings: Settings) -> Settings:
    """Return `settings`, or raise Conflict for what a production site must not run with."""
    if settings.site not in SITES:
        raise Malformed("unknown site", code="site", next_step=f"use one of: {', '.join(SITES)}")
    if settings.people_port == settings.nodes_port:
        raise Conflict("people and nodes need two ports", code="ports")
    if settings.production and settings.site == "demo":
        raise Conflict("this state belongs to the demo and the settings say production", code="demo_state",
                       next_step="make a state of its own: python -I -m control_plane init --state FOLDER")
    if settings.production and settings.cooldown_ms < PRODUCTION_COOLDOWN_MS:
        raise Conflict("production resumes after a cool-down of 10 minutes or more", code="cooldown",
                       next_step="set cooldown_ms to at least 600000")
    return settings


def load(state: Path, *, people_port: int | None = None, nodes_port: int | None = None) -> Settings:
    """Return the settings of an initialised state; flags win. Raises Unavailable, Untrusted, Malformed, Conflict."""
    places = Places(state)
    site = read_object(state / "site.json", _SITE_FIELDS)
    found = Settings(
        places, site=str(site.get("site")), node=str(site.get("node", "")),
        people_port=_port(people_port if people_port is not None else site.get("people_port")),
        nodes_port=_port(nodes_port if nodes_port is not None else site.get("nodes_port")),
    )
    return refuse_unsafe(_from_file(found, read_object(places.control / "settings.json", _FILE_FIELDS)))
