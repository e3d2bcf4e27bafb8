"""Approvals: other persons, exactly this, asked again at use, two at once (I11, I12)."""

from typing import Any

import httpx
import pytest
from sqlalchemy import text

from control_plane.auth import approvals, login
from control_plane.store import orders, people
from control_plane.store.db import now_us, reading, writing
from interlock.canon import digest
from interlock.errors import ApprovalRequired, Conflict, NotFound
from interlock.order import Mode, Scope, StopOrder
from interlock.signed import RESUME_APPROVAL, STOP, sign
from tests.control_plane.auth.conftest import House, Human, at_once


def _standing(house: House, request: str) -> approvals.Standing:
    with reading(house.engine) as connection:
        return approvals.standing(connection, approvals.found(connection, request))


def _use(house: House, request: str, bound: str = "", **more: Any) -> approvals.Standing:
    with writing(house.engine) as connection:
        one = approvals.found(connection, request)
        return approvals.use(connection, request, kind=one.kind, bound=bound or one.digest, **more)


def _resume(house: House, by: Human, stopper: Human, head: str = "0:start") -> str:
    """A stop by `stopper`, and a request to lift it, as the order desk leaves them behind."""
    stop = StopOrder(f"stop_{stopper.name}", Scope.parse("everything"), Mode.KILL, 1, stopper.id, "test")
    request = approvals.new_request_id()
    body = {"request": request, "clears": [stop.id], "head": head}
    with writing(house.engine) as connection:
        orders.put_stop(connection, 0, stop, sign(STOP, stop.as_json(), stopper.key), now_us())
        made = approvals.ask(connection, kind="resume", body=body, tenant="lab", asked_by=by.id, owner="", needed=2,
                             head=head, request=request)
    assert made.id == request
    return request


