"""The node's end of the node link: mutual TLS 1.3 with one pinned CA, JSON both ways (0001-seams §4).

Every failure to reach the control plane is Unavailable; every refusal of the control plane is the typed
error that it sent. Nothing here retries: whoever calls knows whether repeating is safe.
"""

import base64
import json
import ssl
import threading
from typing import Any, Self

import httpx

from interlock.canon import digest_bytes
from interlock.durable import write_over
from interlock.errors import CLASSES, Malformed, Refusal, Unavailable, Untrusted, from_json
from interlock.keyfile import read_private
from interlock.signed import Signed
from runners import identity
from runners.folders import Folders

ANSWER_LIMIT = 96 * 1024 * 1024
LONG_POLL_S = 25
_TIMEOUT = httpx.Timeout(10.0, read=LONG_POLL_S + 10.0)


def tls(ca_pem: str) -> ssl.SSLContext:
    """Return a client context that trusts `ca_pem` and nothing else, TLS 1.3 only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=ca_pem)
    return context


def read_link(found: Folders) -> dict[str, str]:
    """Return `{url, node, ca_sha256}` of a joined node; raises Malformed or Unavailable."""
    try:
        value = json.loads(read_private(found.node / "link.json"))
    except ValueError:
        value = None
    if not isinstance(value, dict) or not all(isinstance(value.get(k), str) for k in ("url", "node", "ca_sha256")):
        raise Malformed("link.json names no url, node and CA", code="link")
    return value


def refusal_of(response: httpx.Response) -> Refusal:
    """Return the typed refusal that an answer carries; its class follows the code, else the status."""
    try:
        error = response.json().get("error")
    except (ValueError, AttributeError):
        error = None
    if isinstance(error, dict):
        return from_json(error)
    fitting = [c for c in CLASSES.values() if c.http_status == response.status_code]
    return (fitting[0] if len(fitting) == 1 else Unavailable)(
        f"the control plane answered {response.status_code}", details={"status": response.status_code}
    )


def _read(response: httpx.Response) -> httpx.Response:
    """Return an answer that was read to its end; raises Malformed (``malformed.size``) over ANSWER_LIMIT bytes.

    The memory of a node is not the control plane's to fill: a run's kill depends on programs of this host.
    """
    parts, size = [], 0
    for part in response.iter_bytes():
        size += len(part)
        if size > ANSWER_LIMIT:
            raise Malformed(f"an answer is larger than {ANSWER_LIMIT} bytes", code="size")
        parts.append(part)
    return httpx.Response(response.status_code, content=b"".join(parts))


class Upstream:
    """One client for all threads of the node program; `renew` swaps the certificate under it."""

    def __init__(self, found: Folders) -> None:
        self._folders = found
        link = read_link(found)
        self.node, self.url = link["node"], link["url"]
        self._ca = (found.node / "ca.pem").read_text()
        if identity.fingerprint(identity.read_certificate(self._ca)) != link["ca_sha256"]:
            raise Untrusted("ca.pem is not the certificate that this node joined with", code="ca")
        self.key = identity.read_key(read_private(found.node / "node.key.pem"))
        self._swap = threading.Lock()
        self._before: httpx.Client | None = None
        self._client = self._connect()

    def _connect(self) -> httpx.Client:
        certificate = self._folders.node / "node.pem"
        self._certificate = identity.read_certificate(certificate.read_bytes())
        context = tls(self._ca)
        context.load_cert_chain(certificate, self._folders.node / "node.key.pem")
        return httpx.Client(base_url=self.url, verify=context, timeout=_TIMEOUT, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        with self._swap:
            self._client.close()
            if self._before is not None:
                self._before.close()

    def _send(self, method: str, path: str, **what: Any) -> httpx.Response:
        identity.check_life(self._certificate)
        try:
            with self._client.stream(method, path, **what) as coming:
                response = _read(coming)
        except (httpx.HTTPError, ssl.SSLError, RuntimeError) as error:
            raise Unavailable(
                f"the control plane does not answer: {type(error).__name__}", code="control_plane",
                next_step=f"check that {self.url} is up",
            ) from None
        if response.status_code >= 400:
            raise refusal_of(response)
        return response

    def _json(self, method: str, path: str, **what: Any) -> dict[str, Any]:
        try:
            value = self._send(method, path, **what).json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise Malformed("the control plane's answer is not a JSON object", code="answer")
        return value

    def renew(self, *, force: bool = False) -> bool:
        """Renew the certificate at half of its life; returns whether it did.

        Raises Untrusted when it is over or when the answer is not for our key and node.
        """
        if not identity.check_life(self._certificate) and not force:
            return False
        answer = self._json("POST", "/node/certificate", json={"csr": identity.request(self.key, self.node)})
        fresh = identity.read_certificate(str(answer.get("certificate")))
        identity.check(fresh, identity.read_certificate(self._ca), self.key, self.node)
        with self._swap:
            write_over(self._folders.node / "node.pem", str(answer["certificate"]).encode(), 0o600)
            # requests in flight end on the client of before, which is closed at the next renewal
            if self._before is not None:
                self._before.close()
            self._before, self._client = self._client, self._connect()
        return True

    def work(self, wait_s: int = LONG_POLL_S) -> list[Signed]:
        """Return the launch orders that wait for this node (long poll)."""
        found = self._json("GET", "/node/work", params={"wait": wait_s}).get("launches")
        if not isinstance(found, list):
            raise Malformed("the answer holds no launches", code="answer")
        return [Signed.from_json(f) for f in found]

    def heartbeat(self, beats: dict[str, Any]) -> dict[str, Any]:
        """Pass on the supervisor's heartbeat and return the answer for it."""
        return self._json("POST", "/node/heartbeat", json=beats)

    def state(self, run: str, attempt: int, body: dict[str, Any]) -> None:
        """Report the state of an attempt."""
        self._json("POST", f"/node/runs/{run}/{attempt}/state", json=body)

    def output(self, run: str, attempt: int, offset: int, data: bytes) -> int:
        """Ship live output from `offset`; returns the next offset. Repeating is safe."""
        body = {"offset": offset, "data": base64.b64encode(data).decode()}
        found = self._json("POST", f"/node/runs/{run}/{attempt}/output", json=body).get("next")
        if not isinstance(found, int) or isinstance(found, bool):
            raise Malformed("the answer names no next offset", code="answer")
        return found

    def file(self, run: str, attempt: int, name: str, data: bytes) -> None:
        """Ship one collected file with its digest."""
        body = {"name": name, "data": base64.b64encode(data).decode(), "digest": digest_bytes(data)}
        self._json("POST", f"/node/runs/{run}/{attempt}/files", json=body)

    def keys(self, run: str, attempt: int) -> dict[str, Any]:
        """Return the keys of a live attempt: ``{run_key: base64 or null, files: {version: {file: base64}}}``.

        Raises the refusal of key release (no live lease, stopped, another node's run).
        """
        return self._json("POST", f"/node/runs/{run}/{attempt}/keys", json={})

    def checkpoint(self, run: str, attempt: int, manifest: bytes) -> str:
        """Report a committed checkpoint by its manifest; returns its digest. Repeating is safe."""
        body = {"manifest": base64.b64encode(manifest).decode()}
        return str(self._json("POST", f"/node/runs/{run}/{attempt}/checkpoints", json=body).get("digest"))

    def engine_ready(self, run: str, attempt: int) -> None:
        """Report that the engine of this attempt is warm; its version moves to serving."""
        self._json("POST", f"/node/runs/{run}/{attempt}/ready", json={})

    def code(self, digest: str) -> bytes:
        """Return the bytes of a code file; raises Untrusted when they do not have that digest."""
        data = self._send("GET", f"/node/code/{digest}").content
        if digest_bytes(data) != digest:
            raise Untrusted("a code file does not have the digest of the plan", code="digest")
        return data

    def bundle(self) -> tuple[int, bytes]:
        """Return version and archive of the active policy bundle, unverified."""
        answer = self._json("GET", "/node/bundle")
        try:
            return int(answer["version"]), base64.b64decode(answer["archive"], validate=True)
        except (KeyError, TypeError, ValueError):
            raise Malformed("the answer holds no bundle", code="answer") from None

    def snapshot(self, nonce: str) -> Signed:
        """Return the signed entitlements that answer `nonce`, unverified."""
        answer = self._json("GET", "/node/snapshot", params={"nonce": nonce})
        return Signed.from_json(answer.get("snapshot", answer))

    def spool(self, stream: str, records: list[tuple[int, bytes]]) -> int:
        """Ship records of one stream; returns the next sequence number that the ledger expects."""
        rows = [{"seq": seq, "body": base64.b64encode(body).decode()} for seq, body in records]
        found = self._json("POST", "/node/spool", json={"stream": stream, "records": rows}).get("next_seq")
        if not isinstance(found, int) or isinstance(found, bool):
            raise Malformed("the answer names no next record", code="answer")
        return found

    def marks(self, body: bytes) -> None:
        """Ship the high-water marks, signed by the node key."""
        text = base64.b64encode(body).decode()
        self._json("POST", "/node/marks", json={"body": text, "sig": identity.sign_mark(self.key, body)})

    def facts(self, body: dict[str, Any]) -> None:
        """Report what this host isolates and which tiers it may run."""
        self._json("POST", "/node/facts", json=body)

