"""`python -I -m runners join FILE | serve | trust-signer PUB.json | ask-key RUN ATTEMPT`, as root.

Seams: docs/decisions/0001-seams.md §2, 0004-train-seal-serve.md §1.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from interlock import origin
from interlock.errors import Refusal, Usage

PACKAGES = ("runners", "sandbox", "killswitch", "policy", "audit")


def _words() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(prog="python -I -m runners", description="The node of a site.")
    orders = words.add_subparsers(dest="order", required=True)
    join = orders.add_parser("join", help="make this host a node of the site that the join file names")
    join.add_argument("file", type=Path)
    serve = orders.add_parser("serve", help="take launch orders, until SIGTERM")
    serve.add_argument("--data-root", action="append", default=[], help="folder whose content plans may read")
    serve.add_argument("--environment", action="append", default=[], metavar="NAME=PREFIX",
                       help="Python environment that plans may name")
    serve.add_argument("--gateway-port", type=int, help="port on 127.0.0.1 where models are called; without it no "
                       "engine is served")
    serve.add_argument("--gateway-user", default="interlock-gateway", help="user name or uid of the gateway")
    serve.add_argument("--broker-user", default="interlock-broker", help="user name or uid of the broker")
    serve.add_argument("--uids", default="60100-60999", help="range of uids that belong to runs alone")
    signer = orders.add_parser("trust-signer", help="pin a bundle signer for this node, by local root only")
    signer.add_argument("public", type=Path)
    ask = orders.add_parser("ask-key", help="ask for a run's keys as this node would; shows what is granted, no key")
    ask.add_argument("run")
    ask.add_argument("attempt", help="its number, from 1")
    broker = orders.add_parser("broker", help=argparse.SUPPRESS)
    broker.add_argument("--node", required=True)
    broker.add_argument("--control", required=True, type=int)
    broker.add_argument("--key", required=True, type=int)
    gateway = orders.add_parser("gateway", help=argparse.SUPPRESS)
    gateway.add_argument("--node", required=True)
    gateway.add_argument("--control", required=True, type=int)
    gateway.add_argument("--key", required=True, type=int)
    gateway.add_argument("--port", required=True, type=int)
    for each in (join, serve, signer, ask, broker, gateway):
        each.add_argument("--state")
        each.add_argument("--runtime")
    return words


def _serve(given: argparse.Namespace) -> None:
    from runners import broker_line, dataset, environments, gateway_line
    from runners.folders import folders, require_joined, require_root
    from runners.node import Node, Offer, say
    from runners.run_uid import uid_range
    from sandbox.uids import Pool

    require_root()
    found = folders(given.state, given.runtime)
    require_joined(found)
    offer = Offer(
        dataset.data_roots(given.data_root), environments.environments(given.environment, (found.state, found.runtime)),
        given.broker_user, given.gateway_user, given.gateway_port,
    )
    broker_line.broker_ids(offer.broker_user)
    if offer.gateway_port is not None:
        gateway_line.gateway_ids(offer.gateway_user)
    first, last = uid_range(given.uids)
    node = Node(found, offer, Pool(first, last))
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: node.end())
        say(node.start())
        node.serve()
    finally:
        node.close()


def _join(given: argparse.Namespace) -> None:
    from runners.folders import folders
    from runners.join import join

    found = folders(given.state, given.runtime)
    print(json.dumps({"joined": join(given.file, found), "state": str(found.state)}))


def _trust_signer(given: argparse.Namespace) -> None:
    from runners.folders import folders, require_joined, require_root
    from runners.pinned import pin_signer

    require_root()
    found = folders(given.state, given.runtime)
    require_joined(found)
    print(json.dumps({"trusted": pin_signer(found, given.public)}))


def _ask_key(given: argparse.Namespace) -> None:
    from runners.folders import folders, require_joined, require_root
    from runners.upstream import Upstream
    from runners.vault import read_keys

    require_root()
    if not given.attempt.isdecimal():
        raise Usage("an attempt is named by its number", code="attempt", next_step="interlock runs shows it")
    found = folders(given.state, given.runtime)
    require_joined(found)
    with Upstream(found) as upstream:
        run_key, files = read_keys(upstream.keys(given.run, int(given.attempt)))
    names = sorted({f"{version}/{name}" for version, keys in files.items() for name in keys})
    print(json.dumps({"granted": True, "files": names, "run_key": run_key is not None}))


def _broker(given: argparse.Namespace) -> None:
    from runners.broker_process import serve

    serve(given.state, given.runtime, given.node, given.control, given.key)


def _gateway(given: argparse.Namespace) -> None:
    from runners.gateway_process import serve

    serve(given.state, given.runtime, given.node, given.control, given.key, given.port)


def main(argv: list[str]) -> int:
    """Carry out one command; a refusal is one JSON line on stderr and status 1."""
    given = _words().parse_args(argv)
    os.umask(0o022)  # modes of our files are said where they are made; folders stay passable for the broker
    orders = {"join": _join, "serve": _serve, "trust-signer": _trust_signer, "ask-key": _ask_key, "broker": _broker,
              "gateway": _gateway}
    try:
        origin.check(*PACKAGES)
        orders[given.order](given)
    except Refusal as refusal:
        print(json.dumps({"error": refusal.as_json()}), file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