def _code(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


def test_two_officers_approve_and_the_approval_works_once(lab: House) -> None:
    rob, sue, sam = (lab.humans[n] for n in ("rob", "sue", "sam"))
    request = lab.launch_request(rob)
    with pytest.raises(ApprovalRequired) as caught:
        _use(lab, request)
    assert caught.value.details["given"] == 0
    one = lab.vote(request, sue)
    assert (one.status_code, one.json()["given"], one.json()["missing"]) == (200, 1, 1)
    with pytest.raises(ApprovalRequired):
        _use(lab, request)
    assert lab.vote(request, sam).json()["missing"] == 0
    assert set(_use(lab, request).approvers) == {sue.id, sam.id}
    with pytest.raises(Conflict) as used:
        _use(lab, request)
    assert used.value.code == "conflict.approval_used"
    assert [e["actor"] for e in lab.events("approval.given")] == [sue.id, sam.id]


def test_two_officers_at_once_are_two_votes(lab: House) -> None:
    rob, officers = lab.humans["rob"], [lab.humans["sue"], lab.humans["sam"]]
    request = lab.launch_request(rob)
    codes = [lab.code(o) for o in officers]

    def vote(n: int) -> httpx.Response:
        return lab.post(f"/api/approvals/{request}/approve", {"code": codes[n]}, officers[n].session)

    assert [a.status_code for a in at_once(2, vote)] == [200, 200]
    assert _standing(lab, request).given == 2


def test_one_officer_many_times_is_one_vote(lab: House) -> None:
    rob, sue = lab.humans["rob"], lab.humans["sue"]
    request = lab.launch_request(rob)

    def vote(_: int) -> bool:
        with writing(lab.engine) as connection:
            person = people.by_id(connection, sue.id)
            assert person is not None
            try:
                approvals.vote(connection, approvals.found(connection, request), person, approve=True)
            except Conflict:
                return False
        return True

    assert sum(at_once(8, vote)) == 1
    assert _standing(lab, request).given == 1
    again = lab.vote(request, sue)
    assert (again.status_code, _code(again)) == (409, "conflict.voted")


def test_parallel_uses_of_one_approval_are_one(lab: House) -> None:
    request = lab.launch_request(lab.humans["rob"], needed=1)
    assert lab.vote(request, lab.humans["sue"]).status_code == 200

    def use(_: int) -> bool:
        try:
            _use(lab, request)
        except Conflict:
            return False
        return True

    assert sum(at_once(8, use)) == 1


@pytest.mark.parametrize("who", ["sue", "rob"])
def test_I11_refuses_when_the_requester_approves(lab: House, who: str) -> None:
    """Also an officer who asked himself, and a researcher who became an officer afterwards."""
    asker = lab.humans[who]
    request = lab.launch_request(asker)
    if who == "rob":
        with writing(lab.engine) as connection:
            people.set_roles(connection, asker.id, "lab", frozenset({"safety_officer"}))
    refused = lab.vote(request, asker)
    assert (refused.status_code, _code(refused)) == (403, "denied.self_approval")
    assert lab.vote(request, lab.humans["sam"]).status_code == 200
    assert _standing(lab, request).given == 1


def test_I11_a_vote_of_the_requester_in_the_table_does_not_count(lab: House) -> None:
    """Whatever wrote it there: counting asks who asked."""
    sue = lab.humans["sue"]
    request = lab.launch_request(sue, needed=1)
    with writing(lab.engine) as connection:
        connection.execute(text("INSERT INTO approval_votes (request, person, approve, reason, signed, at_us) "
                                "VALUES (:r, :p, true, '', '', 1)"), {"r": request, "p": sue.id})
    assert _standing(lab, request).given == 0
    with pytest.raises(ApprovalRequired):
        _use(lab, request)
    assert lab.vote(request, lab.humans["sam"]).json()["given"] == 1


def test_I11_refuses_when_the_owner_of_another_persons_request_approves(lab: House) -> None:
    rob, sue = lab.humans["rob"], lab.humans["sue"]
    with writing(lab.engine) as connection:
        request = approvals.ask(connection, kind="launch", body={"a": 1}, tenant="lab", asked_by=rob.id, owner=sue.id,
                                needed=2).id
    assert _code(lab.vote(request, sue)) == "denied.self_approval"
    assert lab.vote(request, lab.humans["sam"]).status_code == 200


def test_I11_refuses_when_an_api_key_approves(lab: House) -> None:
    sue = lab.humans["sue"]
    key = lab.post("/api/keys", {"name": "bot", "scopes": ["look"]}, sue.session).json()["key"]
    request = lab.launch_request(lab.humans["rob"])
    refused = lab.post(f"/api/approvals/{request}/approve", {"code": lab.code(sue)}, key)
    assert (refused.status_code, _code(refused)) == (403, "denied.person")
    assert lab.vote(request, sue).status_code == 200


@pytest.mark.parametrize("who", ["ada", "olly"])
def test_refuses_when_no_officer_approves(lab: House, who: str) -> None:
    request = lab.launch_request(lab.humans["rob"])
    refused = lab.vote(request, lab.humans[who])
    assert (refused.status_code, _code(refused)) == (403, "denied.no_role")
    assert lab.vote(request, lab.humans["sue"]).status_code == 200


def test_I12_an_approver_who_lost_the_role_does_not_count(lab: House) -> None:
    rob, sue, sam = (lab.humans[n] for n in ("rob", "sue", "sam"))
    request = lab.launch_request(rob)
    assert lab.vote(request, sue).status_code == 200
    assert lab.vote(request, sam).status_code == 200
    assert _standing(lab, request).given == 2
    login.change_roles(lab.site, sue.id, frozenset({"auditor"}), by="test")
    now = _standing(lab, request)
    assert (now.given, [p for p, _ in now.void]) == (1, [sue.id])
    with pytest.raises(ApprovalRequired):
        _use(lab, request)
    max_ = lab.join("max", "safety_officer")
    assert lab.vote(request, max_).status_code == 200
    assert _use(lab, request).given == 2


def test_I12_a_disabled_approver_does_not_count(lab: House) -> None:
    request = lab.launch_request(lab.humans["rob"], needed=1)
    assert lab.vote(request, lab.humans["sue"]).status_code == 200
    login.disable(lab.site, lab.humans["sue"].id, by="test")
    with pytest.raises(ApprovalRequired):
        _use(lab, request)


def test_I12_refuses_when_a_byte_differs(lab: House) -> None:
    request = lab.launch_request(lab.humans["rob"], needed=1)
    assert lab.vote(request, lab.humans["sue"]).status_code == 200
    with pytest.raises(Conflict) as caught:
        _use(lab, request, digest({"argv": ["/bin/false"]}))
    assert caught.value.code == "conflict.approval_changed"
    with pytest.raises(Conflict):
        _use(lab, request, asked_by=lab.humans["sam"].id)
    with pytest.raises(NotFound):
        _use_unknown(lab)
    assert _use(lab, request, asked_by=lab.humans["rob"].id).given == 1


def _use_unknown(house: House) -> None:
    with writing(house.engine) as connection:
        approvals.use(connection, "req_none", kind="launch", bound="x")


def test_I12_refuses_when_it_expired_between_vote_and_use(lab: House) -> None:
    request = lab.launch_request(lab.humans["rob"], needed=1)
    assert lab.vote(request, lab.humans["sue"]).status_code == 200
    with writing(lab.engine) as connection:
        connection.execute(text("UPDATE approval_requests SET expires_us = :t"), {"t": now_us() - 1})
    with pytest.raises(Conflict) as caught:
        _use(lab, request)
    assert caught.value.code == "conflict.approval_expired"
    late = lab.vote(request, lab.humans["sam"])
    assert (late.status_code, _code(late)) == (409, "conflict.approval_expired")


def test_I12_refuses_when_the_order_log_moved(lab: House) -> None:
    request = lab.launch_request(lab.humans["rob"], needed=1, head="0:start")
    assert lab.vote(request, lab.humans["sue"]).status_code == 200
    lab.app.state.desk.present = "1:stop"
    late = lab.vote(request, lab.humans["sam"])
    assert (late.status_code, _code(late)) == (409, "conflict.approval_changed")
    for head in ("1:stop", None):
        with pytest.raises(Conflict):
            _use(lab, request, head=head)
    assert _use(lab, request, head="0:start").given == 1


def test_one_refusal_ends_the_request(lab: House) -> None:
    request = lab.launch_request(lab.humans["rob"], needed=1)
    done = lab.vote(request, lab.humans["sue"], "refuse", reason="not tonight")
    assert (done.status_code, done.json()["state"]) == (200, "refused")
    late = lab.vote(request, lab.humans["sam"])
    assert (late.status_code, _code(late)) == (409, "conflict.approval_refused")
    assert [e["facts"]["reason"] for e in lab.events("approval.refused")] == ["not tonight"]


def test_refuses_when_the_code_is_wrong_and_no_vote_is_cast(lab: House) -> None:
    request, sue = lab.launch_request(lab.humans["rob"]), lab.humans["sue"]
    used = lab.code(sue)
    assert lab.post(f"/api/approvals/{request}/approve", {"code": used}, sue.session).status_code == 200
    other = lab.launch_request(lab.humans["rob"])
    assert lab.post(f"/api/approvals/{other}/approve", {"code": used}, sue.session).status_code == 401
    assert _standing(lab, other).given == 0


def test_the_same_request_is_asked_once(lab: House) -> None:
    rob = lab.humans["rob"]
    with writing(lab.engine) as connection:
        ids = {approvals.ask(connection, kind="launch", body={"a": 1}, tenant="lab", asked_by=rob.id, owner=rob.id,
                             needed=2).id for _ in range(2)}
        other = approvals.ask(connection, kind="launch", body={"a": 1}, tenant="lab", asked_by=rob.id, owner=rob.id,
                              needed=2, head="x").id
    assert len(ids) == 1
    assert other not in ids


# --- resume ---------------------------------------------------------------------------------------------


def test_two_officers_sign_a_resume(lab: House) -> None:
    rob, sue, sam, olly = (lab.humans[n] for n in ("rob", "sue", "sam", "olly"))
    done = []
    lab.app.state.approved = lambda standing: done.append(standing) or {"resume": "ordered"}
    request = _resume(lab, rob, olly)
    assert lab.vote(request, sue, signed=lab.signature(request, sue)).json()["given"] == 1
    assert done == []
    answer = lab.vote(request, sam, signed=lab.signature(request, sam)).json()
    assert answer["effect"] == {"resume": "ordered"}
    assert len(done) == 1
    used = _use(lab, request, head="0:start")
    with reading(lab.engine) as connection:
        assert len(approvals.signatures(connection, used)) == 2
    assert len(lab.events("resume.signed")) == 2


def test_threshold_of_a_resume_is_never_below_two(lab: House) -> None:
    request = approvals.new_request_id()
    with writing(lab.engine) as connection:
        made = approvals.ask(connection, kind="resume", body={"request": request, "clears": ["s"], "head": "h"},
                             tenant="lab", asked_by=lab.humans["rob"].id, owner="", needed=1, request=request)
    assert made.needed == 2


def test_refuses_when_a_resume_is_not_signed_by_the_persons_own_key(lab: House) -> None:
    rob, sue, sam, olly = (lab.humans[n] for n in ("rob", "sue", "sam", "olly"))
    request = _resume(lab, rob, olly)
    body = lab.get(f"/api/approvals/{request}", sue.session).json()["body"]
    foreign = sign(RESUME_APPROVAL, {**body, "person": sue.id}, sam.key).as_json()
    wrong = [None, {"format": "x"}, foreign, lab.signature(request, sue, person=sam.id),
             lab.signature(request, sue, clears=["other"]), lab.signature(request, sue, head="1:x"),
             lab.signature(request, sue, request="req_other"),
             sign(STOP, {**body, "person": sue.id}, sue.key).as_json()]
    for signed in wrong:
        refused = lab.vote(request, sue, signed=signed)
        assert refused.status_code in (401, 422), signed
    assert _standing(lab, request).given == 0
    assert lab.vote(request, sue, signed=lab.signature(request, sue)).status_code == 200


def test_refuses_when_the_stopper_resumes(lab: House) -> None:
    rob, sue, sam = (lab.humans[n] for n in ("rob", "sue", "sam"))
    request = _resume(lab, rob, sue)
    refused = lab.vote(request, sue, signed=lab.signature(request, sue))
    assert (refused.status_code, _code(refused)) == (403, "denied.self_approval")
    assert lab.vote(request, sam, signed=lab.signature(request, sam)).status_code == 200


def test_a_resume_vote_counts_only_while_its_signature_holds(lab: House) -> None:
    rob, sue, olly = lab.humans["rob"], lab.humans["sue"], lab.humans["olly"]
    request = _resume(lab, rob, olly)
    assert lab.vote(request, sue, signed=lab.signature(request, sue)).json()["given"] == 1
    with writing(lab.engine) as connection:
        connection.execute(text("UPDATE approval_votes SET signed = replace(signed, 'sig', 'gis')"))
    now = _standing(lab, request)
    assert (now.given, now.void[0][0]) == (0, sue.id)


# --- what people see ---------------------------------------------------------------------------------------


def test_shows_body_votes_and_why_one_cannot_vote(lab: House) -> None:
    rob, sue = lab.humans["rob"], lab.humans["sue"]
    request = lab.launch_request(rob)
    assert lab.vote(request, sue, reason="looked at it").status_code == 200
    mine = lab.get(f"/api/approvals/{request}", rob.session).json()
    assert digest(mine["body"]) == mine["digest"]
    assert [(v["name"], v["reason"], v["counts"]) for v in mine["votes"]] == [("sue", "looked at it", True)]
    assert "another person" in mine["you_cannot"]
    assert lab.get(f"/api/approvals/{request}", sue.session).json()["you_cannot"] == "you have voted"
    assert lab.get(f"/api/approvals/{request}", lab.humans["sam"].session).json()["you_cannot"] == ""
    listed = lab.get("/api/approvals", sue.session).json()["approvals"]
    assert [(r["id"], r["given"], r["needed"], r["asked_by_name"]) for r in listed] == [(request, 1, 2, "rob")]


def test_a_researcher_sees_only_his_own_requests(lab: House) -> None:
    rob, ron = lab.humans["rob"], lab.join("ron", "researcher")
    request = lab.launch_request(rob)
    assert [r["id"] for r in lab.get("/api/approvals", rob.session).json()["approvals"]] == [request]
    assert lab.get("/api/approvals", ron.session).json()["approvals"] == []
    assert lab.get(f"/api/approvals/{request}", ron.session).status_code == 404
    assert lab.get("/api/approvals/req_none", ron.session).status_code == 404
    assert lab.get(f"/api/approvals/{request}", rob.session).status_code == 200


