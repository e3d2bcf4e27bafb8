"""Where a node keeps things (docs/decisions/0001-seams.md §1)."""

import os
from dataclasses import dataclass
from pathlib import Path

from interlock.errors import Conflict, NotFound, Unavailable, Usage
from interlock.places import SOCKET_BYTES, default_runtime, default_state, too_long


@dataclass(frozen=True)
class Folders:
    """`state` survives a reboot, `runtime` does not. Both absolute."""

    state: Path
    runtime: Path

    @property
    def node(self) -> Path:
        """Root only: key, certificate, spool, used orders, code."""
        return self.state / "node"

    @property
    def shared(self) -> Path:
        """Readable by the broker and gateway workers."""
        return self.state / "shared"

    @property
    def supervisor(self) -> Path:
        """The supervisor's own folder; the node reads trust.json there."""
        return self.state / "supervisor"

    @property
    def broker_spool(self) -> Path:
        """The broker's own record stream."""
        return self.state / "broker" / "spool"

    @property
    def store(self) -> Path:
        """The broker's committed checkpoints: `RUN/STEP-ATTEMPT/`."""
        return self.state / "broker" / "store"

    @property
    def gateway_spool(self) -> Path:
        """The gateway's own record stream."""
        return self.state / "gateway" / "spool"

    @property
    def work(self) -> Path:
        """One folder for each attempt until all of it was delivered."""
        return self.node / "work"

    @property
    def page(self) -> Path:
        """The stop page that the supervisor rewrites."""
        return self.runtime / "stop-page"

    @property
    def stop_state(self) -> Path:
        """The state file that the stop page's hash is over."""
        return self.runtime / "stop-state.json"

    @property
    def socket(self) -> Path:
        """The supervisor's socket."""
        return self.runtime / "supervisor.sock"

    def run(self, run: str, attempt: int) -> Path:
        """Mounts and guest socket of one attempt."""
        return self.runtime / "runs" / f"{run}.{attempt}"

    def deadline(self, run: str, attempt: int) -> Path:
        """The deadline page of one attempt."""
        return self.runtime / "deadlines" / f"{run}.{attempt}"


def folders(state: str | None, runtime: str | None) -> Folders:
    """Return the folders that the command line names, or the defaults of 0001-seams §1.

    Raises Usage (``usage.path``) when a socket's path below them would be over 100 bytes.
    """
    found = Path(state) if state else default_state()
    run = Path(runtime) if runtime else default_runtime(found)
    # resolved once: the sandbox opens its sources without following symlinks
    both = Folders(Path(os.path.realpath(found)), Path(os.path.realpath(run)))
    # the longest socket path is that of a run: run_<32 hex>.<attempt up to 10000>
    if too_long(both.run("run_" + "0" * 32, 10_000) / "guest.sock"):
        raise Usage(
            f"a socket below {both.runtime} would have a path over {SOCKET_BYTES} bytes", code="path",
            next_step="choose a shorter --runtime",
        )
    return both


def require_root() -> None:
    """Refuse without root: a uid for each run needs CAP_SETUID. Raises Unavailable (``unavailable.root``)."""
    if os.geteuid() != 0:
        raise Unavailable(
            "a node starts runs under a uid of their own, which needs root", code="root",
            next_step="start it with sudo; control plane, policy and audit work without root",
        )


def require_joined(found: Folders) -> None:
    """Refuse a node that never joined (``not_found.node``) or whose join broke off (``conflict.half_made``)."""
    parts = [found.node / n for n in ("link.json", "node.key.pem", "node.pem", "ca.pem")]
    parts.append(found.supervisor / "trust.json")
    present = [p for p in parts if p.exists()]
    if not present and not staging(found).exists():
        raise NotFound(
            "this host has not joined a site", code="node",
            next_step="make a join file and run: python -I -m runners join FILE",
        )
    if len(present) != len(parts):
        missing = next(p for p in parts if p not in present)
        raise half_made(found, f"{missing} is missing")


def staging(found: Folders) -> Path:
    """Where a join builds the node folder before it is moved into place in one step."""
    return found.state / ".node-joining"


def half_made(found: Folders, why: str) -> Conflict:
    """Return the refusal of a state that a broken join left behind."""
    return Conflict(
        f"the node's state is half made: {why}", code="half_made",
        next_step=f"move {found.node} and {staging(found)} away, then join with a new join file",
    )
