"""A small control plane for tests of the node: real TLS 1.3 with a CA of its own, real signatures.

It speaks the node link of docs/decisions/0001-seams.md §4. Tests bend it: a wrong secret, another node's
certificate, leases refused, the server away. What arrived lies in lists.
"""

import base64
import datetime as dt
import json
import re
import ssl
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from interlock.call import new_id
from interlock.canon import digest_bytes
from interlock.errors import Denied, Malformed, NotFound, Refusal, Untrusted
from interlock.order import LaunchOrder, Lease, Scope, StopOrder
from interlock.signed import (
    GRANT,
    LEASE,
    SNAPSHOT,
    STOP,
    STOPS,
    TRUST,
    Signed,
    key_id,
    public_text,
    sign,
    verify,
)
from interlock.tier import PROFILES
from runners import identity

DAY = dt.timedelta(days=1)
_RUN = re.compile(r"^/node/runs/([^/]+)/(\d+)/(state|output|files)$")


def authority() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test site")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - DAY).not_valid_after(now + DAY)
        .add_extension(x509.BasicConstraints(True, 0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(True, False, False, False, False, True, True, False, False), critical=True,
        ).sign(key, hashes.SHA256())
    )
    return key, made


@dataclass
class Site:
    """Keys of a site and what the simulator answers."""

    folder: Path
    node: str = "node-1"
    secret: str = "s" * 32
    ca_key: Any = None
    ca: Any = None
    grant: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    stop: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    signers: list[dict[str, str]] = field(default_factory=list)
    bundle: tuple[int, bytes] = (0, b"")
    roles: list[dict[str, str]] = field(default_factory=list)
    code: dict[str, bytes] = field(default_factory=dict)
    launches: list[Signed] = field(default_factory=list)
    orders: list[Signed] = field(default_factory=list)
    epoch: int = 0
    leases: bool = True
    life: dt.timedelta = DAY
    begin: dt.timedelta = dt.timedelta(minutes=5)
    supervisor_key: str = ""
    states: list[dict[str, Any]] = field(default_factory=list)
    output: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    records: dict[str, list[bytes]] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    beats: list[dict[str, Any]] = field(default_factory=list)
    receipts: list[Signed] = field(default_factory=list)
    bodies: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ca_key, self.ca = authority()
        self.lock = threading.RLock()

    # --- certificates ---------------------------------------------------------------------------------

    def issue(self, csr: x509.CertificateSigningRequest, uri: str, life: dt.timedelta | None = None) -> str:
        now = dt.datetime.now(dt.UTC)
        return self._sign(
            csr.public_key(), [x509.UniformResourceIdentifier(uri)], now - self.begin, now + (life or self.life)
        ).public_bytes(Encoding.PEM).decode()

    def _sign(self, public: Any, names: list[Any], start: dt.datetime, end: dt.datetime) -> x509.Certificate:
        return (
            x509.CertificateBuilder().subject_name(x509.Name([])).issuer_name(self.ca.subject).public_key(public)
            .serial_number(x509.random_serial_number()).not_valid_before(start).not_valid_after(end)
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.ca_key.public_key()), critical=False)
            .sign(self.ca_key, hashes.SHA256())
        )

    def server_context(self) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        now = dt.datetime.now(dt.UTC)
        own = self._sign(key.public_key(), [x509.DNSName("localhost")], now - DAY, now + DAY)
        chain, private, ca = (self.folder / n for n in ("tls.pem", "tls.key.pem", "ca.pem"))
        chain.write_text(identity.pem(own) + identity.pem(self.ca))
        private.write_bytes(identity.key_pem(key))
        ca.write_text(identity.pem(self.ca))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(chain, private)
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_OPTIONAL
        return context

    # --- signed things --------------------------------------------------------------------------------

    def trust(self) -> Signed:
        return sign(TRUST, {
            "version": 1, "node": self.node, "grant": [public_text(self.grant.public_key())],
            "stop": [public_text(self.stop.public_key())], "persons": [], "threshold": 2,
            "signers": self.signers, "cooldown_ms": 0, "approvals": [],
        }, self.grant)

    def launch(self, order: LaunchOrder, key: Ed25519PrivateKey | None = None) -> Signed:
        signed = sign(GRANT, order.as_json(), key or self.grant)
        with self.lock:
            self.launches.append(signed)
        return signed

    def stop_order(self, scope: str, actor: str = "oncall") -> StopOrder:
        with self.lock:
            self.epoch += 1
            order = StopOrder(new_id("stop"), Scope.parse(scope), StopOrder.from_json({
                "id": "x", "scope": {"kind": "everything", "id": ""}, "mode": "kill", "epoch": 0, "actor": "x",
                "reason": "",
            }).mode, self.epoch, actor, "a test")
            self.orders.append(sign(STOP, order.as_json(), self.stop))
        return order

    def wait_for(self, what: Any, seconds: float = 15.0) -> Any:
        """Return the first truthy `what()`; fail after `seconds`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with self.lock:
                found = what()
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError(f"did not happen within {seconds} s; states {self.states} bodies {self.bodies[-5:]}")

    def state_of(self, run: str, state: str) -> dict[str, Any] | None:
        return next((s for s in self.states if s["run"] == run and s["state"] == state), None)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(r)["event"] for rows in self.records.values() for r in rows]

    # --- routes ---------------------------------------------------------------------------------------

    def join(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["secret"] != self.secret:
            raise Denied("the join secret is wrong, used or expired", code="join_secret")
        self.secret = new_id("spent")
        self.supervisor_key = body["supervisor_key"]
        csr = x509.load_pem_x509_csr(body["csr"].encode())
        return {
            "node": self.node, "certificate": self.issue(csr, f"interlock://node/{self.node}"),
            "ca": identity.pem(self.ca), "trust": self.trust().as_json(),
        }

    def heartbeat(self, body: dict[str, Any]) -> dict[str, Any]:
        self.beats.append(body)
        self.receipts += [Signed.from_json(r) for r in body.get("receipts", [])]
        leases, refused = [], []
        for beat in body["beats"]:
            order = next((o for o in self._granted() if o.run == beat["run"]), None)
            stops = [StopOrder.from_json(o.body()) for o in self.orders]
            if order is None or not self.leases or any(s.scope.matches(order.labels) for s in stops):
                refused.append({"nonce": beat["nonce"], "run": beat["run"], "attempt": beat["attempt"],
                                "code": "stopped"})
                continue
            lease = Lease(beat["nonce"], beat["run"], beat["attempt"], self.node, order.lease_ms, self.epoch)
            leases.append(sign(LEASE, lease.as_json(), self.grant).as_json())
        stops_body = {"nonce": body["nonce"], "orders": [o.as_json() for o in self.orders], "cleared": [],
                      "epoch": self.epoch}
        return {
            "leases": leases, "refused": refused, "orders": [o.as_json() for o in self.orders],
            "stops": sign(STOPS, stops_body, self.stop).as_json(), "trust": None, "acked": [],
            "receipts_acked": [r["order"] for r in (x.body() for x in self.receipts)],
        }

    def _granted(self) -> list[LaunchOrder]:
        return [LaunchOrder.from_json(s.body()) for s in self.launches]

    def waiting(self) -> list[Signed]:
        told = {(s["run"], s["attempt"]) for s in self.states}
        return [s for s in self.launches if (s.body()["run"], s.body()["attempt"]) not in told]

    def snapshot(self, nonce: str) -> Signed:
        return sign(SNAPSHOT, {
            "nonce": nonce, "roles": self.roles, "programmes": [], "disabled": [], "keys": [], "models": [],
            "bundle_version": self.bundle[0], "epoch": self.epoch,
        }, self.grant)

    def spool(self, body: dict[str, Any]) -> dict[str, Any]:
        rows = self.records.setdefault(body["stream"], [])
        for record in body["records"]:
            if record["seq"] == len(rows):
                rows.append(base64.b64decode(record["body"]))
        return {"next_seq": len(rows)}

    def on_run(self, run: str, attempt: int, what: str, body: dict[str, Any]) -> dict[str, Any]:
        name = f"{run}.{attempt}"
        if what == "state":
            self.states.append({"run": run, "attempt": attempt, **body})
            return {}
        data = base64.b64decode(body["data"])
        if what == "files":
            assert digest_bytes(data) == body["digest"]
            self.files[f"{name}/{body['name']}"] = data
            return {}
        have = self.output.setdefault(name, b"")
        if body["offset"] == len(have):
            self.output[name] = have + data
        return {"next": len(self.output[name])}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        self._serve(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _peer(self) -> str:
        found = self.connection.getpeercert()  # type: ignore[attr-defined]
        return next((v for k, v in (found or {}).get("subjectAltName", ()) if k == "URI"), "")

    def _serve(self, body: Any) -> None:
        where = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(where.query).items()}
        site = self.site
        site.bodies.append((where.path, body))
        try:
            if where.path != "/node/join" and self._peer() != f"interlock://node/{site.node}":
                raise Untrusted("no certificate of this node", code="node")
            answer = self._route(where.path, query, body)
        except Refusal as refusal:
            self._answer(refusal.http_status, json.dumps({"error": refusal.as_json()}).encode())
            return
        self._answer(200, answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _route(self, path: str, query: dict[str, str], body: Any) -> Any:
        site = self.site
        if path == "/node/work":
            return self._work(float(query.get("wait", "0")))
        if path == "/node/orders":
            return self._orders(int(query.get("after", "0")), float(query.get("wait", "0")))
        with site.lock:
            if found := _RUN.match(path):
                return site.on_run(found[1], int(found[2]), found[3], body)
            if path.startswith("/node/code/"):
                if path[11:] not in site.code:
                    raise NotFound("no such code file")
                return site.code[path[11:]]
            return self._simple(path, query, body)

    def _simple(self, path: str, query: dict[str, str], body: Any) -> Any:
        site = self.site
        match path:
            case "/node/join":
                return site.join(body)
            case "/node/certificate":
                csr = x509.load_pem_x509_csr(body["csr"].encode())
                return {"certificate": site.issue(csr, f"interlock://node/{site.node}")}
            case "/node/heartbeat":
                return site.heartbeat(body)
            case "/node/bundle":
                if not site.bundle[0]:
                    raise NotFound("no bundle is active", code="bundle")
                return {"version": site.bundle[0], "archive": base64.b64encode(site.bundle[1]).decode()}
            case "/node/snapshot":
                return site.snapshot(query["nonce"]).as_json()
            case "/node/spool":
                return site.spool(body)
            case "/node/marks":
                site.marks.append(body)
                return {}
            case "/node/facts":
                site.facts.append(body)
                return {}
        raise Malformed("no such route")

    def _work(self, wait: float) -> Any:
        until = time.monotonic() + min(wait, 5.0)
        while True:
            with self.site.lock:
                found = self.site.waiting()
            if found or time.monotonic() >= until or self.server.ending:  # type: ignore[attr-defined]
                return {"launches": [s.as_json() for s in found]}
            time.sleep(0.05)

    def _orders(self, after: int, wait: float) -> Any:
        until = time.monotonic() + min(wait, 5.0)
        while True:
            with self.site.lock:
                rows = [{"n": n, "order": o.as_json()} for n, o in enumerate(self.site.orders, 1) if n > after]
            if rows or time.monotonic() >= until or self.server.ending:  # type: ignore[attr-defined]
                return {"orders": rows, "last": after + len(rows)}
            time.sleep(0.05)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    ending = False

    def __init__(self, site: Site, port: int) -> None:
        handler = type("Handler", (_Handler,), {"site": site})
        super().__init__(("127.0.0.1", port), handler)
        self._tls = site.server_context()
        self.open: set[Any] = set()

    def get_request(self) -> Any:
        plain, where = super().get_request()
        plain.settimeout(10)
        line = self._tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        self.open.add(line)
        return line, where

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.do_handshake()
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that hangs up is a test's business

    def shutdown_request(self, request: Any) -> None:
        self.open.discard(request)
        request.close()


class Simulator:
    """The site served on a free port of the loop-back interface; `away()` and `back()` for outages."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._server: _Server | None = None
        self.port = 0
        self.back()

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    def back(self) -> None:
        self._server = _Server(self.site, self.port)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def away(self) -> None:
        server = self._server
        if server is None:
            return
        server.ending = True
        server.shutdown()
        server.server_close()
        for line in list(server.open):
            try:
                line.shutdown(2)
            except OSError:
                pass
            line.close()
        self._thread.join()
        self._server = None

    def join_file(self, path: Path, **changed: str) -> Path:
        value = {"url": self.url, "ca_sha256": identity.fingerprint(self.site.ca), "node": self.site.node,
                 "secret": self.site.secret, **changed}
        path.write_text(json.dumps(value))
        path.chmod(0o600)
        return path


def verified(signed: Signed, format_: str, key: Any) -> dict[str, Any]:
    return verify(signed, format_, {key_id(key): key})


def lease_of(tier: Any) -> tuple[int, int]:
    return PROFILES[tier].lease_ms, PROFILES[tier].absent_ms
