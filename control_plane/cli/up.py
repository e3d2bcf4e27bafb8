"""`interlock up`: one machine, all three programs, in the order in which each can trust the one before.

init → pin the bundle signers → a join file (before anything serves) → control plane under its own user →
join → supervisor → node. Every step looks first whether it was done; a second `up` starts what is missing.
"""

import json
import os
import re
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from control_plane.cli import down, owners, programs
from control_plane.cli.invocation import Invocation, RuntimeOption, StateOption
from control_plane.cli.node_options import DEFAULT_GATEWAY_PORT, NodeOptions, options, refuse_taken, write_open
from control_plane.cli.owners import Owner
from control_plane.cli.programs import CONTROL, NODE, SUPERVISOR, Places, module
from control_plane.cli.terminal import Terminal, fields, state, table
from interlock.errors import Conflict, Malformed, NotFound, Refusal, Unavailable, Usage
from interlock.keyfile import write_private

DEFAULT_PORTS = (7070, 7071)


def node_id(host: str) -> str:
    """Return a node id of this host's name: lower case letters, digits, dashes."""
    found = re.sub(r"[^a-z0-9-]+", "-", host.lower()).strip("-")[:40]
    return found or "node"


@dataclass
class Rise:
    """One `up`: what was asked, what was made, what is missing."""

    places: Places
    terminal: Terminal
    site: dict[str, Any]
    signers: list[Path]
    node: NodeOptions
    hsm: list[str]
    is_root: bool
    control: Owner | None = None
    made: list[str] = field(default_factory=list)
    missing: list[dict[str, Any]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)

    def _do(self, text: str) -> Any:
        return self.terminal.wait(text)

    def prepare(self) -> None:
        """Make system users (root only), folders and site.json. Raises Unavailable (``unavailable.port``)."""
        if self.is_root and not programs.running(self.places, NODE):
            refuse_taken(int(self.site["gateway_port"]))
        broker = gateway = None
        if self.is_root:
            self.control, broker, gateway = (self._user(name) for name in owners.USERS)
        owners.lay_folders(self.places, self.control, broker, gateway)
        old = self.places.site()
        if self.site != old:
            write_open(self.places.site_file, self.site)
        if old and self.site["gateway_port"] != old.get("gateway_port"):
            self._note(f"the gateway's port: {self.site['gateway_port']} (another one: --gateway-port, after a down)")
        self.node.note(self.places)

    def _note(self, added: str) -> None:
        self.made.append(added)
        self.terminal.note(f"adds to this site {added}")

    def _user(self, name: str) -> Owner:
        found = owners.owner(name)
        if found is None:
            found = owners.make_user(name)
            self.made.append(f"system user {name} (uid {found.uid})")
            self.terminal.note(f"made the system user {name}")
        return found

    def control_command(self, verb: str, *words: str, reads: list[Path] | None = None) -> list[str]:
        """Return a local command of the control plane, started under its own user."""
        return control_argv(self.places, self.control, verb, *words, reads=reads)

    def initialise(self) -> None:
        """Make keys and database once, and pin the bundle signers that were named."""
        ports = ["--people-port", str(self.site["people_port"]), "--nodes-port", str(self.site["nodes_port"])]
        if not self._initialised():
            with self._do("makes keys and database"):
                programs.ask(self.control_command("init", "--site", self.site["site"], *ports), what="init")
            self.made.append("keys and database")
        if self.hsm:
            with self._do("names the HSM"):
                programs.ask(self.control_command("hsm", *self.hsm), what="hsm")
        for signer in self.signers:
            with self._do(f"pins the bundle signer {signer.name}"), self.readable(signer) as file:
                programs.ask(self.control_command("trust-signer", str(file), reads=[file]), what="trust-signer")

    @contextmanager
    def readable(self, file: Path) -> Iterator[Path]:
        """Yield a copy of a public key that the control plane's user can read, whatever the mode of `file`."""
        if self.control is None:
            yield file
            return
        copy = self.places.runtime / "signer.json"
        copy.unlink(missing_ok=True)
        write_private(copy, _bytes_of(file))
        try:
            copy.chmod(0o644)
            yield copy
        finally:
            copy.unlink()

    def _initialised(self) -> bool:
        return (self.places.state / "control" / "init.done").exists()

    def join_file(self) -> Path | None:
        """Return a root-owned copy of a fresh join file; None when this host has joined already."""
        if (self.places.state / "node" / "link.json").exists():
            return None
        with self._do("makes a join file"):
            said = programs.ask(self.control_command("join-file", "--node", self.site["node"]), what="join-file")
        source = Path(_last_line(said))
        target = self.places.runtime / "join.json"
        target.unlink(missing_ok=True)
        write_private(target, source.read_bytes())
        source.unlink()
        return target

    def start(self, name: str, argv: list[str], text: str) -> None:
        """Start a program unless it runs."""
        if programs.running(self.places, name):
            return
        with self._do(text):
            found = programs.launch(self.places, name, argv)
        self.started.append(name)
        self.terminal.note(f"{name} is ready (pid {found.pid})")

    def serve_control(self) -> None:
        """Start the control plane under its own user; the tables of an older program are brought to ours first."""
        try:
            self.start(CONTROL, self.control_command("serve"), "starts the control plane")
        except Conflict as refusal:
            if refusal.code != "conflict.schema":
                raise
            with self._do("brings the database to this version"):
                said = json.loads(_last_line(programs.ask(self.control_command("migrate"), what="migrate")))
            self._note(f"tables of the database, from version {said['before']} to {said['now']}")
            self.start(CONTROL, self.control_command("serve"), "starts the control plane")

    def join(self, file: Path | None) -> None:
        """Join this host, once; the join file is gone afterwards whatever happens."""
        if file is None:
            return
        try:
            with self._do("joins this host as a node"):
                programs.ask(module(NODE, "join", str(file), *_where(self.places)), what="join")
            self.made.append(f"node {self.site['node']}")
        finally:
            file.unlink(missing_ok=True)

    def serve_host(self) -> None:
        """Start supervisor and node, both root."""
        self.start(SUPERVISOR, module(SUPERVISOR, "watch", *_where(self.places)), "starts the kill supervisor")
        words = self.node.words(int(self.site["gateway_port"]))
        self.start(NODE, module(NODE, "serve", *_where(self.places), *words), "starts the node")

    def run(self) -> None:
        """Walk all steps."""
        self.prepare()
        self.initialise()
        file = self.join_file() if self.is_root else None
        try:
            self.serve_control()
        except Refusal:
            if file is not None:
                file.unlink(missing_ok=True)
            raise
        if not self.is_root:
            self.missing.append(Unavailable(
                "without root there is no node and no supervisor: no run can start here", code="root",
                next_step="sudo interlock up (a uid for each run needs CAP_SETUID)").as_json())
            return
        self.join(file)
        self.serve_host()

    def report(self) -> dict[str, Any]:
        """Return what stands now, for people and scripts."""
        rows = []
        for name in (CONTROL, SUPERVISOR, NODE):
            found = programs.running(self.places, name)
            rows.append({"name": name, "pid": found.pid if found else 0, "state": "ready" if found else "missing"})
        self._look_for_gateway()
        keys = self.places.state / "control" / "keys"
        return {
            "state": str(self.places.state), "runtime": str(self.places.runtime), "node": self.site["node"],
            "people": f"http://localhost:{self.site['people_port']}",
            "nodes": f"https://localhost:{self.site['nodes_port']}",
            "gateway": f"http://localhost:{self.site['gateway_port']}/v1", "programs": rows, "made": self.made,
            "started": self.started, "missing": self.missing,
            "bootstrap": f"interlock bootstrap --state {self.places.state}", "kek": str(keys / "kek.key"),
            "backup": f"copy {keys} to an offline medium, then: interlock doctor --confirm-backup "
                      f"--state {self.places.state}",
        }


    def _look_for_gateway(self) -> None:
        """Say so when the node that runs was started by a program that knew no gateway, or with another port."""
        found = programs.running(self.places, NODE)
        words = [] if found is None else programs.words_of(found)
        if found is not None and f"--gateway-port {self.site['gateway_port']}" not in " ".join(words):
            self.missing.append(Unavailable(
                "the programs run as an earlier version started them, without this gateway: no model can be called",
                code="gateway", next_step="interlock down, then interlock up").as_json())


