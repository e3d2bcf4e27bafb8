"""`python -I -m killswitch watch|stop|status|resume|apply`: the kill switch from a shell of this host.

Needs no control plane, no database and no network; `stop` does not even need the supervisor.
Exit status: 0 done (for `stop`: CONFIRMED), 1 refused, 2 usage, 4 not confirmed.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from interlock.errors import Malformed, NotConfirmed, Refusal, Unavailable
from interlock.origin import check
from interlock.places import default_runtime, default_state
from interlock.signed import RESUME
from killswitch import offline, watch
from killswitch.client import Supervisor


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -I -m killswitch", description="Stop, with everything else dead.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("watch", "run the kill supervisor"), ("stop", "stop one run or everything of this host, with proof"),
        ("status", "show what is stopped and what runs"), ("resume", "hand over a signed resume order"),
        ("apply", "hand over any signed order (stop, resume, break-glass)"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--state", type=Path, default=None)
        command.add_argument("--runtime", type=Path, default=None)
        command.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "watch":
            command.add_argument("--on-unconfirmed", metavar="CMD", help="run when a stop is not confirmed")
        if name == "stop":
            which = command.add_mutually_exclusive_group(required=True)
            which.add_argument("--run", metavar="ID")
            which.add_argument("--all", action="store_true")
            command.add_argument("--reason", default="")
            command.add_argument("--wait", type=float, default=5.0, metavar="S")
        if name in ("resume", "apply"):
            command.add_argument("file", type=Path)
    return parser


def _stop(arguments: argparse.Namespace, client: Supervisor, state: Path) -> int:
    run: str | None = arguments.run
    scope = f"run:{run}" if run else "everything"
    try:
        order = client.ask("stop", scope=scope, reason=arguments.reason)["id"]
        found = {**offline.poll(client.ask, order, arguments.wait), "supervisor": "answers"}
    except Unavailable:
        found = offline.stop(state, run)
    _print(found, arguments.json, f"{scope}: {found['result'].upper()} after {found['latency_ms']} ms")
    if found["result"] == "confirmed":
        return 0
    _complain(NotConfirmed(
        f"{scope} is not proven stopped ({found.get('why') or 'still working on it'})",
        next_step="fence this node; look again with: status",
        details={"survivors": found["survivors"], "latch": found.get("latch", "")},
    ))
    return 4


def _hand_over(arguments: argparse.Namespace, client: Supervisor) -> int:
    try:
        order = json.loads(arguments.file.read_bytes())
    except OSError as error:
        raise Unavailable(f"cannot read {arguments.file}: {error.strerror}", code="file") from None
    except ValueError:
        raise Malformed(f"{arguments.file} is not JSON", code="file") from None
    if arguments.command == "resume" and not (isinstance(order, dict) and order.get("format") == RESUME):
        raise Malformed("this file is no resume order", code="format", next_step="for other orders: apply FILE")
    found = client.ask("order", order=order)
    words = "applied" if found["applied"] else "nothing to change"
    _print(found, arguments.json, f"{found['id']}: {words}")
    return 0


def _status(arguments: argparse.Namespace, client: Supervisor) -> int:
    found = client.ask("status")
    lines = [f"node {found['node']}, complete: {found['complete']}, epoch {found['epoch']}, link {found['link']}"]
    lines += [f"STOPPED {s['scope']['kind']}:{s['scope']['id']} by {s['actor']} ({s['id']})" for s in found["stops"]]
    lines += [f"run {r['run']}.{r['attempt']} {r['state']} {r['why']}".rstrip() for r in found["runs"]]
    _print(found, arguments.json, "\n".join(lines))
    return 0


def _print(found: dict[str, Any], as_json: bool, words: str) -> None:
    print(json.dumps(found) if as_json else words, flush=True)


def _complain(error: Refusal) -> None:
    print(json.dumps({"error": error.as_json()}), file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        check("killswitch", "sandbox")
        state = arguments.state or default_state()
        runtime = arguments.runtime or default_runtime(state)
        if arguments.command == "watch":
            return watch.run(state, runtime, arguments.on_unconfirmed)
        # A supervisor that hangs must not cost the time in which the direct way would have worked.
        client = Supervisor(runtime / "supervisor.sock", timeout_s=1.5 if arguments.command == "stop" else 10.0)
        if arguments.command == "stop":
            return _stop(arguments, client, state)
        return _status(arguments, client) if arguments.command == "status" else _hand_over(arguments, client)
    except Refusal as error:
        _complain(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
