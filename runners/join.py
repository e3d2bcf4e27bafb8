"""Join: how a host becomes a node of a site (docs/formats/join.md, trust.md "Join").

The rules, in order:
1. Nothing is sent before the presented chain holds the CA whose SHA-256 the join file names.
2. The key is made here and only its certificate request leaves.
3. The node id is the one of the join file, and the certificate, the trust list and the answer must all say so.
4. Everything is built in a folder beside and moved into place last; a crash leaves a state that is refused,
   not one that half works. A refusal of the control plane leaves nothing.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from interlock.call import text
from interlock.canon import canonical
from interlock.durable import sync_folder, write_over
from interlock.errors import Conflict, Malformed, Unavailable, Untrusted
from interlock.keyfile import read_ed25519, read_private, write_ed25519, write_private
from interlock.signed import TRUST, Signed, key_id, public_from_text, public_text, verify
from runners import identity
from runners.folders import Folders, half_made, require_root, staging
from runners.upstream import refusal_of, tls

_CONNECT_S = 10.0


@dataclass(frozen=True)
class JoinFile:
    """The invitation: where, whom to trust, who one will be, and the secret that works once."""

    url: str
    ca_sha256: str
    node: str
    secret: str


def read_join_file(path: Path) -> JoinFile:
    """Read a 0600 join file; raises Untrusted (others can read it), Unavailable or Malformed."""
    try:
        value = json.loads(read_private(path))
    except ValueError:
        raise Malformed(f"{path} is not JSON", code="join_file") from None
    if not isinstance(value, dict):
        raise Malformed(f"{path} is not a join file", code="join_file")
    found = JoinFile(
        text(value, "url", limit=300), text(value, "ca_sha256", limit=80).removeprefix("sha256:").lower(),
        text(value, "node", limit=64), text(value, "secret", limit=300),
    )
    if urlsplit(found.url).scheme != "https" or not urlsplit(found.url).hostname:
        raise Malformed("a join file names an https address", code="join_file")
    return found


def _presented(url: str) -> list[bytes]:
    """Return the chain that the server presents, as DER, without trusting any of it."""
    where = urlsplit(url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((where.hostname or "", where.port or 443), _CONNECT_S) as plain,
            context.wrap_socket(plain, server_hostname=where.hostname) as line,
        ):
            if hasattr(line, "get_unverified_chain"):  # public since Python 3.13
                return [bytes(c) for c in line.get_unverified_chain()]
            chain: Any = line._sslobj.get_unverified_chain()  # type: ignore[attr-defined]
            return [ssl.PEM_cert_to_DER_cert(c.public_bytes()) for c in chain]
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"the control plane does not answer at {url}: {error}", code="control_plane",
            next_step="check the address in the join file and that the control plane is up",
        ) from None


def fetch_ca(file: JoinFile) -> x509.Certificate:
    """Return the CA certificate that the join file pins; raises Untrusted (``untrusted.ca``).

    Nothing but a TLS handshake has happened when this returns: the secret is still ours.
    """
    for der in _presented(file.url):
        certificate = x509.load_der_x509_certificate(der)
        if identity.fingerprint(certificate) == file.ca_sha256:
            return certificate
    raise Untrusted(
        "the server does not present the CA that the join file names", code="ca",
        next_step="compare the address, and ask for a new join file if the site was set up anew",
    )


def _ask(file: JoinFile, ca: x509.Certificate, body: dict[str, str]) -> dict[str, Any]:
    pem = identity.pem(ca)
    try:
        with httpx.Client(base_url=file.url, verify=tls(pem), timeout=_CONNECT_S, trust_env=False) as client:
            response = client.post("/node/join", json=body)
    except (httpx.HTTPError, ssl.SSLError) as error:
        raise Unavailable(f"the control plane does not answer: {error}", code="control_plane") from None
    if response.status_code >= 400:
        raise refusal_of(response)
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise Malformed("the answer to the join is not a JSON object", code="answer")
    return answer


def first_trust(value: object, node: str) -> Signed:
    """Check the first trust list, which came over the pinned channel, and return it.

    It must be for this node and signed by a grant key that it names itself; later lists must be signed by
    a grant key that is in force then (0001-seams §7). Raises Untrusted or Malformed.
    """
    trust = Signed.from_json(value)
    body = trust.body()
    grant = body.get("grant")
    if not isinstance(grant, list) or not grant:
        raise Malformed("the trust list names no grant key", code="trust")
    keys = {key_id(k): k for k in (public_from_text(str(g)) for g in grant)}
    verify(trust, TRUST, keys)
    if body.get("node") != node:
        raise Untrusted("the trust list is for another node", code="trust")
    return trust


def supervisor_key(found: Folders) -> Ed25519PrivateKey:
    """Return the supervisor's key, made now when the supervisor never started on this host."""
    found.supervisor.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = found.supervisor / "supervisor.key"
    if not path.exists():
        with contextlib.suppress(Conflict):  # the supervisor may make it at this very moment
            write_ed25519(path, Ed25519PrivateKey.generate())
    return read_ed25519(path)


