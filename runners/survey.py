"""What this host isolates, shown by trying: the layers found, and the escape probes run inside each profile.

A profile whose probes did not all hold launches nothing here until the next start, and raises an incident.
Reports are kept per boot and profile; a reboot, another kernel's filter or another profile asks again.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interlock.errors import LayerMissing, Refusal
from interlock.event import Event, EventType
from interlock.order import Plan
from interlock.tier import PROFILES, Tier
from runners.broker_line import doorway
from runners.folders import Folders
from sandbox import layers, probe
from sandbox.cgroup import own_tree
from sandbox.profile import Host, Profile, for_plan, shape_for
from sandbox.uids import Pool

# one tier for each shape of the sandbox, with and without the guest socket: each opens other calls
KINDS = tuple((tier, guest) for tier in (Tier.NONE, Tier.CRITICAL) for guest in (False, True))


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


@dataclass
class Survey:
    """The facts of this host; `look` fills them once, before any launch."""

    host: Host
    folders: Folders
    roots: Sequence[Path]
    pool: Pool
    layers: list[layers.Layer] = field(default_factory=list)
    probed: list[Probed] = field(default_factory=list)

    def look(self, record: Callable[[Event], Any], node: str) -> None:
        """Survey the layers and run the probes, each result on record. Raises NotRecorded."""
        self.layers = layers.survey()
        for tier, guest in KINDS:
            found = self._probe(tier, guest)
            self.probed.append(found)
            facts = {**found.as_json(), "failed": list(found.failed)}
            record(Event(EventType.NODE_PROBED, f"node/{node}", facts=facts))
            if found.failed:
                record(Event(EventType.INCIDENT, f"node/{node}", facts={"code": "probe", **facts}))

    def _probe(self, tier: Tier, guest: bool) -> Probed:
        shape = shape_for(tier)
        name = f"{shape.name}+guest" if guest else shape.name
        missing = layers.shape_missing(shape, self.layers)
        if missing:
            return Probed(name, shape.digest(), None, f"layer:{missing[0].name}")
        try:
            with self._profile(tier, guest) as (profile, place):
                tree = own_tree("interlock-probes-" + hashlib.sha256(os.fsencode(place)).hexdigest()[:8])
                try:
                    cache = self.folders.node / "probes.json"
                    return Probed(name, profile.probed_as(), probe.run_all(profile, tree, place, cache=cache))
                finally:
                    with suppress(OSError):
                        tree.remove()
        except Refusal as refusal:
            return Probed(name, shape.digest(), None, refusal.code)

    @contextmanager
    def _profile(self, tier: Tier, guest: bool) -> Iterator[tuple[Profile, Path]]:
        """Yield the profile of a small plan under a free uid, and a place that is gone afterwards."""
        place = self.folders.runtime / "probe"
        place.mkdir(mode=0o755, exist_ok=True)
        uid = self.pool.take()
        listener = doorway(place, uid) if guest else None
        try:
            plan = Plan(("true",), tier, "probe", guest=guest)
            yield for_plan(plan, uid, self.host, broker=str(place / "guest.sock") if guest else ""), place
        finally:
            if listener is not None:
                listener.close()
            self.pool.release(uid)
            shutil.rmtree(place)

    def require(self, profile: Profile) -> None:
        """Refuse a profile that is not proven here since this boot. Raises LayerMissing (``layer_missing.probe``)."""
        for found in self.probed:
            if found.report is not None and found.report.profile == profile.probed_as():
                probe.require(found.report, profile)
                return
        raise LayerMissing(
            f"the probes of sandbox profile {profile.shape.name} did not run on this host", code="probe",
            next_step="see interlock doctor; start the node again after the repair",
            details={"failed": [w for p in self.probed for w in p.failed]},
        )

    def as_json(self) -> dict[str, Any]:
        """Return the body of POST /node/facts."""
        bad = {p.name for p in self.probed if p.failed}
        able = [t for t in layers.tiers(self.layers) if PROFILES[Tier(t)].sandbox not in bad]
        return {
            "layers": [x.as_json() for x in self.layers], "profiles": [p.as_json() for p in self.probed],
            "tiers": able if self.probed else [], "data_roots": [str(r) for r in self.roots],
        }
