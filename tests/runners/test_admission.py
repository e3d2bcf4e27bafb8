"""The node's own gate: asked for the launch and for each dataset, with this host's own stop page and records."""

from types import SimpleNamespace

import pytest

from interlock.call import Action
from interlock.errors import Denied, Halted, NotRecorded, Stale
from interlock.event import Written
from interlock.order import Dataset, Mode, Scope, ScopeKind, StopOrder
from policy import bundle
from policy.facts import Facts
from policy.rbac import Engine
from runners import admission
from tests.runners.programs import give_bundle, order
from tests.runners.simulator import Site

STOP = StopOrder("stop_1", Scope(ScopeKind.EVERYTHING), Mode.KILL, 1, "oncall", "a test")


class Half:
    """The half of a station that admission looks at."""

    def __init__(self, site: Site) -> None:
        give_bundle(site)
        engine = Engine(bundle.read(site.bundle[1], bundle.pinned(site.signers), None))
        self.stop, self.age, self.roles, self.events, self.full = None, 0, frozenset({"researcher"}), [], False
        self.asked: list[object] = []
        self.page = SimpleNamespace(stopped=self._stopped, epoch=lambda: 3)
        self.spool = SimpleNamespace(record=self._record)
        self.entitlements = SimpleNamespace(
            decide=engine.decide, facts=lambda _: Facts(roles=self.roles, bundle_age_ms=self.age))

    def _stopped(self, labels):
        self.asked.append(labels)
        return self.stop

    def _record(self, event):
        if self.full:
            raise NotRecorded("full", code="full")
        self.events.append(event)
        return Written(event.id, "s", 0)


@pytest.fixture
def half(short):
    return Half(Site(short / "site"))


@pytest.fixture
def made(short):
    return order(Site(short / "other"), "true", datasets=(Dataset("d", "/srv/d"),), restarts=1)


def test_there_is_a_permit_for_the_launch_and_for_each_dataset(half, made):
    found = admission.ask(half, made)
    assert (found.launch.action, found.launch.resource, found.launch.epoch) == (Action.LAUNCH, "pool/default", 3)
    assert (found.data["d"].action, found.data["d"].resource) == (Action.READ_DATA, "dataset/srv/d")
    assert half.asked == [made.labels, made.labels]  # labels of the signed order, nothing else
    assert [e.id for e in half.events] == [found.data["d"].record, found.launch.record]
    assert half.events[1].facts["call"]["bound"] == made.plan.digest()


def test_refuses_when_the_stop_page_covers_the_run(half, made):
    half.stop = STOP
    with pytest.raises(Halted):
        admission.ask(half, made)
    half.stop = None
    assert admission.ask(half, made)


def test_refuses_when_there_is_no_role(half, made):
    half.roles = frozenset()
    with pytest.raises(Denied):
        admission.ask(half, made)


def test_refuses_when_entitlements_are_too_old(half, made):
    half.age = 600_001
    with pytest.raises(Stale):
        admission.ask(half, made)
    half.age = 600_000
    assert admission.ask(half, made)


def test_refuses_when_nothing_can_be_recorded(half, made):
    half.full = True
    with pytest.raises(NotRecorded):
        admission.ask(half, made)
