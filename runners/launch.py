"""The effect behind the permit: one sandbox, blocked until the supervisor says GO.

Everything slow (code files, disk, uid) is done first; the permit and the stop epoch are looked at right before
the sandbox starts. What fails tears down what it made.
"""

import re
import socket
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from interlock.call import Action
from interlock.canon import digest_bytes
from interlock.durable import write_over
from interlock.errors import Malformed, Untrusted
from interlock.leash import RUN_ENV
from interlock.order import Dataset, LaunchOrder, Plan
from interlock.touched import action_of, dataset_of, resource_of
from runners import environments, inference
from runners.admission import Admitted
from runners.broker_line import doorway
from runners.dataset import within
from runners.run_uid import with_uid
from runners.station import Station
from sandbox import work
from sandbox.cgroup import Group
from sandbox.profile import EngineSeat, Profile, for_plan, refuse_ranks, shape_for
from sandbox.start import Started, StartSpec
from sandbox.start import start as start_sandbox

GUEST_SOCKET, ENGINE_SOCKET = "guest.sock", "engine.sock"
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")


@dataclass
class Launched:
    """A sandbox that waits for GO, and what must be taken away after it.

    `listener` is the guest socket, `engine` the one at which an engine dials; None where the plan has none.
    """

    started: Started
    profile: Profile
    disk: work.Disk
    uid: int
    group: Group
    listener: socket.socket | None
    engine: socket.socket | None = None

    def close_listeners(self) -> None:
        """Close our copies: the broker alone accepts guests, the gateway alone accepts engines."""
        for door in (self.listener, self.engine):
            if door is not None:
                door.close()
        self.listener = self.engine = None


def require(station: Station, plan: Plan) -> None:
    """Refuse a plan that this node cannot carry out, before anything is done for it.

    Raises NotFound (``not_found.environment``), Denied (``denied.profile``: several ranks where there is no TCP) or
    Unavailable (``unavailable.gateway``: an engine that nobody could call).
    """
    environments.chosen(plan.environment, station.environments)
    refuse_ranks(plan, shape_for(plan.tier))
    if plan.serve:
        station.gateway()


def fetch_code(station: Station, order: LaunchOrder, folder: Path) -> str:
    """Put the code files of the plan into `folder`/code, each with the digest that the plan names.

    Returns the folder's path, or an empty text when the plan has none. Raises Untrusted, Malformed, Unavailable.
    """
    if not order.plan.code:
        return ""
    place = folder / "code"
    place.mkdir(mode=0o755)
    place.chmod(0o755)
    for name, digest in order.plan.code:
        write_over(place / name, _code_bytes(station, digest), 0o444)
    return str(place)


def _code_bytes(station: Station, digest: str) -> bytes:
    if not _DIGEST.match(digest):
        raise Malformed("a code file is named by sha256: and 64 hex digits", code="digest")
    kept = station.folders.node / "code" / digest.removeprefix("sha256:")
    if kept.exists():
        data = kept.read_bytes()
        if digest_bytes(data) == digest:
            return data
        kept.unlink()  # it rotted on disk: fetch it again
    data = station.upstream.code(digest)  # verified there
    write_over(kept, data, 0o600)
    return data


def _resolved(station: Station, order: LaunchOrder) -> Plan:
    """Return the plan with dataset paths as they are on this host; raises Denied (``denied.data_root``)."""
    found = tuple(Dataset(d.name, str(within(d.path, station.roots))) for d in order.plan.datasets)
    return replace(order.plan, datasets=found)


def check(permits: Admitted, order: LaunchOrder, epoch: int) -> None:
    """Refuse right before the effect: every permit is for this, alive, and no stop came in between.

    Raises Untrusted (``untrusted.permit``) or Halted (``stopped.epoch``).
    """
    permits.launch.check(action_of(order.plan, order.attempt), resource_of(order.plan).path, epoch=epoch)
    for dataset in order.plan.datasets:
        permit = permits.data.get(dataset.name)
        if permit is None:
            raise Untrusted("a dataset has no permit", code="permit")
        permit.check(Action.READ_DATA, dataset_of(order.plan, dataset).path, epoch=epoch)


def start(permit: Admitted, order: LaunchOrder, station: Station, group: Group, page: Path, code: str) -> Launched:
    """Start one attempt in `group` under a uid of its own; it waits for GO.

    Args: `permit` of the gate, checked here; `page` the attempt's deadline page; `code` the folder of
    `fetch_code`. Raises Untrusted, Halted, Denied, LayerMissing, Conflict; then nothing is left behind.
    """
    plan = _resolved(station, order)
    return with_uid(station.pool, lambda uid: _start(permit, order, station, plan, uid, group, page, code))


def _start(
    permit: Admitted, order: LaunchOrder, station: Station, plan: Plan, uid: int, group: Group, page: Path, code: str
) -> Launched:
    folder = station.folders.run(order.run, order.attempt)
    broker = str(folder / GUEST_SOCKET) if plan.guest else ""
    engine = EngineSeat(str(Path(str(inference.__file__)).resolve().parent), str(folder / ENGINE_SOCKET))
    names = ((RUN_ENV, order.run), ("INTERLOCK_ATTEMPT", str(order.attempt)),
             ("INTERLOCK_WEIGHTS", ",".join(plan.weights)))
    profile = for_plan(
        plan, uid, station.host, code=code, broker=broker, env=names, engine=engine if plan.serve else None,
        environment=environments.chosen(plan.environment, station.environments),
    )
    station.survey.require(profile)
    with ExitStack() as undo:
        disk = work.mount(station.folders.runtime, folder.name, profile)
        undo.callback(disk.remove)
        listener = undo.enter_context(doorway(folder, uid)) if plan.guest else None
        dialled = undo.enter_context(doorway(folder, uid, ENGINE_SOCKET, socket.SOCK_STREAM)) if plan.serve else None
        spec = StartSpec(profile, plan.argv, group, page, disk)
        check(permit, order, station.page.epoch())
        launched = Launched(start_sandbox(spec), profile, disk, uid, group, listener, dialled)
        undo.pop_all()
        return launched
