"""Committed checkpoints as nodes report them: verified by the run's key, kept once."""

import base64
from dataclasses import dataclass, replace

import pytest

from control_plane import key_release
from control_plane.api.node_checkpoints import take
from control_plane.store import checkpoints
from control_plane.store.db import reading
from interlock.errors import Denied, Malformed, NotFound, Unavailable, Untrusted
from interlock.manifest import FileRow, Manifest
from interlock.sealed import wrap_file_key
from tests.control_plane.conftest import Host, House
from tests.control_plane.test_node_link import Link, incidents
from tests.control_plane.test_node_link import link as link  # a fixture

SAVING = {"guest": True, "checkpoints": True}


@dataclass
class Lab:
    """A live run that saves checkpoints, and its key."""

    house: House
    host: Host
    run: str
    key: bytes

    def made(self, step: int = 4, **other) -> Manifest:
        files = tuple(
            FileRow(n, 100, "sha256:" + "a" * 64, wrap_file_key(self.key, b"f" * 32, self.run, step, n))
            for n in ("a.sealed", "b.sealed")
        )
        return replace(Manifest(self.run, step, 1, "state", None, 3, {}, files), **other)

    def take(self, data: bytes, run: str = "", attempt: int = 1, node: str = "n1") -> str:
        return take(self.house.parts, node, run or self.run, attempt, data)

    def kept(self):
        with reading(self.house.parts.engine) as connection:
            return checkpoints.of_run(connection, self.run)


@pytest.fixture
def lab(staffed: House) -> Lab:
    host = staffed.host()
    run = staffed.launch(**SAVING)
    host.beat((run, 1))
    key = base64.b64decode(key_release.keys_for(staffed.parts, "n1", run, 1)["run_key"])
    return Lab(staffed, host, run, key)


def test_a_reported_checkpoint_is_kept_once(lab, monkeypatch):
    found = lab.made()
    data = found.seal(lab.key)
    assert lab.take(data) == found.digest()
    with monkeypatch.context() as away:  # known bytes need no key provider
        away.setattr(type(lab.house.parts.keys), "named", lambda *_: pytest.fail("asked"))
        assert lab.take(data) == found.digest()
    (row,) = lab.kept()
    assert (row.digest, row.run, row.step, row.attempt, row.kind, row.items, row.bytes, row.node, row.parent) == (
        found.digest(), lab.run, 4, 1, "state", 3, 200, "n1", "")
    assert bytes(row.manifest) == data


def test_the_route_takes_it_from_the_node_alone(lab, link: Link):
    body = {"manifest": base64.b64encode(lab.made().seal(lab.key)).decode()}
    path = f"/node/runs/{lab.run}/1/checkpoints"
    other = lab.house.host("n2")
    refused = link.send(other, "POST", path, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "denied.node")
    assert incidents(lab.house)
    assert link.send(lab.host, "POST", path, json={"manifest": "***"}).json()["error"]["code"] == "malformed.base64"
    assert link.send(lab.host, "POST", path, json={**body, "node": "n1"}).status_code == 422
    assert lab.kept() == []
    taken = link.send(lab.host, "POST", path, json=body)  # control
    (row,) = lab.kept()
    assert taken.json() == {"digest": row.digest}


def test_refuses_when_another_key_signed_it(lab):
    with pytest.raises(Untrusted, match=r"untrusted\.manifest"):
        lab.take(lab.made().seal(b"x" * 32))
    assert lab.kept() == []
    lab.take(lab.made().seal(lab.key))  # control


def test_refuses_when_run_or_attempt_are_anothers(lab):
    second = lab.house.launch(**SAVING)
    lab.host.beat((second, 1))
    for data, where in (
        (lab.made(run=second).seal(lab.key), {}), (lab.made(attempt=2).seal(lab.key), {}),
        (lab.made().seal(lab.key), {"run": second}),
    ):
        with pytest.raises(Untrusted, match=r"untrusted\.manifest"):
            lab.take(data, **where)
    with pytest.raises(Untrusted, match=r"untrusted\.manifest"):  # it names the second run, under the first one's key
        lab.take(lab.made(run=second).seal(lab.key), run=second)
    with pytest.raises(NotFound, match=r"not_found\.attempt"):
        lab.take(lab.made(run="run_none").seal(lab.key), run="run_none")
    with pytest.raises(Denied, match=r"denied\.node"):
        lab.take(lab.made().seal(lab.key), node="n2")
    lab.take(lab.made().seal(lab.key))  # control


def test_refuses_when_it_is_no_manifest(lab):
    for data in (b"", b"{}", lab.made().seal(lab.key)[:-1], b"\x80\x04."):
        with pytest.raises(Malformed):
            lab.take(data)


def test_refuses_when_the_run_keeps_no_checkpoints(lab):
    plain = lab.house.launch()
    with pytest.raises(NotFound, match=r"not_found\.run_key"):
        lab.take(lab.made(run=plain).seal(lab.key), run=plain)


def test_what_was_committed_before_a_stop_is_still_taken(lab):
    lab.house.stop(f"run:{lab.run}")
    assert lab.take(lab.made().seal(lab.key)) == lab.kept()[0].digest


def test_a_provider_that_is_away_means_ask_again(lab, monkeypatch):
    def away(*_):
        raise Unavailable("the token is away", code="provider")

    with monkeypatch.context() as patch:
        patch.setattr(type(lab.house.parts.keys), "named", away)
        with pytest.raises(Unavailable):
            lab.take(lab.made().seal(lab.key))
    assert lab.kept() == []
    lab.take(lab.made().seal(lab.key))  # control
