"""The client of the people API: typed answers, typed refusals, credentials in clear only to this host."""

from collections.abc import Iterator

import pytest

from control_plane.cli.people_api import PeopleApi, checked_url, rows
from interlock.errors import Denied, Malformed, Refusal, Unavailable, Untrusted, Usage
from tests.cli.server import PeopleServer, error


@pytest.fixture
def api(server: PeopleServer) -> Iterator[PeopleApi]:
    made = PeopleApi(server.url, "s")
    yield made
    made.close()


def test_a_refusal_keeps_its_type_code_and_next_step(server: PeopleServer, api: PeopleApi) -> None:
    server.routes["GET /api/x"] = error(403, "denied.no_match", rule="r1")
    with pytest.raises(Denied) as found:
        api.get("/api/x")
    assert found.value.code == "denied.no_match"
    assert (found.value.next_step, found.value.details) == ("do this", {"rule": "r1"})
    assert server.asked[0].headers["authorization"] == "Bearer s"


@pytest.mark.parametrize("url", ["http://example.org", "http://192.0.2.1:7070"])
def test_refuses_when_credentials_would_travel_in_clear(url: str) -> None:
    with pytest.raises(Untrusted, match="in clear"):
        checked_url(url)
    assert checked_url("https://example.org/") == "https://example.org"
    assert checked_url("http://localhost:7070") == "http://localhost:7070"


@pytest.mark.parametrize("url", ["ftp://localhost", "localhost:7070", "http://a:b@localhost", ""])
def test_refuses_when_the_address_is_odd(url: str) -> None:
    with pytest.raises(Usage):
        checked_url(url)


def test_refuses_when_nothing_answers(server: PeopleServer, api: PeopleApi) -> None:
    server.close()
    with pytest.raises(Unavailable) as found:
        api.get("/api/status")
    assert found.value.code == "unavailable.control_plane"
    assert "interlock up" in found.value.next_step


@pytest.mark.parametrize("answer", [b"<html>", b"7", b'"x"'])
def test_refuses_when_the_answer_is_no_object(server: PeopleServer, api: PeopleApi, answer: bytes) -> None:
    server.routes["GET /api/x"] = (200, answer)
    with pytest.raises(Malformed, match="not a JSON object"):
        api.get("/api/x")


def test_refuses_when_a_list_is_missing(server: PeopleServer, api: PeopleApi) -> None:
    server.routes["GET /api/x"] = (200, {"runs": [{"id": "a"}, 3], "other": {}})
    found = api.get("/api/x")
    assert rows(found, "runs") == [{"id": "a"}]
    with pytest.raises(Malformed):
        rows(found, "nodes")


@pytest.mark.parametrize(("status", "kind"), [(500, Unavailable), (502, Unavailable), (404, Malformed)])
def test_an_error_without_a_reason_is_still_typed(
    server: PeopleServer, api: PeopleApi, status: int, kind: type[Refusal]
) -> None:
    server.routes["GET /api/x"] = (status, b"oops")
    with pytest.raises(kind):
        api.get("/api/x")


def test_no_redirect_is_followed_with_a_credential(server: PeopleServer, api: PeopleApi) -> None:
    server.routes["GET /api/x"] = (302, b"")
    with pytest.raises(Refusal):
        api.get("/api/x")
    assert len(server.asked) == 1


def test_no_proxy_of_the_environment_is_used(server: PeopleServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.routes["GET /api/x"] = (200, {"a": 1})
    made = PeopleApi(server.url)
    try:
        assert made.get("/api/x") == {"a": 1}
    finally:
        made.close()
