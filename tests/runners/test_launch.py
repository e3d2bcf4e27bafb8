"""The effect itself: permit, probes and data roots are looked at right before a real sandbox starts."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from interlock.call import Action
from interlock.errors import Denied, Halted, LayerMissing
from interlock.order import Dataset
from interlock.permit import boottime_ms, issue
from interlock.touched import resource_of
from runners import launch
from runners.admission import Admitted
from runners.folders import Folders
from runners.survey import Survey
from sandbox import layers, uids
from sandbox.cgroup import Limits, own_tree
from sandbox.trial import put_down, write_page
from sandbox.work import remove_leftovers
from tests.runners.conftest import needs_root
from tests.runners.programs import order
from tests.runners.simulator import Site

pytestmark = [pytest.mark.root, needs_root]


class Ground:
    """A group, a page and what of a Station a launch needs; `epoch` and `unproven` bend it."""

    def __init__(self, short) -> None:
        self.order = order(Site(short / "site"), "sleep", "60")
        self.epoch, self.unproven = 0, False
        first = 60_100 + os.getpid() % 9 * 100
        self.pool = uids.Pool(first, first + 99)
        self.runtime = short / "r"
        self.runtime.mkdir(mode=0o755)
        self.tree = own_tree(f"h3l{os.getpid()}")
        self.group = self.tree.create("l.1", Limits(64, 256, None))
        self.page = short / "page"
        write_page(self.page, 60)
        self.station = SimpleNamespace(
            folders=Folders(short / "s", self.runtime), pool=self.pool, host=layers.this_host(), roots=(),
            survey=SimpleNamespace(require=self._require), page=SimpleNamespace(epoch=lambda: self.epoch),
            environments={},
        )

    def _require(self, profile) -> None:
        if self.unproven:
            raise LayerMissing("not proven", code="probe")

    def start(self, made=None):
        made = made or self.order
        permit = issue(call="c", action=Action.LAUNCH, resource=resource_of(made.plan).path, run=made.run, epoch=0,
                       expires_ms=boottime_ms() + 5000, record="r")
        return launch.start(Admitted(permit, {}), made, self.station, self.group, self.page, "")  # type: ignore

    def nothing_is_left(self) -> bool:
        return not self.group.pids() and not list((self.runtime / "runs").glob("*"))


@pytest.fixture
def ground(short):
    found = Ground(short)
    yield found
    put_down(found.group)
    remove_leftovers(found.runtime)  # also when the guard under test is missing
    found.tree.remove()


def _ends(ground: Ground) -> None:
    """The control: it starts, blocked, and can be taken away."""
    launched = ground.start()
    assert launched.started.process.poll() is None
    assert len(ground.group.pids()) >= 1
    launched.started.kill()
    launched.started.process.wait()
    launched.started.close()
    launched.disk.remove()


def test_refuses_when_a_stop_came_since_the_permit(ground):
    ground.epoch = 1
    with pytest.raises(Halted) as refusal:
        ground.start()
    assert refusal.value.code == "stopped.epoch"
    assert ground.nothing_is_left()
    ground.epoch = 0
    _ends(ground)


def test_refuses_when_the_profile_is_not_proven(ground):
    ground.unproven = True
    with pytest.raises(LayerMissing):
        ground.start()
    assert not (ground.runtime / "runs").exists()
    ground.unproven = False
    _ends(ground)


def test_refuses_when_a_dataset_is_outside_every_root(ground):
    plan = replace(ground.order.plan, datasets=(Dataset("d", "/usr/share"),))
    with pytest.raises(Denied) as refusal:
        ground.start(replace(ground.order, plan=plan))
    assert refusal.value.code == "denied.data_root"


def test_a_survey_that_did_not_look_proves_nothing(short):
    found = Survey(layers.this_host(), Folders(short, short), (), uids.Pool(), lambda _: None, "node-1")
    assert found.as_json()["tiers"] == []
    with pytest.raises(LayerMissing) as refusal:
        found.require(SimpleNamespace(shape=SimpleNamespace(name="strict"), probed_as=lambda: "x"))  # type: ignore
    assert refusal.value.code == "layer_missing.probe"


def test_refuses_when_a_probe_does_not_hold(short, monkeypatch):
    """A host whose probes are not all BLOCKED launches nothing and says so on record."""
    from sandbox import probe

    events = []
    host = Folders(short / "s", short / "r")
    host.node.mkdir(parents=True)
    host.runtime.mkdir(mode=0o755)
    monkeypatch.setattr(probe, "PROBES", probe.PROBES[:2])
    monkeypatch.setattr(probe, "_CACHE", {})
    monkeypatch.setattr(probe, "judge", lambda output: ("ESCAPED", "the test says so"))
    first = 60_100 + os.getpid() % 9 * 100
    found = Survey(layers.this_host(), host, (), uids.Pool(first, first + 99), events.append, "node-1")
    found.look()
    assert found.as_json()["tiers"] == []
    assert [e.type.value for e in events] == ["node.probed", "incident.raised"] * 2
    monkeypatch.undo()
    monkeypatch.setattr(probe, "PROBES", probe.PROBES[:2])
    monkeypatch.setattr(probe, "_CACHE", {})
    (host.node / "probes.json").unlink()
    found.probed.clear()
    found.look()  # control
    assert found.as_json()["tiers"] == ["none", "high", "critical"]
    assert not list(host.runtime.iterdir())
