"""Stop is shown as stopped only with proof; a person signs exactly what he was shown."""

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from control_plane.cli.command import execute
from interlock.canon import digest
from interlock.signed import (
    RESUME_APPROVAL,
    TRUST_APPROVAL,
    Signed,
    key_id,
    public_from_text,
    public_text,
    verify,
)
from killswitch.trust import approval_body
from tests.cli.server import PeopleServer


def _stop(server: PeopleServer, *states: str) -> None:
    server.routes["POST /api/stop"] = (200, {"order": "stop_1", "epoch": 4, "anchored": True})
    left = list(states)

    def one(_: object) -> tuple[int, Any]:
        state = left.pop(0) if len(left) > 1 else left[0]
        return 200, {"order": "stop_1", "scope": "run:run_1", "state": state, "confirmed_ms": 120, "nodes": [
            {"node": "n1", "result": state, "latency_ms": 120, "survivors": []}]}

    server.routes["GET /api/stops/stop_1"] = one


def test_a_confirmed_stop_exits_0(interlock, server, remy) -> None:
    _stop(server, "pending", "pending", "confirmed")
    status, value, _ = interlock("stop", "run:run_1", "--reason", "test")
    assert (status, value["state"], value["nodes"][0]["latency_ms"]) == (0, "confirmed", 120)
    assert server.sent("POST", "/api/stop")[0].json == {"scope": "run:run_1", "reason": "test"}


@pytest.mark.parametrize("state", ["not_confirmed", "unreachable", "pending"])
def test_anything_but_proof_exits_4(interlock, server, remy, state) -> None:
    _stop(server, state)
    status, value, _ = interlock("stop", "everything", "--wait", "0.3")
    assert (status, value["state"]) == (4, state)


def test_a_stop_asks_for_no_code_and_no_second_person(interlock, server, remy) -> None:
    _stop(server, "confirmed")
    interlock("stop", "everything")
    assert [a.path for a in server.asked if a.method == "POST"] == ["/api/stop"]


def test_stops_and_resume(interlock, server, remy, capfd) -> None:
    _stop(server, "confirmed")
    server.routes["GET /api/stops"] = (200, {"stops": [{"order": "stop_1", "state": "confirmed"}]})
    server.routes["POST /api/resumes"] = (200, {"request": "req_1", "needed": 2})
    assert interlock("stops")[1]["stops"][0]["order"] == "stop_1"
    assert interlock("stops", "stop_1")[1]["state"] == "confirmed"
    assert interlock("resume", "stop_2", "stop_1", "--reason", "looked")[1]["request"] == "req_1"
    assert server.sent("POST", "/api/resumes")[0].json == {"clears": ["stop_1", "stop_2"], "reason": "looked"}
    assert execute(["stops"]) == 0
    assert "confirmed" in capfd.readouterr().out


BODY = {"request": "req_1", "clears": ["stop_1"], "head": "sha256:abc"}


def _resume(server: PeopleServer, body: dict[str, Any], told: str) -> None:
    server.routes["GET /api/approvals/req_1"] = (200, {"id": "req_1", "kind": "resume", "body": body, "digest": told})
    server.routes["POST /api/approvals/req_1/approve"] = (200, {"state": "open", "given": 1})


def test_a_resume_is_signed_with_the_person_key_over_what_was_shown(interlock, server, remy) -> None:
    _resume(server, BODY, digest(BODY))
    assert interlock("approve", "req_1", "--code", "123456")[0] == 0
    sent = server.sent("POST", "/api/approvals/req_1/approve")[0].json
    key = remy.person_key().public_key()
    signed = verify(Signed.from_json(sent["signed"]), RESUME_APPROVAL, {key_id(key): key})
    assert signed == {**BODY, "person": "per_remy"}
    assert sent["code"] == "123456"


def test_refuses_when_the_body_is_not_what_the_digest_says(interlock, server, remy) -> None:
    _resume(server, {**BODY, "clears": ["stop_1", "stop_2"]}, digest(BODY))
    status, value, _ = interlock("approve", "req_1", "--code", "123456")
    assert (status, value["error"]["code"]) == (1, "untrusted.approval")
    assert not server.sent("POST", "/api/approvals/req_1/approve")


def test_refuses_when_the_body_is_about_another_request(interlock, server, remy) -> None:
    other = {**BODY, "request": "req_2"}
    _resume(server, other, digest(other))
    status, value, _ = interlock("approve", "req_1", "--code", "123456")
    assert (status, value["error"]["code"]) == (1, "untrusted.approval")
    assert not server.sent("POST", "/api/approvals/req_1/approve")


def test_refuses_when_this_profile_has_no_person_key(interlock, server, remy) -> None:
    remy.key_path.unlink()
    _resume(server, BODY, digest(BODY))
    assert interlock("approve", "req_1", "--code", "1")[1]["error"]["code"] == "not_found.person_key"


