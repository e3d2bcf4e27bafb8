"""A small real HTTP server that speaks the people API's seams; each test says what it answers."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Answer = tuple[int, Any]
Route = Callable[["Asked"], Answer]


class Asked:
    """One request as the server got it."""

    def __init__(self, method: str, target: str, body: bytes, headers: dict[str, str]) -> None:
        parts = urlsplit(target)
        self.method, self.path, self.body, self.headers = method, parts.path, body, headers
        self.query = {k: v[0] for k, v in parse_qs(parts.query).items()}

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.body or b"{}")
        assert isinstance(value, dict)
        return value


class PeopleServer:
    """Answers by the table `routes`: ``"POST /api/runs"`` → an answer or a function of the request."""

    def __init__(self) -> None:
        self.routes: dict[str, Route | Answer] = {}
        self.asked: list[Asked] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                headers = {k.lower(): v for k, v in self.headers.items()}
                found = Asked(self.command, self.path, self.rfile.read(length), headers)
                outer.asked.append(found)
                status, value = outer.answer(found)
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("location", "/api/elsewhere")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = _serve

            def log_message(self, *args: object) -> None:
                return

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def answer(self, asked: Asked) -> Answer:
        found = self.routes.get(f"{asked.method} {asked.path}")
        if found is None:
            return 404, {"error": {"code": "not_found", "message": asked.path, "next_step": "", "details": {}}}
        return found(asked) if callable(found) else found

    def sent(self, method: str, path: str) -> list[Asked]:
        return [a for a in self.asked if (a.method, a.path) == (method, path)]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(5)


def error(status: int, code: str, **details: Any) -> Answer:
    found = {"code": code, "message": f"because of {code}", "next_step": "do this", "details": details}
    return status, {"error": found}
