"""What broker and gateway decide with: signed, fresh, and written by root alone."""

import json
import os

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from interlock.call import Action, Call, Resource, Subject
from interlock.canon import canonical
from interlock.tier import Tier
from policy.facts import NEVER_MS
from runners.entitlements import Entitlements
from runners.join import join
from runners.pinned import Pinned
from runners.shared_view import SharedView
from runners.upstream import Upstream
from tests.runners.conftest import needs_root
from tests.runners.programs import give_bundle

pytestmark = needs_root
LAUNCH = Call(Action.LAUNCH, Subject("ada", "lab", person="ada"), Resource("pool", "default", "lab", Tier.NONE))


@pytest.fixture
def launcher(site, simulator, host, short):
    """The launcher's entitlements of a node that joined after two signers were pinned."""
    give_bundle(site)
    join(simulator.join_file(short / "j"), host)
    with Upstream(host) as upstream:
        pins = Pinned(host)
        yield Entitlements(host, upstream, pins.grant_keys, pins.signers)


def _confirmed(host, **changed):
    path = host.shared / "confirmed.json"
    path.write_bytes(canonical({**json.loads(path.read_bytes()), **changed}))


def test_the_view_decides_as_the_launcher_does(launcher, host):
    view = SharedView(host)
    assert view.snapshot() is None
    assert view.age_ms() == NEVER_MS
    assert view.decide(LAUNCH, view.facts_of("ada", "lab")).code == "no_bundle"
    launcher.refresh()
    facts = view.facts_of("ada", "lab", mfa_age_ms=5, mfa_bound="x", approvals=["ada", "eve"], own=True)
    assert (facts.roles, facts.mfa_age_ms, facts.approvals, facts.own) == ({"researcher"}, 5, 1, True)
    assert abs(view.age_ms() - launcher.age_ms()) < 200
    assert view.decide(LAUNCH, facts) == launcher.decide(LAUNCH, facts)
    assert view.decide(LAUNCH, facts).allowed
    assert view.facts_of("eve", "lab").roles == frozenset()


def test_a_disabled_person_has_no_role_at_the_next_look(launcher, host, site, monkeypatch):
    view = SharedView(host)
    launcher.refresh()
    assert view.facts_of("ada", "lab").roles == {"researcher"}
    site.roles = []
    launcher.refresh()
    assert view.facts_of("ada", "lab").roles == frozenset()


@pytest.mark.parametrize("changed", [
    {"nonce": "0" * 32}, {"boot_id": "0" * 32}, {"bundle_version": 2}, {"confirmed_ms": 2**52},
])
def test_refuses_to_call_fresh_what_was_not_confirmed_together(launcher, host, changed):
    launcher.refresh()
    good = (host.shared / "confirmed.json").read_bytes()
    _confirmed(host, **changed)
    assert SharedView(host).age_ms() == NEVER_MS
    (host.shared / "confirmed.json").write_bytes(good)
    assert SharedView(host).age_ms() < 5_000  # control


def test_between_two_files_the_age_of_before_goes_on(launcher, host):
    view = SharedView(host)
    launcher.refresh()
    before = (host.shared / "confirmed.json").read_bytes()
    first = view.age_ms()
    launcher.refresh()
    (host.shared / "confirmed.json").write_bytes(before)  # the new snapshot is there, its confirmation is not
    assert first <= view.age_ms() < 5_000
    assert view.snapshot() is not None


@pytest.mark.parametrize("name", ["snapshot.json", "bundle/active", "trust.json", "signers.json"])
def test_refuses_when_others_may_write_a_file(launcher, host, site, name):
    if name == "signers.json":  # the two signers of the site move from the trust list to the local pins
        (host.shared / name).write_bytes(canonical(site.signers))
    launcher.refresh()
    (host.shared / name).chmod(0o666)
    view = SharedView(host)
    facts = view.facts_of("ada", "lab")
    assert not (view.decide(LAUNCH, facts).allowed and facts.bundle_age_ms < 60_000)
    (host.shared / name).chmod(0o644)
    view = SharedView(host)
    assert view.decide(LAUNCH, view.facts_of("ada", "lab")).allowed  # control


def test_refuses_when_another_key_signed_the_snapshot(launcher, host, site):
    launcher.refresh()
    path = host.shared / "snapshot.json"
    good = path.read_bytes()
    true_key, site.grant = site.grant, Ed25519PrivateKey.generate()
    nonce = json.loads((host.shared / "confirmed.json").read_bytes())["nonce"]
    path.write_bytes(canonical(site.snapshot(nonce).as_json()))
    view = SharedView(host)
    assert (view.snapshot(), view.age_ms()) == (None, NEVER_MS)
    site.grant = true_key
    path.write_bytes(good)
    assert view.snapshot() is not None  # control
    assert view.age_ms() < 5_000


def test_local_pins_are_passed_on_and_taken_back(launcher, host, site):
    launcher.refresh()
    copy = host.shared / "signers.json"
    assert json.loads(copy.read_bytes()) == []
    row = {"name": "local", "key": site.signers[0]["key"]}
    (host.node / "signers.json").write_bytes(canonical([row]))
    os.chmod(host.node / "signers.json", 0o600)
    launcher.refresh()
    assert json.loads(copy.read_bytes()) == [row]
    (host.node / "signers.json").unlink()
    launcher.refresh()
    assert json.loads(copy.read_bytes()) == []
