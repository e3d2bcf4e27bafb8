"""The people API as the command sees it: one request, one typed answer or one typed refusal.

No redirect is followed, no proxy of the environment is used, and credentials travel in clear only to
localhost.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from interlock.errors import Malformed, Refusal, Unavailable, Untrusted, Usage, from_json

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_SPARE_S = 20.0


def checked_url(url: str) -> str:
    """Return `url` without a trailing slash; raises Usage, or Untrusted for http beyond this host."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise Usage("the address is not http(s)://HOST[:PORT]", code="url")
    if parts.scheme == "http" and parts.hostname not in _LOCAL:
        raise Untrusted("credentials do not travel in clear beyond this host", code="url",
                        next_step="use https://")
    return url.rstrip("/")


def refusal_of(status: int, body: object) -> Refusal:
    """Return the typed refusal in an error answer; what has none becomes Unavailable or Malformed."""
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        return from_json(body["error"])
    if status >= 500:
        return Unavailable(f"the control plane answered {status}", code="control_plane",
                           next_step="see the log of the control plane")
    return Malformed(f"the control plane answered {status} without a reason", code="answer")


class PeopleApi:
    """A client with one credential. `wait_s` arguments are the server's long-poll time, in seconds."""

    def __init__(self, url: str, credential: str = "", *, transport: httpx.BaseTransport | None = None) -> None:
        self.url = checked_url(url)
        headers = {"authorization": f"Bearer {credential}"} if credential else {}
        self._client = httpx.Client(base_url=self.url, headers=headers, trust_env=False, follow_redirects=False,
                                    timeout=_SPARE_S, transport=transport)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def send(self, method: str, path: str, *, wait_s: float = 0.0, **request: Any) -> httpx.Response:
        """Return the answer of a 2xx; raises the typed refusal, Unavailable when nothing answers."""
        try:
            answer = self._client.request(method, path, timeout=_SPARE_S + wait_s, **request)
        except httpx.TimeoutException:
            raise Unavailable(f"{self.url} did not answer in time", code="control_plane",
                              next_step="interlock doctor; on the host: python -I -m killswitch status") from None
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.url} cannot be reached ({type(error).__name__})", code="control_plane",
                              next_step="start it with: interlock up, or name it with --url") from None
        if answer.is_success:
            return answer
        raise refusal_of(answer.status_code, _json(answer))

    def get(self, path: str, *, wait_s: float = 0.0, **params: Any) -> dict[str, Any]:
        """GET; absent parameters (None, "") are left out."""
        query = {k: v for k, v in params.items() if v is not None and v != ""}
        return _object(self.send("GET", path, wait_s=wait_s, params=query))

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """POST a JSON object."""
        return _object(self.send("POST", path, json=dict(body or {})))

    def upload(self, path: str, data: bytes) -> dict[str, Any]:
        """POST raw bytes."""
        return _object(self.send("POST", path, content=data, headers={"content-type": "application/octet-stream"}))

    def delete(self, path: str) -> dict[str, Any]:
        """DELETE; an empty answer is an empty object."""
        return _object(self.send("DELETE", path))


def _json(answer: httpx.Response) -> object:
    try:
        return answer.json()
    except ValueError:
        return None


def _object(answer: httpx.Response) -> dict[str, Any]:
    if not answer.content:
        return {}
    body = _json(answer)
    if isinstance(body, list):
        return {"items": body}
    if not isinstance(body, dict):
        raise Malformed("the answer is not a JSON object", code="answer",
                        next_step="does the address belong to an Interlock control plane?")
    return body


def rows(answer: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the list under `name` (or under ``items``); raises Malformed when there is none."""
    found = answer.get(name, answer.get("items"))
    if not isinstance(found, list):
        raise Malformed(f"the answer holds no list {name!r}", code="answer")
    return [row for row in found if isinstance(row, dict)]
