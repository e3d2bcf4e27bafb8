"""Who may stop and who may resume."""

from dataclasses import replace

import pytest

from interlock.errors import Conflict, Denied, Malformed, Untrusted
from interlock.order import Mode, StopOrder
from interlock.signed import BREAK_GLASS, STOP, Signed, sign
from killswitch.order import Host, kind_of, use_break_glass, verify_resume, verify_stop
from killswitch.trust import Trust, first
from tests.killswitch.site import Key, Site, key


@pytest.fixture
def trust(site: Site) -> Trust:
    return first(site.trust())


@pytest.fixture
def own() -> Key:
    return key()


@pytest.fixture
def me(own: Key) -> Host:
    return Host("node-a", own.public_key())


def active(*signed: Signed) -> dict[str, StopOrder]:
    orders = [StopOrder.from_json(s.body()) for s in signed]
    return {o.id: o for o in orders}


def test_takes_a_stop_by_the_stop_key(site: Site, trust: Trust, me: Host) -> None:
    assert verify_stop(site.stop_order("tenant:acme"), trust, me).actor == "otto"


def test_refuses_when_the_signature_is_not_the_stop_keys(site: Site, trust: Trust, me: Host) -> None:
    good = site.stop_order()
    forged = Signed(good.format, good.payload.replace(b"otto", b"eva1"), good.signatures)
    for bad in (site.stop_order(signer=key()), site.stop_order(signer=site.grant), forged):
        with pytest.raises(Untrusted):
            verify_stop(bad, trust, me)
    assert verify_stop(good, trust, me)


def test_refuses_when_a_local_stop_reaches_beyond_its_node(site: Site, trust: Trust, me: Host, own: Key) -> None:
    for scope in ("everything", "tenant:acme", "node:node-b"):
        with pytest.raises(Untrusted) as caught:
            verify_stop(site.stop_order(scope, signer=own), trust, me)
        assert caught.value.code == "untrusted.scope"
    for scope in ("node:node-a", "run:run_1"):
        assert verify_stop(site.stop_order(scope, signer=own), trust, me)


def test_takes_a_resume_by_two_persons(site: Site, trust: Trust) -> None:
    stop = site.stop_order()
    stops = active(stop)
    assert verify_resume(site.resume(list(stops)), trust, stops, []).clears == tuple(stops)


def test_refuses_when_fewer_than_two_persons_signed(site: Site, trust: Trust) -> None:
    stops = active(site.stop_order())
    ids = list(stops)
    for people in (("ada",), ("ada", "ada")):
        with pytest.raises(Untrusted) as caught:
            verify_resume(site.resume(ids, people), trust, stops, [])
        assert caught.value.code == "untrusted.threshold"
    assert verify_resume(site.resume(ids, ("ada", "bela")), trust, stops, [])


def test_refuses_when_a_person_is_forged_unknown_or_approved_something_else(site: Site, trust: Trust) -> None:
    stops = active(site.stop_order(), site.stop_order())
    ids = list(stops)
    ada = site.approval("ada", ids)
    for other in (
        site.approval("bela", ids, signer=key()), site.approval("bela", ids, signer=site.people["ada"]),
        site.approval("eve", ids, signer=site.people["bela"]), site.approval("bela", ids[:1]),
        site.approval("bela", ids, head="x"),
        site.approval("bela", ids, request="request_2"),
    ):
        with pytest.raises(Untrusted):
            verify_resume(site.resume(ids, approvals=[ada, other]), trust, stops, [])
    assert verify_resume(site.resume(ids, approvals=[ada, site.approval("bela", ids)]), trust, stops, [])


def test_refuses_when_the_grant_key_did_not_sign_the_resume(site: Site, trust: Trust) -> None:
    stops = active(site.stop_order())
    with pytest.raises(Untrusted):
        verify_resume(site.resume(list(stops), signer=site.stop), trust, stops, [])


def test_refuses_when_the_stopper_or_an_owner_resumes(site: Site, trust: Trust) -> None:
    mine = active(site.stop_order(actor="ada"))
    with pytest.raises(Denied) as caught:
        verify_resume(site.resume(list(mine)), trust, mine, [])
    assert caught.value.code == "denied.same_person"
    assert verify_resume(site.resume(list(mine), ("bela", "cleo")), trust, mine, [])
    stops = active(site.stop_order("run:run_1"))
    owned = [replace(site.labels(), owner="bela")]
    with pytest.raises(Denied):
        verify_resume(site.resume(list(stops)), trust, stops, owned)
    elsewhere = [replace(site.labels("run_2"), owner="bela")]
    assert verify_resume(site.resume(list(stops)), trust, stops, elsewhere)


def test_refuses_when_the_resume_is_older_than_the_stop(site: Site, trust: Trust) -> None:
    stops = active(site.stop_order(epoch=9))
    with pytest.raises(Conflict):
        verify_resume(site.resume(list(stops), epoch=9), trust, stops, [])
    assert verify_resume(site.resume(list(stops), epoch=10), trust, stops, [])


def test_break_glass_is_a_right_with_a_new_id_at_each_use(site: Site, trust: Trust) -> None:
    one, two = (use_break_glass(site.right(), trust, "node-a", 7) for _ in range(2))
    assert one.id != two.id
    assert str(one.scope) == "node:node-a"
    assert one.epoch == 7
    assert str(use_break_glass(site.right("run:run_9"), trust, "node-a", 0).scope) == "run:run_9"


def test_refuses_when_a_break_glass_right_is_foreign(site: Site, trust: Trust) -> None:
    with pytest.raises(Untrusted):
        use_break_glass(Site().right(), trust, "node-a", 0)
    with pytest.raises(Untrusted):
        use_break_glass(site.right("node:node-b"), trust, "node-a", 0)


def test_an_authentic_stop_that_is_odd_is_never_lost(site: Site, trust: Trust, me: Host) -> None:
    body = site.stop_order("run:run_1").body()
    nap = verify_stop(sign(STOP, {**body, "mode": "nap"}, site.stop), trust, me)
    assert (nap.id, nap.mode, str(nap.scope)) == (body["id"], Mode.KILL, "run:run_1")
    for change in ({"scope": {"kind": "planet", "id": "x"}}, {"scope": {"kind": "run", "id": ""}}, {"epoch": -1},
                   {"reason": "x" * 5000}, {"id": 7}):
        for signer in (site.stop, Site().stop):
            signed = sign(STOP, {**body, **change}, signer)
            if signer is not site.stop:
                with pytest.raises(Untrusted):
                    verify_stop(signed, trust, me)
                continue
            found = verify_stop(signed, trust, me)
            assert (found.mode, str(found.scope)) == (Mode.KILL, "node:node-a")
            assert found.id == body["id"] or ("id" in change and found.id.startswith("odd_"))
            assert verify_stop(signed, trust, me) == found  # the same one twice is one stop
    right = sign(BREAK_GLASS, {**site.right().body(), "scope": {"kind": "planet", "id": "x"}}, site.stop)
    assert str(use_break_glass(right, trust, "node-a", 3).scope) == "node:node-a"


def test_refuses_when_the_format_is_no_order(site: Site) -> None:
    assert kind_of(site.stop_order()) == "stop"
    with pytest.raises(Malformed):
        kind_of(site.trust())
