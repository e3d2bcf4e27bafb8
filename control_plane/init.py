"""First start: keys, database, empty bundle slot, empty order log, public pins. ``init.done`` is written last.

Rules: idempotent on a finished state; a half-made state is refused and touched no further (a key of it may
be pinned somewhere already); private keys are made 0600 in a 0700 folder and never replaced.
"""

import json
import os
import secrets
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from audit.treehead import note_key
from control_plane import keys as run_keys
from control_plane.certificates import Authority, key_pem, make_ca, node_id
from control_plane.order_log import OrderLog
from control_plane.settings import PRODUCTION_COOLDOWN_MS, SITES, Places, Settings, load, refuse_unsafe
from control_plane.store.db import open_engine
from control_plane.store.versions import upgrade
from interlock.errors import Conflict, Malformed, Unavailable
from interlock.keyfile import write_ed25519, write_private


def initialise(
    state: Path, *, site: str = "default", people_port: int = 7070, nodes_port: int = 7071, node: str = ""
) -> Settings:
    """Make the control plane's state below `state`, or return the settings of the one that is there.

    Raises Conflict (``conflict.half_made``), Malformed or Unavailable.
    """
    places = Places(state)
    if places.done.exists():
        return load(state)
    if site not in SITES:
        raise Malformed("unknown site", code="site", next_step=f"use one of: {', '.join(SITES)}")
    _refuse_half_made(places)
    wanted = Settings(places, site=site, people_port=people_port, nodes_port=nodes_port,
                      node=node_id(node) if node else "",
                      cooldown_ms=0 if site == "demo" else PRODUCTION_COOLDOWN_MS,
                      origin=f"interlock/{site}-{secrets.token_hex(4)}")
    refuse_unsafe(wanted)
    try:
        _make(places, wanted)
    except OSError as error:
        raise Unavailable(f"cannot make the state: {error}", code="state",
                          next_step="check the folder and its owner, remove what was begun, run init again") from None
    return load(state)


def _refuse_half_made(places: Places) -> None:
    begun = [p for p in (places.control, places.orders) if p.exists() and any(p.iterdir())]
    if (places.trust / "ledger.vkey").exists():
        begun.append(places.trust)
    if begun:
        raise Conflict(
            f"{begun[0]} holds a state that init did not finish", code="half_made",
            next_step="restore a backup, or move these folders away and run init again: "
            + ", ".join(str(p) for p in begun),
        )


def refuse_unfinished(places: Places) -> None:
    """Raise Conflict or Unavailable unless `init` has finished here."""
    if places.done.exists():
        return
    _refuse_half_made(places)
    raise Unavailable("there is no state here yet", code="state",
                      next_step=f"python -I -m control_plane init --state {places.state}")


def _make(places: Places, wanted: Settings) -> None:
    before = os.umask(0o077)
    try:
        if not places.state.exists():
            places.state.mkdir(parents=True)
            places.state.chmod(0o755)
        for folder in (places.control, places.keys):
            folder.mkdir(mode=0o700, exist_ok=True)
        _site_file(places, wanted)
        public = _keys(places.keys, wanted)
        write_private(places.control / "settings.json", json.dumps(
            {"production": False, "cooldown_ms": wanted.cooldown_ms, "on_unconfirmed": [], "origin": wanted.origin},
            indent=1).encode() + b"\n")
        OrderLog(places.orders).create()
        for name in ("output", "files"):
            (places.control / name).mkdir(mode=0o700, exist_ok=True)
    finally:
        os.umask(before)
    engine = open_engine(wanted.database_url)
    try:
        upgrade(engine)
    finally:
        engine.dispose()
    _pins(places, public)
    write_private(places.done, b"1\n")


def _site_file(places: Places, wanted: Settings) -> None:
    path = places.state / "site.json"
    if not path.exists():
        path.write_text(json.dumps({"site": wanted.site, "people_port": wanted.people_port,
                                    "nodes_port": wanted.nodes_port, "node": wanted.node}) + "\n")
        path.chmod(0o644)


def _keys(keys: Path, wanted: Settings) -> dict[str, bytes]:
    """Make all private keys; return the public files that go to the trust folder."""
    key, certificate = make_ca(wanted.site)
    pem = certificate.public_bytes(Encoding.PEM)
    write_private(keys / "ca.key.pem", key_pem(key))
    write_private(keys / "ca.pem", pem)
    server_key, server_chain = Authority(key, certificate).server()
    write_private(keys / "tls.key.pem", server_key)
    write_private(keys / "tls.pem", server_chain)
    for name in ("grant", "stop"):
        write_ed25519(keys / f"{name}.key", Ed25519PrivateKey.generate())
    head = Ed25519PrivateKey.generate()
    write_ed25519(keys / "head.key", head)
    write_private(keys / "kek.key", secrets.token_bytes(32))
    run_keys.RunKeys(wanted.kms, keys / run_keys.FOLDER).prepare()
    return {"ca.pem": pem, "ledger.vkey": note_key(wanted.origin, head.public_key()).vkey().encode() + b"\n"}


def _pins(places: Places, files: dict[str, bytes]) -> None:
    places.trust.mkdir(mode=0o755, exist_ok=True)
    for name, data in files.items():
        target = places.trust / name
        target.write_bytes(data)
        target.chmod(0o644)
    places.trust.chmod(0o755)
