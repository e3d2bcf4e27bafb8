"""Nodes, status, policy bundles, evidence: tables for people, one object for scripts."""

import base64
from pathlib import Path

import pytest

from control_plane.cli.command import execute
from interlock.canon import digest_bytes

POLICY = Path(__file__).resolve().parents[2] / "examples" / "policy"


def test_nodes_and_status(interlock, server, remy, capfd) -> None:
    server.routes["GET /api/nodes"] = (200, {"nodes": [{"node": "gpu-1", "state": "joined", "tiers": ["none"]}]})
    server.routes["POST /api/nodes/join-files"] = (200, {"node": "gpu-2", "secret": "once"})
    server.routes["GET /api/status"] = (200, {"site": "demo", "state": "ready", "runs": {"none": 1}})
    assert interlock("nodes")[1]["nodes"][0]["node"] == "gpu-1"
    assert interlock("nodes", "invite", "gpu-2")[1]["secret"] == "once"
    assert server.sent("POST", "/api/nodes/join-files")[0].json == {"node": "gpu-2"}
    assert interlock("status")[1]["state"] == "ready"
    assert execute(["nodes"]) == 0
    assert "gpu-1" in capfd.readouterr().out
    assert execute(["status"]) == 0


def test_a_bundle_is_signed_here_and_sent_signed(interlock, server, remy, tmp_path: Path) -> None:
    for name in ("vera", "hugo"):
        made = interlock("policy", "keygen", name, "--out", str(tmp_path / f"{name}.key"))[1]
        assert (tmp_path / f"{name}.key").stat().st_mode & 0o777 == 0o600
        assert made["public"] == str(tmp_path / f"{name}.key.pub.json")
    assert interlock("policy", "check", str(POLICY))[0] == 0
    bare, half, full = (tmp_path / f"{n}.bundle" for n in ("bare", "half", "full"))
    assert interlock("policy", "pack", str(POLICY), "--out", str(bare))[1]["keys"] == []
    interlock("policy", "sign", str(bare), "--key", str(tmp_path / "vera.key"), "--out", str(half))
    status, value, _ = interlock("policy", "sign", str(half), "--key", str(tmp_path / "hugo.key"), "--out", str(full))
    assert (status, len(value["keys"])) == (0, 2)
    server.routes["POST /api/policy/bundles"] = (200, {"version": 1, "digest": value["digest"]})
    assert interlock("policy", "publish", str(full))[1]["digest"] == value["digest"]
    sent = base64.b64decode(server.sent("POST", "/api/policy/bundles")[0].json["archive"])
    assert sent == full.read_bytes()
    for key in tmp_path.glob("*.key"):
        assert key.read_bytes() not in sent


def test_refuses_when_a_bundle_would_be_replaced_or_signed_twice(interlock, tmp_path: Path) -> None:
    key, out = tmp_path / "vera.key", tmp_path / "a.bundle"
    interlock("policy", "keygen", "vera", "--out", str(key))
    words = ("policy", "sign", str(POLICY), "--key", str(key), "--out")
    assert interlock(*words, str(out))[0] == 0
    assert interlock(*words, str(out))[1]["error"]["code"] == "conflict.file"
    twice = interlock("policy", "sign", str(out), "--key", str(key), "--out", str(tmp_path / "b.bundle"))
    assert twice[1]["error"]["code"] == "conflict.signed"
    key.chmod(0o644)
    assert interlock(*words, str(tmp_path / "c.bundle"))[1]["error"]["code"] == "untrusted.key_file_mode"


def test_refuses_when_a_policy_has_errors(interlock, tmp_path: Path) -> None:
    for path in POLICY.glob("*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with (tmp_path / "policy.csv").open("a") as out:
        out.write("p, researcher, same, */*, no_such_action, none, -, allow\n")
    status, value, _ = interlock("policy", "check", str(tmp_path))
    assert (status, value["error"]["code"]) == (1, "malformed.policy")
    problem = value["error"]["details"]["problems"][0]
    assert problem["file"] == "policy.csv"
    assert problem["line"] > 1


def test_records_head_and_export(interlock, server, remy, tmp_path: Path, capfd) -> None:
    row = {"index": 4, "event": {"type": "gate.decided", "actor": "per_a", "occurred_us": 1, "facts": {"x": "\x1b[2J"}}}
    server.routes["GET /api/audit/records"] = (200, {"records": [row]})
    server.routes["GET /api/audit/head"] = (200, {"size": 5})
    server.routes["POST /api/audit/exports"] = (200, b"PK-bytes")
    assert interlock("audit", "head")[1]["size"] == 5
    assert interlock("audit", "records", "--type", "gate.decided", "--after", "3")[1]["records"][0]["index"] == 4
    assert server.sent("GET", "/api/audit/records")[0].query == {"after": "3", "limit": "50", "type": "gate.decided"}
    assert execute(["audit", "records"]) == 0
    assert "\x1b[2J" not in capfd.readouterr().out
    out = tmp_path / "e.zip"
    assert interlock("audit", "export", str(out))[1]["sha256"] == digest_bytes(b"PK-bytes")
    assert out.stat().st_mode & 0o777 == 0o600
    assert interlock("audit", "export", str(out))[1]["error"]["code"] == "conflict.file"


@pytest.mark.parametrize("data", [b"", b"not a zip", b"PK\x03\x04"])
def test_refuses_when_an_export_is_no_export(interlock, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "e.zip").write_bytes(data)
    status, value, _ = interlock("audit", "verify", str(tmp_path / "e.zip"))
    assert status != 0
    assert value.get("status") != "ok"