@contextlib.contextmanager
def _alone(found: Folders) -> Iterator[None]:
    found.state.mkdir(mode=0o755, parents=True, exist_ok=True)
    fd = os.open(found.state / ".join.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise Conflict("another join is at work here", code="running") from None
    finally:
        os.close(fd)


def _refuse_what_is_there(found: Folders) -> None:
    if (found.node / "link.json").exists():
        raise Conflict(
            "this host has joined already", code="joined",
            next_step=f"to move it to another site, stop its programs and move {found.node} away",
        )
    if staging(found).exists():
        raise half_made(found, "an earlier join broke off")
    if found.node.exists() and any(found.node.iterdir()):
        raise half_made(found, f"{found.node} holds files but no link.json")


def join(path: Path, found: Folders) -> str:
    """Join the site that the join file names; returns the node id.

    Raises Unavailable (no root, nobody answers), Untrusted (file mode, CA, answer), Conflict (joined
    already, half made), or whatever the control plane says of the secret.
    """
    require_root()
    file = read_join_file(path)
    with _alone(found):
        _refuse_what_is_there(found)
        ca = fetch_ca(file)
        place = staging(found)
        place.mkdir(mode=0o700)
        try:
            key = identity.new_key()
            write_private(place / "node.key.pem", identity.key_pem(key))
            csr = identity.request(key, file.node)
            public = public_text(supervisor_key(found).public_key())
            answer = _ask(file, ca, {"secret": file.secret, "csr": csr, "supervisor_key": public})
            trust = _check_answer(answer, file, ca, key)
        except BaseException:
            shutil.rmtree(place)
            raise
        _settle(found, file, ca, str(answer["certificate"]), trust)
    return file.node


def _check_answer(answer: dict[str, Any], file: JoinFile, ca: x509.Certificate, key: Any) -> Signed:
    if answer.get("node") != file.node:
        raise Untrusted("the answer names another node than the join file", code="node")
    if identity.read_certificate(str(answer.get("ca"))) != ca:
        raise Untrusted("the answer holds another CA than the join file pins", code="ca")
    identity.check(identity.read_certificate(str(answer.get("certificate"))), ca, key, file.node)
    return first_trust(answer.get("trust"), file.node)


def _settle(found: Folders, file: JoinFile, ca: x509.Certificate, certificate: str, trust: Signed) -> None:
    """Write everything, then move the node folder into place: the last step makes the host a node."""
    place = staging(found)
    write_over(place / "node.pem", certificate.encode(), 0o600)
    write_over(place / "ca.pem", identity.pem(ca).encode(), 0o600)
    for name in ("spool", "used-orders", "code", "work"):
        (place / name).mkdir(mode=0o700)
    write_over(found.supervisor / "trust.json", canonical(trust.as_json()), 0o600)
    found.shared.mkdir(mode=0o755, exist_ok=True)
    write_over(found.shared / "trust.json", canonical(trust.as_json()), 0o644)
    link = {"url": file.url, "node": file.node, "ca_sha256": file.ca_sha256}
    write_over(place / "link.json", canonical(link), 0o600)
    place.rename(found.node)
    sync_folder(found.state)
