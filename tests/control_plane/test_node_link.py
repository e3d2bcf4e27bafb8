"""The node listener over real TLS: who may call, and what a node may reach."""

import base64
import datetime
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from audit import marks
from audit.spool import Spool, unshipped
from control_plane import app as joint
from control_plane import certificates, node_link
from control_plane.api.nodes import make_join_file
from control_plane.serve import Listener, _bound, socket
from control_plane.store import nodes
from control_plane.store.db import now_us, writing
from interlock.canon import digest_bytes
from interlock.errors import Untrusted
from interlock.event import Event, EventType
from interlock.signed import SNAPSHOT, Signed, public_text, verify
from policy.snapshot import verify as verify_snapshot
from tests.control_plane.conftest import Host, House, csr


class Link:
    """A served node listener and clients of it."""

    def __init__(self, house: House, port: int) -> None:
        self.house, self.url = house, f"https://localhost:{port}"
        self._folder = house.state

    def context(self, host: Host | None, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.house.parts.signers.authority.pem())
        context.minimum_version = context.maximum_version = version
        if host is not None:
            path = self._folder / f"{host.name}.pem"
            path.write_bytes(host.certificate.encode() + certificates.key_pem(host.key))
            context.load_cert_chain(path)
        return context

    def send(self, host: Host | None, method: str, path: str, **more: Any) -> httpx.Response:
        with httpx.Client(base_url=self.url, verify=self.context(host), trust_env=False) as client:
            return client.request(method, path, **more)


@pytest.fixture
def link(staffed: House) -> Iterator[Link]:
    sock = _bound(socket.AF_INET, "127.0.0.1", 0)
    config = node_link.listener(joint.nodes_app(staffed.parts), staffed.parts.settings.places.keys)
    server = Listener(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    yield Link(staffed, sock.getsockname()[1])
    server.should_exit = True
    thread.join()


def joined(link: Link, name: str, secret: str, key: ec.EllipticCurvePrivateKey, supervisor: Any) -> httpx.Response:
    body = {"secret": secret, "csr": csr(key, name), "supervisor_key": public_text(supervisor.public_key())}
    return link.send(None, "POST", "/node/join", json=body)


def secret_for(house: House, name: str) -> dict[str, str]:
    parts = house.parts
    return make_join_file(parts.engine, parts.desk.log, parts.signers.authority, parts.settings, name, "test")


def incidents(house: House) -> list[str]:
    house.parts.desk.record_late()
    house.parts.ledger.sequence()
    return [str(r.event["facts"]["what"]) for r in house.parts.ledger.rows(type=EventType.INCIDENT.value)]


def test_join_gives_a_certificate_for_the_secrets_node_whatever_the_request_says(link: Link) -> None:
    key, supervisor = ec.generate_private_key(ec.SECP256R1()), Ed25519PrivateKey.generate()
    file = secret_for(link.house, "n7")
    answer = joined(link, "someone-else", file["secret"], key, supervisor)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["node"] == "n7"
    assert certificates.named_node(body["certificate"]) == "n7"
    host = Host(link.house.parts, "n7", supervisor, key, body["certificate"])
    assert link.send(host, "GET", "/node/orders").json() == {"orders": [], "last": 0}


def test_refuses_when_the_secret_is_wrong_used_or_expired(link: Link) -> None:
    key, supervisor = ec.generate_private_key(ec.SECP256R1()), Ed25519PrivateKey.generate()
    good = secret_for(link.house, "n1")["secret"]
    for bad in ("wrong", good[:-1] + "x"):
        answer = joined(link, "n1", bad, key, supervisor)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "untrusted.join_secret")
    assert joined(link, "n1", good, key, supervisor).status_code == 200
    assert joined(link, "n1", good, key, supervisor).json()["error"]["code"] == "untrusted.join_secret"
    with writing(link.house.parts.engine) as connection:
        nodes.add_secret(connection, "old", "n2", "test", now_us() - 1)
    assert joined(link, "n2", "old", key, supervisor).json()["error"]["code"] == "untrusted.join_secret"


def test_refuses_when_there_is_no_certificate(link: Link) -> None:
    answer = link.send(None, "GET", "/node/work")
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "untrusted.certificate")
    host = link.house.host()
    assert link.send(host, "GET", "/node/work").status_code == 200


def test_refuses_when_the_certificate_is_of_another_ca(link: Link) -> None:
    host = link.house.host()
    key, certificate = certificates.make_ca("stranger")
    stranger = certificates.Authority(key, certificate)
    forged = Host(host.parts, "n1", host.supervisor, host.key, stranger.sign_node(csr(host.key, "n1"), "n1"))
    with pytest.raises((httpx.HTTPError, ssl.SSLError)):
        link.send(forged, "GET", "/node/work")
    assert link.send(host, "GET", "/node/work").status_code == 200


def test_refuses_tls_1_2(link: Link) -> None:
    host = link.house.host()
    with (
        httpx.Client(verify=link.context(host, ssl.TLSVersion.TLSv1_2), trust_env=False) as client,
        pytest.raises((httpx.HTTPError, ssl.SSLError)),
    ):
        client.get(f"{link.url}/node/work")
    assert link.send(host, "GET", "/node/work").status_code == 200


def test_refuses_when_the_node_is_revoked(link: Link) -> None:
    host = link.house.host()
    assert link.send(host, "GET", "/node/work").status_code == 200
    revoked = link.house.post("/api/nodes/n1/revoke", link.house.people["ada"], {})
    assert revoked.status_code == 200, revoked.text
    answer = link.send(host, "GET", "/node/work")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "denied.node_revoked")
    assert incidents(link.house)


