"""`python -I -m control_plane` as a program: init, serve, second start, port in use, half-made state."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from control_plane import settings
from control_plane.init import initialise, refuse_unfinished
from control_plane.pager import run_hook
from control_plane.serve import bind
from control_plane.signing import Signers, add_bundle_signer
from interlock.errors import Conflict, Malformed, Refusal, Unavailable, Untrusted


def command(*words: str, state: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", "-m", "control_plane", *words, "--state", str(state)],
                          capture_output=True, text=True, timeout=60, check=False)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, (done.stdout, done.stderr)
    return str(json.loads(done.stderr.splitlines()[-1])["error"]["code"])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def made(state: Path) -> Path:
    initialise(state, site="demo", people_port=free_port(), nodes_port=free_port())
    return state


@contextmanager
def served(state: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    program = subprocess.Popen([sys.executable, "-I", "-m", "control_plane", "serve", "--state", str(state)],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stderr is not None
    try:
        line = program.stdout.readline()
        assert line, program.stderr.read()
        yield program, json.loads(line)
    finally:
        program.send_signal(signal.SIGTERM)
        program.wait(20)
        program.stdout.close()
        program.stderr.close()


def test_init_is_idempotent_and_keys_are_private(state: Path) -> None:
    first = command("init", "--site", "demo", state=state)
    assert first.returncode == 0, first.stderr
    before = (state / "control" / "keys" / "grant.key").read_bytes()
    assert command("init", "--site", "demo", state=state).returncode == 0
    assert (state / "control" / "keys" / "grant.key").read_bytes() == before
    for path in (state / "control" / "keys").iterdir():
        assert path.stat().st_mode & 0o077 == 0, path
    assert (state / "control").stat().st_mode & 0o777 == 0o700
    assert (state / "trust" / "ledger.vkey").stat().st_mode & 0o777 == 0o644


def test_refuses_a_half_made_state(made: Path) -> None:
    (made / "control" / "init.done").unlink()
    assert refusal(command("init", state=made)) == "conflict.half_made"
    with pytest.raises(Conflict) as refused:
        refuse_unfinished(settings.Places(made))  # what serve, bootstrap and the others ask first
    assert refused.value.code == "conflict.half_made"
    (made / "control" / "init.done").touch(0o600)
    refuse_unfinished(settings.Places(made))


def test_refuses_to_serve_what_was_never_made(state: Path) -> None:
    with pytest.raises(Unavailable) as refused:
        refuse_unfinished(settings.Places(state))
    assert refused.value.code == "unavailable.state"


def test_serves_both_listeners_and_refuses_a_second_start(made: Path) -> None:
    with served(made) as (program, ready):
        assert ready["ready"] == "control_plane"
        assert ready["pid"] == program.pid
        with httpx.Client(trust_env=False) as client:
            assert client.get(ready["people"] + "/healthz").json() == {"ok": True}
        assert refusal(command("serve", state=made)) == "conflict.running"
        assert refusal(command("bootstrap", "--recover", state=made)) == "conflict.running"
        link = command("bootstrap", state=made).stdout.strip()
        assert link.startswith(ready["people"] + "/enrol#")
        path = Path(command("join-file", "--node", "n1", state=made).stdout.strip())
        assert path.stat().st_mode & 0o777 == 0o600
        assert json.loads(path.read_text())["url"] == ready["nodes"]
    assert program.returncode == 0


def test_refuses_when_a_port_is_in_use(made: Path) -> None:
    found = settings.load(made)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", found.people_port))
        taken.listen()
        assert refusal(command("serve", state=made)) == "unavailable.port"
    for sock in bind(found.people_port):
        sock.close()


def test_refuses_a_key_that_others_can_read(made: Path) -> None:
    key = made / "control" / "keys" / "stop.key"
    key.chmod(0o644)
    with pytest.raises(Untrusted) as refused:
        Signers.load(made / "control" / "keys")
    assert refused.value.code == "untrusted.key_file_mode"
    key.chmod(0o600)
    Signers.load(made / "control" / "keys")


def test_refuses_unsafe_settings(made: Path) -> None:
    path = made / "control" / "settings.json"
    held = json.loads(path.read_text())

    def refused(**more: Any) -> Refusal:
        path.write_text(json.dumps({**held, **more}))
        with pytest.raises(Refusal) as found:
            settings.load(made)
        return found.value

    assert refused(production=True).code == "conflict.demo_state"
    assert isinstance(refused(unknown=1), Malformed)
    assert isinstance(refused(on_unconfirmed=["page-people"]), Malformed)
    assert isinstance(refused(cooldown_ms=-1), Malformed)
    path.write_text(json.dumps(held))
    assert settings.load(made).cooldown_ms == 0
    path.chmod(0o666)
    with pytest.raises(Untrusted):
        settings.load(made)
    site = replace(settings.Settings(settings.Places(made)), production=True, cooldown_ms=1)
    with pytest.raises(Conflict):
        settings.refuse_unsafe(site)


def test_a_signer_is_pinned_once(made: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from interlock.signed import public_text

    public = tmp_path / "a.pub.json"
    public.write_text(json.dumps({"name": "a", "key": public_text(Ed25519PrivateKey.generate().public_key())}))
    done = command("trust-signer", str(public), state=made)
    assert len(json.loads(done.stdout)["signers"]) == 1
    held = json.loads(public.read_text())
    assert len(add_bundle_signer(made / "trust", held["name"], held["key"])) == 1
    public.write_text(json.dumps({"name": "a", "key": public_text(Ed25519PrivateKey.generate().public_key())}))
    assert refusal(command("trust-signer", str(public), state=made)) == "conflict.signer"


def test_the_program_refuses_to_run_unisolated(made: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "control_plane", "serve", "--state", str(made)], capture_output=True,
                          text=True, timeout=60, check=False, env={**os.environ, "PYTHONWARNINGS": ""})
    assert refusal(done) == "untrusted.origin"


def test_the_hook_gets_json_and_its_failures_are_told(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = tmp_path / "hook"
    script.write_text(f"#!/bin/sh\ncat > {out}\n")
    script.chmod(0o700)
    assert run_hook([str(script)], {"order": "o"}) == "ok"
    assert json.loads(out.read_text()) == {"order": "o"}
    assert run_hook(["/bin/false"], {}) == "failed:1"
    assert run_hook(["/does/not/exist"], {}) == "missing"
    assert run_hook([], {}) == "none"