def test_a_launch_is_approved_without_a_signature_and_refused_with_a_reason(interlock, server, remy, capfd) -> None:
    plan = {"argv": ["python3"], "tier": "critical"}
    server.routes["GET /api/approvals/req_1"] = (200, {"id": "req_1", "kind": "launch", "body": plan,
                                                       "digest": digest(plan)})
    server.routes["GET /api/approvals"] = (200, {"approvals": [{"id": "req_1", "kind": "launch", "state": "open"}]})
    server.routes["POST /api/approvals/req_1/approve"] = server.routes["POST /api/approvals/req_1/refuse"] = (200, {})
    assert interlock("approve", "req_1", "--code", "1")[0] == 0
    assert "signed" not in server.sent("POST", "/api/approvals/req_1/approve")[0].json
    assert interlock("refuse", "req_1", "--code", "2", "--reason", "no")[0] == 0
    assert server.sent("POST", "/api/approvals/req_1/refuse")[0].json == {"code": "2", "reason": "no"}
    assert interlock("approvals")[1]["approvals"][0]["id"] == "req_1"
    assert execute(["approve", "req_1", "--code", "3"]) == 0
    assert digest(plan) in capfd.readouterr().err.replace("\n", "")


def _trust(server: PeopleServer, remy: Any, **over: Any) -> dict[str, Any]:
    """A request to pin nora beside remy and olga; `over` bends its body after the digest of the list was made."""
    keys = {"per_remy": public_text(remy.person_key().public_key())}
    keys |= {p: public_text(Ed25519PrivateKey.generate().public_key()) for p in ("per_olga", "per_nora")}
    rows = [{"person": p, "name": p.removeprefix("per_"), "key": k} for p, k in keys.items()]
    body = {**approval_body(4, keys), "persons": rows, "added": rows[2:], "removed": [], **over}
    server.routes["GET /api/approvals/req_1"] = (200, {"id": "req_1", "kind": "trust", "body": body,
                                                       "digest": digest(body), "reason": "a third"})
    server.routes["POST /api/approvals/req_1/approve"] = (200, {"state": "open", "given": 1})
    return body


def test_a_trust_change_is_shown_with_names_and_key_ids_and_signed_over_that_list(interlock, server, remy, capfd
                                                                                  ) -> None:
    body = _trust(server, remy)
    assert execute(["approve", "req_1", "--code", "123456"]) == 0
    shown = capfd.readouterr().err
    for person in body["persons"]:
        assert person["name"] in shown
        assert key_id(public_from_text(person["key"])) in shown
    assert "ADDED" in shown
    sent = server.sent("POST", "/api/approvals/req_1/approve")[0].json
    key = remy.person_key().public_key()
    signed = verify(Signed.from_json(sent["signed"]), TRUST_APPROVAL, {key_id(key): key})
    assert signed == {"version": 4, "persons_digest": body["persons_digest"]}


def test_refuses_when_the_digest_is_of_another_list_than_the_one_shown(interlock, server, remy) -> None:
    """The body matches its digest, but what nodes would take over is not what the person sees."""
    other = approval_body(4, {"per_eve": "AAAA"})["persons_digest"]
    _trust(server, remy, persons_digest=other)
    status, value, _ = interlock("approve", "req_1", "--code", "123456")
    assert (status, value["error"]["code"]) == (1, "untrusted.approval")
    assert not server.sent("POST", "/api/approvals/req_1/approve")
    _trust(server, remy)
    assert interlock("approve", "req_1", "--code", "123456")[0] == 0


def test_refuses_when_the_list_has_another_key_for_the_signer(interlock, server, remy) -> None:
    keys = {p: public_text(Ed25519PrivateKey.generate().public_key()) for p in ("per_remy", "per_olga")}
    rows = [{"person": p, "name": p, "key": k} for p, k in keys.items()]
    _trust(server, remy, **approval_body(4, keys), persons=rows, added=[])
    status, value, _ = interlock("approve", "req_1", "--code", "123456")
    assert (status, value["error"]["code"]) == (1, "untrusted.approval")
    assert not server.sent("POST", "/api/approvals/req_1/approve")


def test_trust_show_and_change(interlock, server, remy, capfd) -> None:
    own = key_id(remy.person_key().public_key())
    person = {"person": "per_remy", "name": "remy", "key": public_text(remy.person_key().public_key()), "able": True,
              "key_id": "ed25519:told-by-the-server"}
    server.routes["GET /api/trust"] = (200, {"version": 3, "persons": [person], "waiting": [], "requests": [],
                                             "nodes": [{"node": "n1", "version": 3}], "warning": "pin a third"})
    assert interlock("trust", "show")[1]["own_key_id"] == own
    assert execute(["trust", "show"]) == 0
    out, err = capfd.readouterr()
    assert out.count(own) == 2  # his own key's id, and the same computed from the list: never the server's word
    assert "told-by-the-server" not in out
    assert "pin a third" in err
    server.routes["POST /api/trust/changes"] = (200, {"request": "req_1", "body": _trust(server, remy), "needed": 2,
                                                      "may_sign": ["olga", "otto"]})
    assert interlock("trust", "change", "--add", "nora", "--remove", "olga", "--reason", "x")[1]["request"] == "req_1"
    assert server.sent("POST", "/api/trust/changes")[0].json == {"add": ["nora"], "remove": ["olga"], "reason": "x"}
    assert execute(["trust", "change", "--add", "nora", "--reason", "x"]) == 0
    assert "interlock approve req_1: olga, otto" in capfd.readouterr().out


def test_status_warns_while_fewer_than_three_officers_can_sign(interlock, server, remy, capfd) -> None:
    server.routes["GET /api/status"] = (200, {"trust": {"version": 3, "pinned": 2, "warning": "pin a third"}})
    assert execute(["status"]) == 0
    assert "WARNING: pin a third" in capfd.readouterr().err
    server.routes["GET /api/status"] = (200, {"trust": {"version": 4, "pinned": 3, "warning": ""}})
    assert execute(["status"]) == 0
    assert "WARNING" not in capfd.readouterr().err