def test_refuses_when_a_node_reaches_for_anothers_run(link: Link) -> None:
    house = link.house
    first = house.host("n1")
    run = house.launch()
    second = house.host("n2")
    state = {"state": "admitted"}
    piece = {"offset": 0, "data": base64.b64encode(b"x").decode()}
    for path, body in ((f"/node/runs/{run}/1/state", state), (f"/node/runs/{run}/1/output", piece)):
        answer = link.send(second, "POST", path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "denied.node"), path
        assert link.send(first, "POST", path, json=body).status_code == 200
    beat = {"boot_id": "b", "nonce": "", "digest": "", "floor": 0, "trust_version": 9, "orders": [], "receipts": [],
            "beats": [{"nonce": "x", "run": run, "attempt": 1, "epoch": 0}]}
    assert link.send(second, "POST", "/node/heartbeat", json=beat).status_code == 403
    assert len(incidents(house)) == 3


def test_work_output_state_and_files_of_one_run(link: Link) -> None:
    house = link.house
    host = house.host()
    run = house.launch()
    launches = link.send(host, "GET", "/node/work").json()["launches"]
    assert [Signed.from_json(x).body()["run"] for x in launches] == [run]
    post = lambda path, body: link.send(host, "POST", f"/node/runs/{run}/1/{path}", json=body)  # noqa: E731
    assert post("state", {"state": "live"}).json()["moved"] is True
    assert link.send(host, "GET", "/node/work").json()["launches"] == []
    data = base64.b64encode(b"hello\n").decode()
    assert post("output", {"offset": 0, "data": data}).json() == {"next": 6}
    assert post("output", {"offset": 0, "data": data}).json() == {"next": 6}  # the same piece twice
    gap = post("output", {"offset": 99, "data": data})
    assert (gap.status_code, gap.json()["error"]["details"]["next"]) == (409, 6)
    kept = {"name": "result.json", "data": data, "digest": digest_bytes(b"hello\n")}
    assert post("files", kept).status_code == 200
    assert post("files", {**kept, "digest": digest_bytes(b"other")}).status_code == 401
    assert post("files", {**kept, "name": "../x"}).status_code == 422
    done = post("state", {"state": "ended", "outcome": {"exit": 3, "why": "ended"}})
    assert done.json()["moved"] is True
    assert post("state", {"state": "live"}).json()["moved"] is False  # over stays over
    rob = house.people["rob"]
    found = house.get(f"/api/runs/{run}/output?after=0", rob).json()
    assert base64.b64decode(found["data"]) == b"hello\n"
    found = house.get(f"/api/runs/{run}/output?after=6&wait=1", rob).json()
    assert (found["ended"], found["state"], found["outcome"]["exit"]) == (True, "ended", 3)
    assert house.get(f"/api/runs/{run}/files", rob).json()["files"][0]["name"] == "result.json"
    assert house.get(f"/api/runs/{run}/files/result.json", rob).content == b"hello\n"
    assert house.client.get(f"/api/runs/{run}/files/result.json").status_code == 401


def test_a_stop_wakes_the_long_poll_at_once(link: Link) -> None:
    host = link.house.host()
    timer = threading.Timer(0.5, link.house.stop, ["everything"])
    timer.start()
    began = time.monotonic()
    answer = link.send(host, "GET", "/node/orders?after=0&wait=20", timeout=30).json()
    timer.join()
    assert len(answer["orders"]) == 1
    assert time.monotonic() - began < 5


def test_snapshot_answers_the_nonce(link: Link) -> None:
    host = link.house.host()
    answer = link.send(host, "GET", "/node/snapshot?nonce=abcdefgh").json()
    body = verify(Signed.from_json(answer), SNAPSHOT, link.house.parts.signers.grant_pins)
    assert body["nonce"] == "abcdefgh"
    assert {r["role"] for r in body["roles"]} >= {"researcher", "safety_officer"}
    assert verify_snapshot(Signed.from_json(answer), link.house.parts.signers.grant_pins, "abcdefgh").epoch == 0


def test_renewal_keeps_the_certificates_node(link: Link) -> None:
    host = link.house.host("n1")
    answer = link.send(host, "POST", "/node/certificate", json={"csr": csr(host.key, "n2")})
    assert certificates.named_node(answer.json()["certificate"]) == "n1"


def test_refuses_a_certificate_that_expired_since_the_handshake(staffed: House) -> None:
    host = staffed.host()
    assert certificates.named_node(host.certificate) == "n1"
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=25)
    with pytest.raises(Untrusted) as refused:
        certificates.named_node(host.certificate, later)
    assert refused.value.code == "untrusted.certificate_expired"


def test_marks_and_records_are_the_nodes_own(link: Link, tmp_path: Path) -> None:
    host, other = link.house.host("n1"), link.house.host("n2")
    spool = Spool(tmp_path, "n1", "launcher")
    spool.record(Event(EventType.RUN_STEP, "x"))
    shipment = unshipped(tmp_path)[0]
    body = {"stream": shipment.stream, "records": [
        {"seq": s, "body": base64.b64encode(b).decode()} for s, b in shipment.records]}
    refused = link.send(other, "POST", "/node/spool", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "untrusted.node_id")
    assert link.send(host, "POST", "/node/spool", json=body).json()["next_seq"] == len(shipment.records)
    mark = marks.body([spool.mark()], "boot", 1)
    sent = {"body": base64.b64encode(mark).decode()}
    good = {**sent, "sig": base64.b64encode(marks.sign(host.key, mark)).decode()}
    assert link.send(other, "POST", "/node/marks", json=good).status_code == 401
    assert link.send(host, "POST", "/node/marks", json=good).status_code == 200
    spool.close()
