"""What this host isolates, shown by trying: the layers found, and the escape probes run inside each profile.

A profile whose probes did not all hold launches nothing here until the next start, and raises an incident.
Reports are kept per boot and profile; a reboot, another kernel's filter or another profile asks again.
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlock.errors import LayerMissing, Refusal
from interlock.event import Event, EventType
from interlock.order import Plan
from interlock.tier import PROFILES, Tier
from runners.broker_line import doorway
from runners.folders import Folders
from runners.run_uid import with_uid
from sandbox import layers, probe
from sandbox.cgroup import Tree, own_tree
from sandbox.profile import Host, Profile, for_plan, shape_for
from sandbox.uids import Pool

# one tier for each shape of the sandbox; the guest socket opens further calls and is proven when first asked for
AT_START = (Tier.NONE, Tier.CRITICAL)


@dataclass(frozen=True)
class Probed:
    """The report of one kind; `report` is None when the probes could not run, `why` says it."""

    name: str
    digest: str
    report: probe.ProbeReport | None
    why: str = ""

    @property
    def failed(self) -> tuple[str, ...]:
        """Return the ids of the probes that did not hold, or why they could not run."""
        return (self.why,) if self.report is None else tuple(r.id for r in self.report.failed)

    def as_json(self) -> dict[str, Any]:
        """Return one row of `profiles` of the node facts."""
        total = 0 if self.report is None else len(self.report.results)
        return {"name": self.name, "digest": self.digest, "probes": {"total": total, "failed": len(self.failed)}}


class Survey:
    """The facts of this host. `look` fills them before any launch; `_lock` keeps two from probing at once.

    Args: `record` makes an event durable; `node` is this node's id; `environments` names of what it offers, and
    `gateway` whether engines can be served here, both told to the control plane.
    """

    def __init__(
        self, host: Host, folders: Folders, roots: Sequence[Path], pool: Pool, record: Callable[[Event], Any],
        node: str, *, environments: Sequence[str] = (), gateway: bool = False,
    ) -> None:
        self.host, self.folders, self.roots, self.pool = host, folders, tuple(roots), pool
        self._environments, self._gateway = tuple(environments), gateway
        self._record, self._node = record, node
        self._lock = threading.Lock()
        self.found: list[layers.Layer] = []
        self.probed: dict[str, Probed] = {}

    def look(self) -> None:
        """Survey the layers and run the probes, each result on record. Raises NotRecorded."""
        self.found = layers.survey()
        for tier in AT_START:
            self.prove(tier, False)

    def prove(self, tier: Tier, guest: bool, ranks: int = 1) -> None:
        """Run the probes of this kind unless they ran; takes seconds. Raises NotRecorded.

        A kind is a shape and its open exceptions: the guest's socket, and what several ranks need of the kernel.
        """
        name = shape_for(tier).name + ("+guest" if guest else "") + ("+ranks" if ranks > 1 else "")
        with self._lock:
            if name in self.probed:
                return
            found = self._probe(name, Plan(("true",), tier, "probe", guest=guest, ranks=ranks))
            facts = {**found.as_json(), "failed": list(found.failed)}
            self._record(Event(EventType.NODE_PROBED, f"node/{self._node}", facts=facts))
            if found.failed:
                self._record(Event(EventType.INCIDENT, f"node/{self._node}", facts={"code": "probe", **facts}))
            self.probed[name] = found

    def _probe(self, name: str, plan: Plan) -> Probed:
        shape = shape_for(plan.tier)
        missing = layers.shape_missing(shape, self.found)
        if missing:
            return Probed(name, shape.digest(), None, f"layer:{missing[0].name}")
        try:
            return self._run_probes(name, plan)
        except Refusal as refusal:
            return Probed(name, shape.digest(), None, refusal.code)

    def _run_probes(self, name: str, plan: Plan) -> Probed:
        """Run them in the profile of a small plan, in groups and mounts that are gone afterwards."""
        place = self.folders.runtime / "probe"
        place.mkdir(mode=0o755, exist_ok=True)
        tree = own_tree("interlock-probes-" + hashlib.sha256(os.fsencode(place)).hexdigest()[:8])

        def run(uid: int) -> Probed:
            with doorway(place, uid) if plan.guest else nullcontext():
                socket = str(place / "guest.sock") if plan.guest else ""
                profile = for_plan(plan, uid, self.host, broker=socket)
                report = _prove(profile, tree, place, self.folders.node / "probes.json")
            self.pool.release(uid)
            return Probed(name, profile.probed_as(), report)

        try:
            return with_uid(self.pool, run)
        finally:
            with suppress(OSError):
                tree.remove()
            shutil.rmtree(place)

    def require(self, profile: Profile) -> None:
        """Refuse a profile that is not proven here since this boot. Raises LayerMissing (``layer_missing.probe``)."""
        for found in self.probed.values():
            if found.report is not None and found.report.profile == profile.probed_as():
                probe.require(found.report, profile)
                return
        raise LayerMissing(
            f"the probes of sandbox profile {profile.shape.name} did not run on this host", code="probe",
            next_step="see interlock doctor; start the node again after the repair",
            details={"failed": [w for p in self.probed.values() for w in p.failed]},
        )

    def as_json(self) -> dict[str, Any]:
        """Return the body of POST /node/facts."""
        every = list(self.probed.values())
        bad = {p.name for p in every if p.failed}
        able = [t for t in layers.tiers(self.found) if PROFILES[Tier(t)].sandbox not in bad]
        return {
            "layers": [x.as_json() for x in self.found], "profiles": [p.as_json() for p in every],
            "tiers": able if every else [], "data_roots": [str(r) for r in self.roots],
            "environments": list(self._environments), "gateway": self._gateway,
        }


def _prove(profile: Profile, tree: Tree, place: Path, cache: Path) -> probe.ProbeReport:
    """Return the report of `profile`. What did not hold is asked once more, for the cache may tell of a host that
    was repaired since and a busy host may not let a probe finish; an escape is believed at once."""
    report = probe.run_all(profile, tree, place, cache=cache)
    if not report.failed:
        return report
    again = probe.run_all(profile, tree, place, cache=cache, fresh=True)
    return report if any(r.verdict == "ESCAPED" for r in report.failed) else again
