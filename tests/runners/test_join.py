"""Join: the CA by its hash before a secret is sent, one use, nothing half done."""

import json
import stat

import pytest
from cryptography import x509

from interlock.errors import Conflict, Denied, Malformed, Unavailable, Untrusted
from interlock.keyfile import read_ed25519
from interlock.signed import public_text
from runners import identity
from runners.folders import require_joined, staging
from runners.join import join, read_join_file
from tests.runners.conftest import needs_root
from tests.runners.simulator import Simulator, Site

pytestmark = needs_root


def test_a_host_joins(simulator, site, host, short):
    assert join(simulator.join_file(short / "j"), host) == "node-1"
    require_joined(host)
    certificate = identity.read_certificate((host.node / "node.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["interlock://node/node-1"]
    for name in ("node.key.pem", "node.pem", "ca.pem", "link.json"):
        assert stat.S_IMODE((host.node / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(host.node.stat().st_mode) == 0o700
    assert stat.S_IMODE((host.supervisor / "trust.json").stat().st_mode) == 0o600
    own = read_ed25519(host.supervisor / "supervisor.key")
    assert site.supervisor_key == public_text(own.public_key())
    assert json.loads((host.node / "link.json").read_text())["url"] == simulator.url


def test_the_node_key_never_leaves(simulator, site, host, short):
    join(simulator.join_file(short / "j"), host)
    pem = (host.node / "node.key.pem").read_text()
    assert "PRIVATE KEY" in pem
    sent = json.dumps([body for _, body in site.bodies])
    assert "CERTIFICATE REQUEST" in sent
    assert "PRIVATE" not in sent


def test_refuses_when_the_ca_is_another(simulator, site, host, short):
    with pytest.raises(Untrusted) as refusal:
        join(simulator.join_file(short / "j", ca_sha256="0" * 64), host)
    assert refusal.value.code == "untrusted.ca"
    assert site.bodies == []  # the secret was not sent
    assert not staging(host).exists()
    assert not host.node.exists()
    join(simulator.join_file(short / "j"), host)  # control: the right hash joins


def test_refuses_when_the_server_is_not_of_the_pinned_ca(simulator, site, host, short, monkeypatch):
    """The right CA lies in the presented chain, but the server's own certificate is from another one."""
    other = Site(short / "other")
    honest = other.server_context()
    leaf = (short / "other" / "tls.pem").read_text().split("-----BEGIN")[1]
    (short / "mixed.pem").write_text("-----BEGIN" + leaf + identity.pem(site.ca))
    honest.load_cert_chain(short / "mixed.pem", short / "other" / "tls.key.pem")
    monkeypatch.setattr(other, "server_context", lambda: honest)
    impostor = Simulator(other)
    try:
        with pytest.raises(Unavailable):
            join(simulator.join_file(short / "j", url=impostor.url), host)
        assert other.bodies == []
    finally:
        impostor.away()
    join(simulator.join_file(short / "j"), host)


def test_refuses_when_the_secret_is_wrong_and_leaves_nothing(simulator, site, host, short):
    with pytest.raises(Denied) as refusal:
        join(simulator.join_file(short / "j", secret="w" * 32), host)
    assert refusal.value.code == "denied.join_secret"
    assert not host.node.exists()
    assert not staging(host).exists()
    assert not (host.supervisor / "trust.json").exists()
    join(simulator.join_file(short / "j"), host)


def test_refuses_when_the_secret_was_used(simulator, site, host, short):
    path = simulator.join_file(short / "j")
    join(path, host)
    other = type(host)(short / "s2", short / "r2")
    with pytest.raises(Denied):
        join(path, other)


def test_refuses_when_joined_already(simulator, joined, short):
    with pytest.raises(Conflict) as refusal:
        join(short / "join.json", joined)
    assert refusal.value.code == "conflict.joined"


def test_refuses_when_the_state_is_half_made(simulator, host, short):
    staging(host).mkdir(parents=True)
    with pytest.raises(Conflict) as refusal:
        join(simulator.join_file(short / "j"), host)
    assert refusal.value.code == "conflict.half_made"
    staging(host).rmdir()
    join(short / "j", host)
    (host.node / "ca.pem").unlink()
    with pytest.raises(Conflict) as refusal:
        require_joined(host)
    assert refusal.value.code == "conflict.half_made"


def test_refuses_when_others_can_read_the_join_file(simulator, host, short):
    path = simulator.join_file(short / "j")
    path.chmod(0o644)
    with pytest.raises(Untrusted):
        read_join_file(path)
    path.chmod(0o600)
    assert read_join_file(path).node == "node-1"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"url": "http://x", "ca_sha256": "a", "node": "n", "secret": "s"}'])
def test_refuses_when_the_join_file_is_malformed(short, text):
    path = short / "j"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(Malformed):
        read_join_file(path)


@pytest.mark.parametrize("field", ["node", "san", "key", "trust"])
def test_refuses_when_the_answer_is_for_another(simulator, site, host, short, field, monkeypatch):
    honest = site.join

    def bent(body):
        answer = honest(body)
        csr = x509.load_pem_x509_csr(body["csr"].encode())
        if field == "node":
            answer["node"] = "node-2"
        elif field == "san":
            answer["certificate"] = site.issue(csr, "interlock://node/node-2")
        elif field == "key":
            other = x509.load_pem_x509_csr(identity.request(identity.new_key(), "node-1").encode())
            answer["certificate"] = site.issue(other, "interlock://node/node-1")
        else:
            site.node = "node-2"
            answer["trust"] = site.trust().as_json()
            site.node = "node-1"
        return answer

    monkeypatch.setattr(site, "join", bent)
    with pytest.raises(Untrusted):
        join(simulator.join_file(short / "j"), host)
    assert not host.node.exists()


def test_refuses_when_nobody_answers(simulator, host, short):
    path = simulator.join_file(short / "j")
    simulator.away()
    with pytest.raises(Unavailable) as refusal:
        join(path, host)
    assert refusal.value.code == "unavailable.control_plane"
    simulator.back()
    join(path, host)


def test_refuses_when_not_root(simulator, host, short, monkeypatch):
    monkeypatch.setattr("runners.folders.os.geteuid", lambda: 1000)
    with pytest.raises(Unavailable) as refusal:
        join(simulator.join_file(short / "j"), host)
    assert refusal.value.code == "unavailable.root"
    assert refusal.value.next_step