def control_argv(
    places: Places, control: Owner | None, verb: str, *words: str, reads: list[Path] | None = None
) -> list[str]:
    """Return `python -I -m control_plane VERB` under the control plane's user."""
    writes = [places.state / name for name in ("control", "orders", "trust")]
    argv = module(CONTROL, verb, *words, "--state", str(places.state))
    return owners.dropped(argv, control, writes, [places.site_file, *(reads or [])])


def _where(places: Places) -> list[str]:
    return ["--state", str(places.state), "--runtime", str(places.runtime)]


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not lines:
        raise Unavailable("join-file printed no path", code="command")
    return lines[-1]


def site_of(
    places: Places, name: str, people: int | None, nodes: int | None, gateway: int | None = None
) -> dict[str, Any]:
    """Return the site's facts: those on disk, or new ones. Other ports than those on disk are a Conflict."""
    found = places.site()
    if not found:
        return {"site": name, "people_port": people or DEFAULT_PORTS[0], "nodes_port": nodes or DEFAULT_PORTS[1],
                "node": node_id(socket.gethostname()), "gateway_port": gateway or DEFAULT_GATEWAY_PORT}
    found.setdefault("gateway_port", gateway or DEFAULT_GATEWAY_PORT)
    if gateway is not None and not programs.running(places, NODE):
        found["gateway_port"] = gateway  # the node alone uses it: it hears of it when it starts
    for key, given in (("people_port", people), ("nodes_port", nodes), ("gateway_port", gateway)):
        if given is not None and given != found.get(key):
            raise Conflict(f"this state has {key} {found.get(key)}", code="site",
                           next_step="interlock down first" if key == "gateway_port" else
                           "leave the option out, or choose another --state")
    if not all(isinstance(found.get(k), t) for k, t in
               (("people_port", int), ("nodes_port", int), ("gateway_port", int), ("node", str), ("site", str))):
        raise Malformed(f"{places.site_file} is not a site file", code="settings")
    return found


