"""The supervisor's own channel to the control plane: two threads, standard library only.

Heartbeats, each a quarter of the shortest lease (0.25 to 2 s), and a long poll for orders. So a node program
that is dead or hung holds nothing back. Mutual TLS 1.3 with the node's certificate from `STATE/node/`; where
`link.json` is absent (not joined, or a host without a control plane) both threads just look again each second.
"""

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from interlock.errors import Malformed, Unavailable
from interlock.permit import boottime_ms
from killswitch.exchange import answer, beats, refuse_all, take_orders
from killswitch.supervisor import Supervisor

IDLE_S, SHORTEST_S, AGAIN_S = 2.0, 0.25, 1.0
_BEAT_TIMEOUT_S, _POLL_S = 3.0, 25
_MAX_REPLY = 8 << 20


class Connection:
    """One kept-open connection; made again after an error or when the certificate on disk changed."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._folder, self._timeout_s = folder, timeout_s
        self._stamp: tuple[int, ...] = ()
        self._http: http.client.HTTPSConnection | None = None

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Return (HTTP status, JSON object); raises OSError, Unavailable, Malformed."""
        data = json.dumps(body).encode() if body is not None else None
        kept = self._http is not None
        try:
            status, raw = self._exchange(method, path, data)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            if not kept:
                raise _silent(error) from None
            return self.ask(method, path, body)  # the other end may have closed what we kept open: once more
        try:
            value = json.loads(raw)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise Malformed("the control plane's reply is not an object")
        return status, value

    def _exchange(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        connection = self._fresh()
        connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
        reply = connection.getresponse()
        return reply.status, reply.read(_MAX_REPLY)

    def close(self) -> None:
        """Drop the connection; the next question makes a new one."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def _fresh(self) -> http.client.HTTPSConnection:
        stamp = self._look()
        if self._http is None or stamp != self._stamp:
            self.close()
            self._http, self._stamp = self._connect(), stamp
        return self._http

    def _look(self) -> tuple[int, ...]:
        names = ("link.json", "node.pem", "node.key.pem", "ca.pem")
        return tuple((self._folder / n).stat().st_mtime_ns for n in names)

    def _connect(self) -> http.client.HTTPSConnection:
        link = json.loads((self._folder / "link.json").read_bytes())
        url = urlsplit(str(link["url"]))
        if url.scheme != "https" or not url.hostname:
            raise Malformed("the address of the control plane is off", code="link")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self._folder / "ca.pem")
        context.load_cert_chain(self._folder / "node.pem", self._folder / "node.key.pem")
        return http.client.HTTPSConnection(url.hostname, url.port or 443, timeout=self._timeout_s, context=context)


def _silent(error: Exception) -> Unavailable:
    return Unavailable(f"the control plane does not answer: {type(error).__name__}", code="control_plane")


class Link:
    """The two threads. `start` them after the sweep; they end with the program."""

    def __init__(self, sup: Supervisor, folder: Path) -> None:
        self._sup, self._folder = sup, folder
        self._after = 0

    def start(self) -> None:
        """Start both threads."""
        for target in (self._beat_on, self._poll_on):
            threading.Thread(target=target, daemon=True, name=target.__name__).start()

    def _beat_on(self) -> None:
        connection = Connection(self._folder, _BEAT_TIMEOUT_S)
        while True:
            self._sup.wake.clear()
            connected = (self._folder / "link.json").exists() and self._safely(self._beat, connection)
            # What wakes us early is worth a question only while somebody answers.
            if connected:
                self._sup.wake.wait(self._interval_s())
            else:
                time.sleep(min(AGAIN_S, self._interval_s()))

    def _safely(self, ask: Callable[[Connection], bool], connection: Connection) -> bool:
        """Keep the thread alive whatever an answer does to us; what is not renewed ends by its lease."""
        try:
            return ask(connection)
        except Exception as error:
            return self._note(False, f"error.{type(error).__name__}")

    def _beat(self, connection: Connection) -> bool:
        body = beats(self._sup)
        sent_ms = boottime_ms()
        try:
            status, reply = connection.ask("POST", "/node/heartbeat", body)
        except (OSError, ValueError, KeyError, Unavailable, Malformed) as error:
            return self._note(False, getattr(error, "code", type(error).__name__))
        if status == 200:
            done = answer(self._sup, reply, sent_ms=sent_ms)
            return self._note(True, "", done["errors"])
        if status in (401, 403):
            refuse_all(self._sup)
        error_body = reply.get("error")
        return self._note(False, str(error_body.get("code")) if isinstance(error_body, dict) else f"http.{status}")

    def _note(self, connected: bool, error: str, errors: list[Any] | None = None) -> bool:
        with self._sup.lock:
            last = boottime_ms() if connected else self._sup.link["last_ms"]
            self._sup.link = {"connected": connected, "last_ms": last, "error": error, "refused": (errors or [])[:8]}
        return connected

    def _interval_s(self) -> float:
        with self._sup.lock:
            leases = [r.leash.lease_ms for r in self._sup.runs.values() if r.waits and r.leash]
        return max(SHORTEST_S, min([*(ms / 4000 for ms in leases), IDLE_S]))

    def _poll_on(self) -> None:
        connection = Connection(self._folder, _POLL_S + 10.0)
        while True:
            if not (self._folder / "link.json").exists() or not self._safely(self._poll, connection):
                time.sleep(AGAIN_S)

    def _poll(self, connection: Connection) -> bool:
        try:
            status, reply = connection.ask("GET", f"/node/orders?after={self._after}&wait={_POLL_S}")
            if status != 200:
                return False
            rows = reply["orders"]
            take_orders(self._sup, [r["order"] for r in rows])
            self._after = max([self._after, *(int(r["n"]) for r in rows)])
        except (OSError, ValueError, KeyError, TypeError, Unavailable, Malformed):
            return False
        return True
