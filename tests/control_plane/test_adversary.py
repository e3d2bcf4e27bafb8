"""What a person with an account, a full pool of threads or an odd database may not do to the others."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio.to_thread
import httpx
import pytest
from sqlalchemy import text

from control_plane import app as joint
from control_plane.auth import apikeys
from control_plane.store.db import reading, writing
from tests.control_plane.conftest import House, Human


@contextmanager
def locked(house: House) -> Iterator[None]:
    """Somebody else holds the database's write lock."""
    lock = sqlite3.connect(str(house.parts.engine.url.database), isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        lock.execute("ROLLBACK")
        lock.close()


def count(house: House, query: str) -> int:
    with reading(house.parts.engine) as connection:
        return int(connection.execute(text(query)).scalar_one())


def change(house: House, statement: str) -> None:
    with writing(house.parts.engine) as connection:
        connection.execute(text(statement))


def key_of(house: House, who: Human, *scopes: str) -> Human:
    with writing(house.parts.engine) as connection:
        made, _ = apikeys.mint(connection, who.id, "robot", scopes, 1)
    return Human(who.id, who.name, made, who.key)


def code_of(answer: Any) -> str:
    return str(answer.json()["error"]["code"])


def test_a_stop_waits_for_no_lock_of_the_database(staffed: House) -> None:
    change(staffed, "update sessions set seen_us = seen_us - 40000000")  # due to be noted as seen
    with locked(staffed):
        begun = time.monotonic()
        answers = [staffed.post("/api/stop", staffed.people["cora"], {"scope": "everything"}) for _ in range(4)]
        took = time.monotonic() - begun
        assert [a.status_code for a in answers] == [200] * 4
        assert took < 3
        assert len(staffed.parts.desk.feed(0)[0]) == 4
    staffed.parts.desk.close()
    staffed.parts.desk.catch_up()
    assert count(staffed, "select count(*) from orders") == 4


def test_a_stop_by_api_key_waits_for_no_lock_either(staffed: House) -> None:
    key = key_of(staffed, staffed.people["rob"], "stop")
    change(staffed, "update api_keys set used_us = 0")
    staffed.host()
    run = staffed.launch()
    with locked(staffed):
        begun = time.monotonic()
        assert staffed.post("/api/stop", key, {"scope": f"run:{run}"}).status_code == 200
        assert time.monotonic() - begun < 3


def test_nodes_hear_of_a_stop_while_the_catch_up_waits_for_the_database(staffed: House) -> None:
    desk = staffed.parts.desk
    staffed.stop("run:run_a")
    change(staffed, "delete from orders")
    with locked(staffed):
        waiting = threading.Thread(target=desk.catch_up)
        waiting.start()
        time.sleep(0.2)
        begun = time.monotonic()
        staffed.stop("run:run_b")
        assert time.monotonic() - begun < 3
    waiting.join(20)


def test_a_stop_needs_no_thread_of_the_common_pool(staffed: House) -> None:
    app, free = joint.people_app(staffed.parts), threading.Event()

    async def attack() -> httpx.Response:
        busy = [asyncio.create_task(anyio.to_thread.run_sync(free.wait)) for _ in range(60)]
        await asyncio.sleep(0.1)
        transport = httpx.ASGITransport(app)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
                return await asyncio.wait_for(client.post(
                    "/api/stop", json={"scope": "everything"}, headers=staffed.people["cora"].headers), 5)
        finally:
            free.set()
            await asyncio.gather(*busy)

    assert asyncio.run(attack()).status_code == 200


def test_refuses_when_a_key_has_no_scope_to_stop(staffed: House) -> None:
    rob = staffed.people["rob"]
    staffed.host()
    run = staffed.launch()
    assert code_of(staffed.post("/api/stop", key_of(staffed, rob, "look"), {"scope": f"run:{run}"})) == "denied.scope"
    assert staffed.post("/api/stop", key_of(staffed, rob, "stop"), {"scope": f"run:{run}"}).status_code == 200


@pytest.mark.parametrize("reason", ["x" * 5000, "a\0b", "\u202e"])
def test_a_stop_is_never_refused_for_its_words(staffed: House, reason: str) -> None:
    order = staffed.post("/api/stop", staffed.people["cora"], {"scope": "everything", "reason": reason})
    assert order.status_code == 200, order.text
    kept = staffed.get(f"/api/stops/{order.json()['order']}", staffed.people["cora"]).json()["reason"]
    assert len(kept) <= 1000
    assert "\0" not in kept
