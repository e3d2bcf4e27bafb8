"""Key files of a control plane that are open, gone or spoilt: `serve` says which and what to do, nothing starts.

The listener's certificate is the exception that heals: the site CA issues it anew before it ends.
"""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from control_plane import certificates
from control_plane.certificates import ready_server
from control_plane.init import initialise
from interlock.errors import Malformed, Untrusted

KEYS = ("grant.key", "stop.key", "head.key", "kek.key", "ca.key.pem", "ca.pem", "tls.key.pem", "tls.pem")
CODES = {"open": "untrusted.key_file_mode", "gone": "unavailable.key_file", "spoilt": "malformed.key_file"}


def _ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


@pytest.fixture
def state() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ilf-", dir="/tmp"))
    people, nodes = _ports()
    initialise(folder / "s", site="demo", people_port=people, nodes_port=nodes)
    yield folder / "s"
    shutil.rmtree(folder)


def _spoil(path: Path, how: str) -> None:
    if how == "open":
        path.chmod(0o644)
    elif how == "gone":
        path.unlink()
    else:
        path.write_bytes(b"x")


@pytest.mark.parametrize("how", CODES)
@pytest.mark.parametrize("name", ["grant.key", "kek.key", "ca.key.pem", "tls.key.pem"])
def test_refuses_when_a_key_file_is_open_gone_or_spoilt(state: Path, name: str, how: str) -> None:
    _spoil(state / "control" / "keys" / name, how)
    done = subprocess.run([sys.executable, "-I", "-m", "control_plane", "serve", "--state", str(state)],
                          capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, ""), "no ready line"
    assert len(done.stderr.splitlines()) == 1, done.stderr
    error = json.loads(done.stderr)["error"]
    assert error["code"] == CODES[how]
    assert name in error["message"] + error["next_step"] or "site CA" in error["message"]
    assert error["next_step"]


@pytest.mark.parametrize("name", ["tls.key.pem", "tls.pem"])
def test_refuses_when_the_listeners_pair_is_open_spoilt_or_no_pair(state: Path, name: str) -> None:
    keys = state / "control" / "keys"
    before = (keys / name).read_bytes()
    ready_server(keys)
    assert (keys / name).read_bytes() == before, "the positive control: a good pair is left alone"
    (keys / name).chmod(0o640)
    with pytest.raises(Untrusted):
        ready_server(keys)
    (keys / name).chmod(0o600)
    (keys / name).write_bytes(certificates.Authority.load(keys).server()[0 if name == "tls.key.pem" else 1])
    with pytest.raises(Malformed) as refused:
        ready_server(keys)
    assert "no pair" in refused.value.message
    assert "made anew" in refused.value.next_step


@pytest.mark.parametrize("why", ["both are gone", "it ends soon"])
def test_the_listeners_certificate_is_issued_anew(state: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Without this a site would end one year after its first start."""
    keys = state / "control" / "keys"
    for name in ("tls.key.pem", "tls.pem"):
        (keys / name).unlink()
    if why == "it ends soon":
        with monkeypatch.context() as short:
            short.setattr(certificates, "_SERVER_LIFE", timedelta(days=29))
            ready_server(keys)
    ready_server(keys)
    found = x509.load_pem_x509_certificate((keys / "tls.pem").read_bytes())
    assert found.not_valid_after_utc - datetime.now(UTC) > timedelta(days=300)
    found.verify_directly_issued_by(certificates.Authority.load(keys).certificate)
    assert {p.name: p.stat().st_mode & 0o777 for p in keys.iterdir() if p.is_file()} == dict.fromkeys(KEYS, 0o600)
