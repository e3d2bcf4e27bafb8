"""The node listener: mutual TLS 1.3, and who the peer is.

Rules (trust.md): the node id is the SAN URI of the peer certificate that TLS verified against the site CA; a
body never names the node. A certificate is optional at the handshake because a node that joins has none yet;
every route but the join demands one, and asks per request whether the node is still joined. Whoever comes with
the certificate of a revoked node, or asks for another node's run, gets 403 and an incident is recorded.
"""

import ssl
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

from control_plane.certificates import named_node
from control_plane.desk import OrderDesk
from control_plane.patience import Patient
from control_plane.store import nodes
from control_plane.store.db import reading
from interlock.errors import Denied, Refusal, Untrusted
from interlock.event import Event, EventType


class PeerCertificate(Patient):
    """Puts the verified peer certificate into the ASGI scope, which uvicorn itself does not."""

    def on_message_begin(self) -> None:
        """Extend the scope of each request (ASGI TLS extension: PEM chain, leaf first)."""
        super().on_message_begin()
        line: ssl.SSLObject | None = self.transport.get_extra_info("ssl_object")
        der = line.getpeercert(True) if line is not None else None
        chain = [ssl.DER_cert_to_PEM_cert(der)] if der else []
        self.scope.setdefault("extensions", {})["tls"] = {"client_cert_chain": chain}


def listener(app: FastAPI, keys: Path) -> uvicorn.Config:
    """Return the server configuration of the node listener: TLS 1.3 at least, our CA alone."""
    config = uvicorn.Config(
        app, http=PeerCertificate, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        ssl_keyfile=str(keys / "tls.key.pem"), ssl_certfile=str(keys / "tls.pem"), ssl_ca_certs=str(keys / "ca.pem"),
        ssl_cert_reqs=ssl.CERT_OPTIONAL, timeout_keep_alive=40,
    )
    config.load()
    assert config.ssl is not None
    config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    return config


def peer(request: Request) -> str:
    """Return the id of the joined node that calls (a dependency of every node route but the join).

    Raises Untrusted (no certificate, expired) or Denied (``denied.node_revoked``, with an incident).
    """
    chain = request.scope.get("extensions", {}).get("tls", {}).get("client_cert_chain", [])
    if not chain:
        raise Untrusted("a node shows its certificate", code="certificate",
                        next_step="join first: python -I -m runners join FILE")
    node = named_node(chain[0])
    request.state.node = node
    desk: OrderDesk = request.app.state.desk
    with reading(desk.engine) as connection:
        row = nodes.one(connection, node)
    if row is None or row.state != nodes.JOINED:
        incident(desk, node, "a node that is not joined called", request.url.path)
        raise Denied("this node is not joined", code="node_revoked", next_step="join under a new node id")
    return node


def incident(desk: OrderDesk, node: str, what: str, path: str, **facts: Any) -> None:
    """Queue the record of an incident about a node; the same one at most once a minute."""
    last = path.rpartition("/")[2]
    desk.note_rarely(f"{node} {what} {last if last.isalpha() else ''}", Event(
        EventType.INCIDENT, f"node/{node}", facts={"what": what, "path": path, **facts}))


def note_denied(request: Request, refusal: Refusal, node: str) -> None:
    """Record an incident when a node reached for what is another's."""
    if refusal.code in ("denied.node", "untrusted.node_id", "untrusted.scope"):
        incident(request.app.state.desk, node, refusal.message, request.url.path, code=refusal.code)
