"""Enrolment, sign-in, keys: what the command keeps, and what it never shows."""

import io
import json
from pathlib import Path

import pytest

from control_plane.cli.profile import Profile
from interlock.keyfile import read_ed25519, write_private
from interlock.signed import public_text
from tests.cli.server import PeopleServer, error


@pytest.fixture
def password(home: Path) -> Path:
    path = home / "password"
    write_private(path, b"correct horse battery staple\n")
    return path


def _enrolment(server: PeopleServer) -> None:
    begun = {"person": "per_a", "totp_secret": "SECRETTOTP", "totp_uri": "otpauth://x"}
    server.routes["POST /api/enrol"] = (200, begun)
    server.routes["POST /api/enrol/confirm"] = (200, {"session": "new-session", "person": "per_a"})


def test_enrol_makes_a_person_key_and_signs_in(interlock, home, server, password, monkeypatch) -> None:
    _enrolment(server)
    monkeypatch.setenv("INTERLOCK_CODE", "123456")
    phone = home / "phone"
    status, value, err = interlock("--profile", "ada", "enrol", f"{server.url}/enrol#one-time-secret", "--name", "ada",
                                   "--password-file", str(password), "--totp-file", str(phone))
    assert status == 0, value
    profile = Profile(home / "profiles" / "ada")
    begun = server.sent("POST", "/api/enrol")[0].json
    assert begun["person_key"] == public_text(read_ed25519(profile.key_path).public_key())
    assert (begun["secret"], begun["name"]) == ("one-time-secret", "ada")
    assert server.sent("POST", "/api/enrol/confirm")[0].json == {"secret": "one-time-secret", "code": "123456"}
    assert profile.load()["session"] == "new-session"
    assert (phone.read_text(), phone.stat().st_mode & 0o777) == ("otpauth://x", 0o600)
    for secret in ("new-session", "SECRETTOTP", "one-time-secret", "correct horse"):
        assert secret not in json.dumps(value) + err


def test_the_code_is_read_after_the_phone_has_its_secret(interlock, home, server, password, monkeypatch) -> None:
    _enrolment(server)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{server.url}/enrol#abc\n654321\n"))
    status, _, _ = interlock("enrol", "-", "--password-file", str(password), "--totp-file", str(home / "p"))
    assert status == 0
    assert server.sent("POST", "/api/enrol/confirm")[0].json["code"] == "654321"


def test_refuses_when_the_password_file_is_open_to_others(interlock, server, password, home) -> None:
    _enrolment(server)
    password.chmod(0o640)
    status, value, _ = interlock("enrol", f"{server.url}/enrol#abc", "--password-file", str(password), "--code", "1")
    assert (status, value["error"]["code"]) == (1, "untrusted.key_file_mode")
    assert not server.sent("POST", "/api/enrol")


def test_refuses_when_a_link_has_no_secret(interlock, server, password) -> None:
    status, value, _ = interlock("enrol", f"{server.url}/enrol", "--password-file", str(password))
    assert (status, value["error"]["code"]) == (2, "usage.link")


def test_refuses_when_a_link_would_carry_the_password_in_clear(interlock, password) -> None:
    status, value, _ = interlock("enrol", "http://example.org/enrol#abc", "--password-file", str(password))
    assert (status, value["error"]["code"]) == (1, "untrusted.url")


def test_login_keeps_the_session_and_logout_forgets_it(interlock, server, remy, password) -> None:
    server.routes["POST /api/login"] = (200, {"session": "fresh", "person": "per_remy", "factor": True})
    server.routes["POST /api/logout"] = (200, {"signed_out": True})
    status, value, _ = interlock("login", "remy", "--password-file", str(password), "--code", "111111")
    assert status == 0
    assert "fresh" not in json.dumps(value)
    assert remy.load()["session"] == "fresh"
    assert interlock("logout")[0] == 0
    assert "session" not in remy.load()
    assert remy.key_path.exists()
    assert server.sent("POST", "/api/logout")[0].headers["authorization"] == "Bearer fresh"


def test_logout_forgets_the_session_even_when_nothing_answers(interlock, server, remy) -> None:
    server.close()
    assert interlock("logout")[0] == 3
    assert "session" not in remy.load()


def test_invite_and_keys(interlock, server, remy) -> None:
    server.routes["POST /api/invitations"] = (200, {"link": "http://localhost/enrol#x", "expires_us": 1})
    server.routes["GET /api/keys"] = (200, {"keys": []})
    server.routes["POST /api/keys"] = (200, {"key": "interlock_sk_x"})
    server.routes["DELETE /api/keys/k1"] = (200, {"revoked": True})
    assert interlock("invite", "olga", "--role", "safety_officer")[1]["link"].endswith("#x")
    sent = server.sent("POST", "/api/invitations")[0].json
    assert sent == {"name": "olga", "roles": ["safety_officer"], "tenant": "lab"}
    assert interlock("keys", "list")[0] == 0
    assert interlock("keys", "mint", "ci", "--scope", "launch")[1]["key"] == "interlock_sk_x"
    assert interlock("keys", "revoke", "k1")[0] == 0


def test_an_api_key_of_the_environment_is_used(interlock, server, remy, monkeypatch) -> None:
    monkeypatch.setenv("INTERLOCK_API_KEY", "interlock_sk_abc")
    assert interlock("whoami")[0] == 0
    assert server.asked[-1].headers["authorization"] == "Bearer interlock_sk_abc"


def test_a_wrong_code_is_the_servers_refusal(interlock, server, remy, password) -> None:
    server.routes["POST /api/login"] = error(401, "untrusted.factor")
    status, value, _ = interlock("login", "remy", "--password-file", str(password), "--code", "000000")
    assert (status, value["error"]["code"]) == (1, "untrusted.factor")
    assert remy.load()["session"] == "session-secret"
