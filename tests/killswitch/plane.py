"""A control plane's node link over real mutual TLS 1.3, in a thread; the test bends what it answers."""

import datetime
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.killswitch.site import Site


class Authority:
    """A site CA that lasts as long as the test."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test site")])
        self.certificate = self._sign(self.name, self.key.public_key(), [], ca=True)

    def _sign(self, name: x509.Name, public: Any, names: list[x509.GeneralName], *, ca: bool = False) -> Any:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder().subject_name(name).issuer_name(self.name).public_key(public)
            .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def ca_file(self, path: Path) -> Path:
        path.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))
        return path

    def issue(self, folder: Path, stem: str, names: list[x509.GeneralName]) -> tuple[Path, Path]:
        """Write `STEM.pem` and `STEM.key.pem` and return both paths."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(x509.Name([]), key.public_key(), names)
        pem, key_pem = folder / f"{stem}.pem", folder / f"{stem}.key.pem"
        pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_pem.write_bytes(key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ))
        key_pem.chmod(0o600)
        return pem, key_pem


class Plane:
    """`status` and `lease_ms` bend the heartbeat; `orders` is what the long poll hands out."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site, self.status, self.lease_ms = site, 200, 10_000
        self.orders: list[dict[str, Any]] = []
        self.seen: list[dict[str, Any]] = []
        self.news = threading.Condition()
        self.authority = Authority()
        pem, key_pem = self.authority.issue(folder / "plane", "tls", [x509.DNSName("localhost")])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(pem, key_pem)
        context.load_verify_locations(self.authority.ca_file(folder / "plane" / "ca.pem"))
        context.verify_mode = ssl.CERT_REQUIRED
        self.server = ThreadingHTTPServer(("localhost", 0), _handler(self))
        self.server.daemon_threads = True
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def join(self, state: Path) -> None:
        """Write what a join leaves in `STATE/node/`, link.json last."""
        node = state / "node"
        self.authority.issue(node, "node", [x509.UniformResourceIdentifier(f"interlock://node/{self.site.node}")])
        self.authority.ca_file(node / "ca.pem")
        port = self.server.server_address[1]
        (node / "link.json").write_text(json.dumps({"url": f"https://localhost:{port}", "node": self.site.node}))

    def order(self, order: dict[str, Any]) -> None:
        with self.news:
            self.orders.append(order)
            self.news.notify_all()

    def close(self) -> None:
        with self.news:
            self.status = 503
            self.news.notify_all()
        self.server.shutdown()
        self.server.server_close()


def _handler(plane: Plane) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def _send(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if plane.status != 200:
                return self._send(plane.status, {"error": {"code": f"bent.{plane.status}"}})
            plane.seen.append(body)
            leases = [plane.site.lease(b, duration_ms=plane.lease_ms) for b in body["beats"]]
            receipts = [json.loads(json.dumps(r)) for r in body["receipts"]]
            return self._send(200, plane.site.answer(body, leases=leases, receipts_acked=_names(receipts)))

        def do_GET(self) -> None:
            after = int(self.path.partition("after=")[2].partition("&")[0])
            with plane.news:
                plane.news.wait_for(lambda: len(plane.orders) > after or plane.status != 200, 20)
                rows = [{"n": n + 1, "order": o} for n, o in enumerate(plane.orders)][after:]
            self._send(200, {"orders": rows, "last": len(plane.orders)})

    return Handler


def _names(receipts: list[dict[str, Any]]) -> list[str]:
    from interlock.signed import Signed

    return [str(Signed.from_json(r).body()["order"]) for r in receipts]