def _show(here: Invocation, report: dict[str, Any]) -> None:
    lines: list[object] = [
        table("", ["program", "pid", "state"], [(p["name"], p["pid"], state(p["state"])) for p in report["programs"]]),
        fields({"console": report["people"], "models answer at": report["gateway"], "state": report["state"],
                "first person": report["bootstrap"],
                "master key (KEK)": report["kek"], "back it up": report["backup"]}),
        *(f"[{m['code']}] {m['message']}\nnext step: {m['next_step']}" for m in report["missing"]),
    ]
    here.terminal.result(report, *lines)


def up(
    ctx: typer.Context,
    state_folder: StateOption = None,
    runtime: RuntimeOption = None,
    site: Annotated[str, typer.Option("--site", help="default, or demo.")] = "default",
    people_port: Annotated[int | None, typer.Option("--people-port", min=1, max=65535)] = None,
    nodes_port: Annotated[int | None, typer.Option("--nodes-port", min=1, max=65535)] = None,
    gateway_port: Annotated[int | None, typer.Option("--gateway-port", min=1, max=65535)] = None,
    signer: Annotated[list[Path] | None, typer.Option("--signer", help="Pin this bundle signer (PUB.json).")] = None,
    data_root: Annotated[list[Path] | None, typer.Option("--data-root", help="Runs may read data below it.")] = None,
    environment: Annotated[list[str] | None, typer.Option("--environment", help="NAME=PREFIX that runs use.")] = None,
    softhsm: Annotated[bool, typer.Option("--softhsm", help="Keep upper tiers' keys in SoftHSM (once).")] = False,
    pkcs11: Annotated[Path | None, typer.Option("--pkcs11", help="The HSM: JSON with module, token, pin_file.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when everything is ready.")] = False,
) -> int:
    """Start control plane, kill supervisor and node on this machine. Without root: the control plane alone."""
    here = Invocation.of(ctx)
    places = Places.of(state_folder, runtime)
    if softhsm and pkcs11 is not None:
        raise Usage("one HSM: --softhsm or --pkcs11", code="hsm")
    hsm = ["--softhsm"] if softhsm else ["--module", str(_file(pkcs11))] if pkcs11 is not None else []
    rise = Rise(places, here.terminal, site_of(places, site, people_port, nodes_port, gateway_port),
                [_file(p) for p in signer or []], options(places, data_root or [], environment or []), hsm,
                os.geteuid() == 0)
    try:
        rise.run()
    except (Refusal, KeyboardInterrupt):
        _undo(rise)
        raise
    _show(here, rise.report())
    return 0 if detach else attend(here, places)


