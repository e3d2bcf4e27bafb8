"""What a node may decide with: signed, fresh, and roles from the snapshot alone."""

import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from interlock.errors import Malformed, Unavailable, Untrusted
from policy import bundle
from runners.entitlements import NEVER_MS, Entitlements
from runners.pinned import Pinned, pin_signer
from runners.upstream import Upstream
from tests.runners.conftest import needs_root
from tests.runners.programs import EXAMPLES, give_bundle, order

pytestmark = needs_root


@pytest.fixture
def made(site, simulator, host, short):
    """Entitlements of a node that joined after two signers were pinned."""
    from runners.join import join

    give_bundle(site)
    join(simulator.join_file(short / "j"), host)
    with Upstream(host) as upstream:
        pins = Pinned(host)
        yield lambda: Entitlements(host, upstream, pins.grant_keys, pins.signers)


def test_roles_come_from_the_snapshot_not_from_the_order(made, site):
    found = made()
    wanted = order(site, "true", facts={"roles": ["administrator"], "mfa_age_ms": 5, "mfa_bound": "x",
                                        "approvals": ["ada", "eve", "eve", "bob"]})
    assert found.facts(wanted).roles == frozenset()
    assert found.age_ms() == NEVER_MS
    found.refresh()
    facts = found.facts(wanted)
    assert facts.roles == {"researcher"}
    assert (facts.mfa_age_ms, facts.mfa_bound, facts.approvals) == (5, "x", 2)  # doubles and the owner do not count
    assert found.age_ms() < 5_000


@pytest.mark.parametrize("told", [{}, {"mfa_age_ms": True, "approvals": True}, {"mfa_age_ms": "1", "approvals": -3}])
def test_facts_of_an_odd_kind_count_as_absent(made, site, told):
    facts = made().facts(order(site, "true", facts=told))
    assert (facts.mfa_age_ms, facts.mfa_bound, facts.approvals, facts.own) == (None, "", 0, False)


def test_the_age_counts_from_sending(made, site, monkeypatch):
    found, honest = made(), site.snapshot

    def slow(nonce):
        time.sleep(0.6)
        return honest(nonce)

    monkeypatch.setattr(site, "snapshot", slow)
    found.refresh()
    assert found.age_ms() >= 600


def test_refuses_when_the_snapshot_answers_another_nonce(made, site, monkeypatch):
    found, honest = made(), site.snapshot
    old = honest("0" * 32)
    monkeypatch.setattr(site, "snapshot", lambda nonce: old)
    with pytest.raises(Untrusted):
        found.refresh()
    assert found.age_ms() == NEVER_MS
    monkeypatch.setattr(site, "snapshot", honest)
    found.refresh()


def test_refuses_when_another_key_signed_the_snapshot(made, site):
    found, true_key = made(), site.grant
    site.grant = Ed25519PrivateKey.generate()
    with pytest.raises(Untrusted):
        found.refresh()
    site.grant = true_key
    found.refresh()


def test_refuses_when_the_bundle_is_of_strangers_and_keeps_the_last_good_one(made, site):
    found = made()
    found.refresh()
    good = site.bundle
    archive = bundle.pack(EXAMPLES, version=2)
    for _ in range(2):
        archive = bundle.sign_archive(archive, Ed25519PrivateKey.generate())
    site.bundle = (2, archive)
    with pytest.raises(Untrusted):
        found.refresh()
    assert found.version == 1
    time.sleep(0.05)
    assert found.age_ms() >= 50  # entitlements of a bundle that is not in force here confirm nothing
    site.bundle = good
    found.refresh()
    assert found.age_ms() < 50_000


def test_a_lower_version_is_never_taken_and_confirms_nothing(made, site):
    found = made()
    found.refresh()
    site.bundle = (0, b"")  # a restored control plane
    before = found.age_ms()
    time.sleep(0.05)
    found.refresh()
    assert found.version == 1
    assert found.age_ms() >= before + 50


def test_a_restarted_node_takes_up_its_last_good_bundle_but_trusts_no_old_snapshot(made, simulator):
    made().refresh()
    simulator.away()
    again = made()
    assert again.version == 1
    assert again.age_ms() == NEVER_MS
    with pytest.raises(Unavailable):
        again.refresh()


def test_a_signer_pinned_by_local_root_counts(site, simulator, host, short):
    from runners.join import join

    join(simulator.join_file(short / "j"), host)  # before any signer was known
    give_bundle(site)
    pins = Pinned(host)
    assert pins.signers() == {}
    with Upstream(host) as upstream:
        found = Entitlements(host, upstream, pins.grant_keys, pins.signers)
        with pytest.raises(Untrusted):
            found.refresh()
        for row in site.signers:
            (short / "pub.json").write_text(f'{{"name":"{row["name"]}","key":"{row["key"]}"}}')
            assert pin_signer(host, short / "pub.json") == row["name"]
        found.refresh()
        assert found.version == 1
    (short / "pub.json").write_text("{}")
    with pytest.raises(Malformed):
        pin_signer(host, short / "pub.json")


def test_refuses_when_the_trust_list_is_gone(joined):
    pins = Pinned(joined)
    assert pins.grant_keys()
    (joined.supervisor / "trust.json").unlink()
    with pytest.raises(Untrusted):
        pins.grant_keys()
