"""``python -I -m control_plane init|migrate|serve|bootstrap|trust-signer|join-file|hsm``: local commands of the
state's owner. Everything else goes through the API."""

import argparse
import json
import sys
from pathlib import Path

from control_plane import hsm, init, serve, settings, signing
from control_plane.api.nodes import make_join_file
from control_plane.auth import links
from control_plane.certificates import Authority, node_id
from control_plane.order_log import OrderLog
from control_plane.settings import Places, Settings
from control_plane.store.db import open_engine
from control_plane.store.records import open_ledger
from control_plane.store.versions import current, upgrade
from interlock import origin
from interlock.errors import Malformed, Refusal, Unavailable
from interlock.event import Event, EventType
from interlock.keyfile import read_ed25519, write_private
from interlock.places import default_state

PACKAGES = ("control_plane", "policy", "kms", "audit", "killswitch", "migrations")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    top = argparse.ArgumentParser(prog="python -I -m control_plane")
    verbs = top.add_subparsers(dest="verb", required=True)
    for name in ("init", "migrate", "serve", "bootstrap", "trust-signer", "join-file", "hsm"):
        verb = verbs.add_parser(name)
        verb.add_argument("--state", type=Path, default=None)
        if name in ("init", "serve"):
            verb.add_argument("--people-port", type=int)
            verb.add_argument("--nodes-port", type=int)
        if name == "init":
            verb.add_argument("--site", default="default")
            verb.add_argument("--node", default="")
        if name == "bootstrap":
            verb.add_argument("--recover", action="store_true")
        if name == "trust-signer":
            verb.add_argument("file", type=Path)
        if name == "hsm":
            which = verb.add_mutually_exclusive_group(required=True)
            which.add_argument("--softhsm", action="store_true")
            which.add_argument("--module", type=Path, metavar="FILE")
        if name == "join-file":
            verb.add_argument("--node", required=True)
    return top


def _load(state: Path) -> Settings:
    init.refuse_unfinished(Places(state))
    return settings.load(state)


def do_init(words: argparse.Namespace, state: Path) -> None:
    """Make the state."""
    ports = {"people_port": words.people_port or 7070, "nodes_port": words.nodes_port or 7071}
    made = init.initialise(state, site=words.site, node=words.node, **ports)
    print(json.dumps({"state": str(state), "site": made.site, "people": made.people_url, "nodes": made.nodes_url}))


def do_migrate(_words: argparse.Namespace, state: Path) -> None:
    """Bring the database to this version; nobody may serve it meanwhile."""
    found = _load(state)
    with serve.alone(found.places):
        engine = open_engine(found.database_url)
        try:
            before = current(engine)
            upgrade(engine)
            print(json.dumps({"migrated": True, "before": before, "now": current(engine)}))
        finally:
            engine.dispose()


def do_serve(words: argparse.Namespace, state: Path) -> None:
    """Serve people and nodes."""
    init.refuse_unfinished(Places(state))
    serve.run(settings.load(state, people_port=words.people_port, nodes_port=words.nodes_port))


def do_bootstrap(words: argparse.Namespace, state: Path) -> None:
    """Print the one-time link of the first administrator to this terminal, and nowhere else."""
    found = _load(state)
    engine = open_engine(found.database_url)
    try:
        book = open_ledger(engine, read_ed25519(found.places.keys / "head.key"), found.origin, found.places.keys)
        if words.recover:
            with serve.alone(found.places):
                secret = links.recover(engine, book)
        else:
            secret = links.bootstrap(engine, book)
    finally:
        engine.dispose()
    print(f"{found.people_url}/enrol#{secret}", flush=True)


def do_trust_signer(words: argparse.Namespace, state: Path) -> None:
    """Pin a bundle signer's public key."""
    found = _load(state)
    try:
        value = json.loads(words.file.read_bytes())
        name, key = str(value["name"]), str(value["key"])
    except OSError as error:
        raise Unavailable(f"cannot read {words.file}: {error.strerror}", code="file") from None
    except (ValueError, KeyError, TypeError):
        raise Malformed("a signer file is JSON with name and key", code="signer") from None
    print(json.dumps({"signers": signing.add_bundle_signer(found.places.trust, name, key)}))


def do_join_file(words: argparse.Namespace, state: Path) -> None:
    """Write a join file (0600) and print its path."""
    found = _load(state)
    engine = open_engine(found.database_url)
    try:
        book = open_ledger(engine, read_ed25519(found.places.keys / "head.key"), found.origin, found.places.keys)
        book.record(Event(EventType.NODE_INVITED, "local", facts={"node": node_id(words.node)}))
        made = make_join_file(engine, OrderLog(found.places.orders), Authority.load(found.places.keys), found,
                              words.node, "local")
    finally:
        engine.dispose()
    path = found.places.control / f"join-{words.node}.json"
    path.unlink(missing_ok=True)  # an older one, whose secret is another
    write_private(path, json.dumps(made).encode())
    print(path, flush=True)


def do_hsm(words: argparse.Namespace, state: Path) -> None:
    """Name the HSM that keeps the keys of the upper tiers; nobody may serve meanwhile."""
    places = _load(state).places
    with serve.alone(places):
        used = hsm.use_softhsm(places) if words.softhsm else hsm.use_module(places, words.module)
    print(json.dumps({"hsm": {"module": used["module"], "token": used["token"]}}))


VERBS = {"init": do_init, "migrate": do_migrate, "serve": do_serve, "bootstrap": do_bootstrap,
         "trust-signer": do_trust_signer, "join-file": do_join_file, "hsm": do_hsm}


def main() -> int:
    """Run one command; a refusal is one JSON object on stderr and exit status 1."""
    words = parser().parse_args()
    try:
        origin.check(*PACKAGES)
        VERBS[words.verb](words, (words.state or default_state()).absolute())
    except Refusal as refusal:
        serve.say(refusal.as_json())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