def _file(path: Path) -> Path:
    if not path.is_file():
        raise Usage(f"{path} is not a file", code="file")
    return path.resolve()


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Usage(f"cannot read {path}: {error.strerror}", code="file") from None


def _undo(rise: Rise) -> None:
    """End what THIS call started: nothing half-started stays."""
    for name in programs.ENDING:
        found = programs.running(rise.places, name) if name in rise.started else None
        if found is not None:
            with suppress(Refusal):
                programs.end(found)
            rise.places.pid_file(name).unlink(missing_ok=True)


@contextmanager
def _signals() -> Iterator[int]:
    """Yield a descriptor that becomes readable when SIGINT or SIGTERM came; the handlers are put back."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    old = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGINT, signal.SIGTERM)}
    before = signal.set_wakeup_fd(writer)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in old.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def attend(here: Invocation, places: Places) -> int:
    """Stay in the foreground: say which program ended; Ctrl-C drains, a second one stops at once."""
    here.terminal.note("Ctrl-C drains and ends everything; a second one stops at once")
    alive = {n: p for n in programs.ENDING if (p := programs.running(places, n))}
    with _signals() as wake:
        while alive:
            if select.select([wake], [], [], 0.5)[0]:
                break
            for name in [n for n, p in alive.items() if not p.lives]:
                del alive[name]
                here.terminal.note(f"{name} has ended; see {places.log(name)}; start it again with: interlock up")
    if not alive:
        raise Unavailable("all programs have ended", code="program", next_step=f"read {places.state}/logs")
    try:
        down.take_down(places, here.terminal)
    except KeyboardInterrupt:
        down.take_down(places, here.terminal, patience_s=0.0)
    return 0


def bootstrap(
    ctx: typer.Context,
    state_folder: StateOption = None,
    runtime: RuntimeOption = None,
    recover: Annotated[bool, typer.Option("--recover", help="A lost administrator; control plane stopped.")] = False,
) -> None:
    """Make the one-time link of the first administrator. It is shown here and nowhere else."""
    here = Invocation.of(ctx)
    places = Places.of(state_folder, runtime)
    if not places.site_file.exists():
        raise NotFound(f"there is no site in {places.state}", code="site",
                       next_step="start it with: interlock up, or name it with --state")
    control = owners.owner(owners.CONTROL_USER) if os.geteuid() == 0 else None
    words = ["--recover"] if recover else []
    said = programs.ask(control_argv(places, control, "bootstrap", *words), what="bootstrap")
    link = next((w for w in said.split() if "/enrol#" in w), "")
    if not link:
        raise programs.refusal_in(said) or Unavailable("bootstrap printed no link", code="command")
    here.terminal.result({"link": link}, link, "works once, for 15 minutes: interlock enrol LINK --name NAME")
