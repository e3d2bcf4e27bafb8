"""The node's end of the node link: pinned CA, own name, renewal, expiry."""

import datetime as dt
import json
import ssl

import httpx
import pytest

from interlock.canon import digest_bytes
from interlock.errors import Malformed, NotFound, Unavailable, Untrusted
from runners import identity
from runners.folders import Folders
from runners.pinned import read_signers
from runners.upstream import Upstream, refusal_of, tls
from tests.runners.conftest import needs_root
from tests.runners.simulator import Simulator, Site

pytestmark = needs_root


@pytest.fixture
def upstream(joined: Folders):
    with Upstream(joined) as found:
        yield found


def test_it_speaks_as_its_node(upstream: Upstream, site: Site):
    upstream.facts({"tiers": []})
    assert site.facts == [{"tiers": []}]


def test_refuses_when_the_server_is_of_another_ca(simulator, joined, short):
    impostor = Simulator(Site(short / "other"))
    link = json.loads((joined.node / "link.json").read_text())
    (joined.node / "link.json").write_text(json.dumps({**link, "url": impostor.url}))
    with Upstream(joined) as found, pytest.raises(Unavailable):
        found.facts({})
    assert impostor.site.facts == []
    impostor.away()


def test_refuses_when_the_server_speaks_tls_1_2_only(simulator, site, joined, monkeypatch):
    honest = site.server_context

    def old() -> ssl.SSLContext:
        context = honest()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        return context

    with Upstream(joined) as found:
        found.facts({})  # control
        monkeypatch.setattr(site, "server_context", old)
        simulator.away()
        simulator.back()
        with pytest.raises(Unavailable):
            found.facts({})


def test_refuses_when_ca_pem_was_exchanged(joined, short):
    (joined.node / "ca.pem").write_text(identity.pem(Site(short / "other").ca))
    with pytest.raises(Untrusted) as refusal:
        Upstream(joined)
    assert refusal.value.code == "untrusted.ca"


def test_it_renews_at_half_of_its_life(simulator, site, host, short):
    from runners.join import join

    site.begin, site.life = dt.timedelta(minutes=30), dt.timedelta(minutes=20)
    join(simulator.join_file(short / "j"), host)
    before = (host.node / "node.pem").read_bytes()
    site.begin, site.life = dt.timedelta(minutes=5), dt.timedelta(days=1)
    with Upstream(host) as found:
        assert found.renew() is True
        assert (host.node / "node.pem").read_bytes() != before
        assert found.renew() is False  # fresh
        found.facts({})  # the new certificate is in use
        assert found.renew(force=True) is True
        found.facts({})


def test_refuses_when_the_renewed_certificate_is_for_another(upstream, site, monkeypatch):
    honest = site.issue
    monkeypatch.setattr(site, "issue", lambda csr, uri: honest(csr, "interlock://node/node-2"))
    with pytest.raises(Untrusted):
        upstream.renew(force=True)
    upstream.facts({})  # the old one stays


def test_refuses_when_the_certificate_has_expired(simulator, site, host, short):
    from runners.join import join

    site.begin, site.life = dt.timedelta(hours=2), dt.timedelta(hours=-1)
    join(simulator.join_file(short / "j"), host)
    with Upstream(host) as found, pytest.raises(Untrusted) as refusal:
        found.facts({})
    assert refusal.value.code == "untrusted.certificate_expired"
    assert "join" in refusal.value.next_step


def test_the_life_of_a_certificate_is_counted_from_its_own_dates(joined):
    certificate = identity.read_certificate((joined.node / "node.pem").read_bytes())
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    second = dt.timedelta(seconds=1)
    assert identity.check_life(certificate, start) is False
    assert identity.check_life(certificate, start + (end - start) / 2) is True
    assert identity.check_life(certificate, end - second) is True
    with pytest.raises(Untrusted):
        identity.check_life(certificate, end)


def test_an_answer_without_json_is_a_typed_refusal(upstream, simulator):
    assert refusal_of(httpx.Response(404, text="x")).code == NotFound.default_code
    assert refusal_of(httpx.Response(503, text="x")).code == Unavailable.default_code
    simulator.away()
    with pytest.raises(Unavailable) as refusal:
        upstream.work(0)
    assert refusal.value.code == "unavailable.control_plane"


def test_refuses_when_an_answer_is_larger_than_the_limit(upstream, site, monkeypatch):
    digest = digest_bytes(b"x" * 5000)
    site.code[digest] = b"x" * 5000
    assert len(upstream.code(digest)) == 5000  # control
    monkeypatch.setattr("runners.upstream.ANSWER_LIMIT", 4096)
    with pytest.raises(Malformed) as refusal:
        upstream.code(digest)
    assert refusal.value.code == "malformed.size"


@pytest.mark.parametrize("odd", ["", "{", "[]", '{"url": 1}'])
def test_refuses_when_link_json_is_no_link(joined, odd):
    (joined.node / "link.json").write_text(odd)
    with pytest.raises(Malformed) as refusal:
        Upstream(joined)
    assert refusal.value.code == "malformed.link"


@pytest.mark.parametrize("odd", ["", "{", "7", '[{"name": "x"}]'])
def test_refuses_when_the_local_list_of_signers_is_no_list(joined, odd):
    path = joined.node / "signers.json"
    assert read_signers(path) == []
    path.write_text(odd)
    path.chmod(0o600)
    with pytest.raises(Malformed) as refusal:
        read_signers(path)
    assert refusal.value.code == "malformed.signers"


def test_refuses_when_code_has_another_digest(upstream, site):
    site.code["sha256:" + "0" * 64] = b"x"
    with pytest.raises(Untrusted):
        upstream.code("sha256:" + "0" * 64)


def test_the_context_trusts_one_ca(site):
    context = tls(identity.pem(site.ca))
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert len(context.get_ca_certs()) == 1
