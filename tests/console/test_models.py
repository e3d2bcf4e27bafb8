"""The pages of models and the progress of a run in headless Chromium, and the curve as numbers."""

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext
from starlette.testclient import TestClient

from control_plane import app as joint
from control_plane.api.context import COOKIE
from control_plane.console.curve import MAX_DRAWN, MAX_ROWS, curve, number, size
from control_plane.init import initialise
from control_plane.store import checkpoints, registry
from control_plane.store.db import now_us, writing
from interlock.event import Event, EventType
from tests.console.conftest import free_port
from tests.console.test_pages import violations, watched
from tests.control_plane.conftest import House, publish

SHA = "sha256:"
BASE, CHILD, SECRET = SHA + "1" * 64, SHA + "2" * 64, SHA + "3" * 64


# ---- the curve -------------------------------------------------------------------------------------

def point(n: int, value: int, attempt: int = 1, metric: str = "loss_micro") -> dict[str, Any]:
    return {"n": n, "attempt": attempt, "metrics": {metric: value}}


def test_a_curve_runs_from_the_first_step_to_the_last() -> None:
    found = curve([point(0, 5_500_000), point(100, 2_250_000), point(200, 1_000_000)], [100, 900])
    assert found is not None
    assert (found.name, found.first, found.last, found.last_step) == ("loss", "5.5", "1", 200)
    assert found.lines == ("64.0,12.0 386.0,169.4 708.0,230.0",)
    assert found.across == (("64.0", "0"), ("225.0", "50"), ("386.0", "100"), ("547.0", "150"), ("708.0", "200"))
    assert found.up[0] == ("230.0", "1")
    assert found.marks == (("386.0", 100),)  # a checkpoint outside the drawn steps has no place
    assert found.rows == ((0, "5.5", 1), (100, "2.25", 1), (200, "1", 1))


def test_each_attempt_has_its_own_line() -> None:
    found = curve([point(1, 9), point(2, 8), point(3, 7), point(2, 8, 2), point(3, 6, 2)], [])
    assert found is not None
    assert [len(line.split()) for line in found.lines] == [3, 2]


def test_a_single_or_constant_value_is_drawn_too() -> None:
    one = curve([point(7, 3, metric="accuracy")], [7])
    assert one is not None
    assert (one.name, one.lines, one.dots, one.last) == ("accuracy", (), (("386.0", "121.0"),), "3")
    flat = curve([point(1, 3), point(2, 3)], [])
    assert flat is not None
    assert flat.lines == ("64.0,121.0 708.0,121.0",)


def test_a_loss_is_chosen_before_other_metrics_and_none_makes_no_curve() -> None:
    found = curve([{"n": 1, "attempt": 1, "metrics": {"accuracy": 1, "loss_micro": 2_000_000}},
                   {"n": 2, "attempt": 1, "metrics": {"accuracy": 2}}], [])
    assert found is not None
    assert (found.name, found.last, found.last_step) == ("loss", "2", 1)
    assert curve([{"n": 1, "attempt": 1, "metrics": {}}], []) is None
    assert curve([], [1]) is None


def test_many_points_are_thinned_and_the_ends_stay() -> None:
    found = curve([point(n, 10**6 + n) for n in range(5000)], [])
    assert found is not None
    assert len(found.lines[0].split()) == MAX_DRAWN
    assert len(found.rows) == MAX_ROWS
    assert (found.rows[0][0], found.rows[-1][0]) == (0, 4999)


def test_numbers_are_short() -> None:
    assert [size(n) for n in (0, 1023, 1024, 5 << 20, 3 << 30)] == ["0 B", "1023 B", "1.0 KiB", "5.0 MiB", "3.0 GiB"]
    assert [number(v) for v in (0.0, 1.23456, 12345.6, -0.5)] == ["0", "1.235", "1.235e+04", "-0.5"]


# ---- the pages -------------------------------------------------------------------------------------

@dataclass
class Gallery:
    """A control plane in this process, served on a port, with models to look at."""

    house: House
    url: str
    run: str


def _seed(house: House) -> str:
    """A run with two attempts, its checkpoints, a model, one that came from it, and one of another tenant."""
    house.staff()
    house.host()
    run, now = house.launch(), now_us()
    engine, rob = house.parts.engine, house.people["rob"].id
    for attempt, steps in ((1, range(0, 60)), (2, range(40, 120))):
        for n in steps:
            house.parts.ledger.record(Event(EventType.RUN_STEP, f"{run}.{attempt}", "lab", run, facts={
                "attempt": attempt, "n": n, "steps": 1, "metrics": {"loss_micro": 5_000_000 // (1 + n // 10) + n}}))
    with writing(engine) as connection:
        for digest, step, kind in ((SHA + "a" * 64, 40, "state"), (BASE, 120, "weights"), (CHILD, 121, "weights"),
                                   (SECRET, 122, "weights")):
            checkpoints.add(connection, digest=digest, run=run, step=step, attempt=2, kind=kind, items=36,
                            bytes=5_300_000, parent="", node="n1", manifest=b"{}", committed_us=now)
        for name, tenant, tier in (("base", "lab", "none"), ("child", "lab", "high"), ("elsewhere", "other", "none")):
            registry.add_model(connection, name, tenant=tenant, owner=rob, tier=tier, now_us=now)
        code = [{"name": "train.py", "digest": SHA + "c" * 64}]
        none = {"parents": [], "models": [], "datasets": ["/data/text"], "code": code}
        told = {"tier": "none", "run": run, "created_by": rob, "now_us": now}
        registry.add_version(connection, BASE, "base", step=120, lineage=none, **told)
        registry.add_version(connection, CHILD, "child", step=121, lineage={
            **none, "parents": [BASE, SECRET], "models": ["base"]}, **told)
        registry.add_version(connection, SECRET, "elsewhere", step=122, lineage=none, **told)
        registry.move(connection, BASE, now, frm=["draft"], to="approved")
    return run


@pytest.fixture(scope="module")
def gallery() -> Iterator[Gallery]:
    folder, port = Path(tempfile.mkdtemp(prefix="il-")), free_port()
    parts = joint.build(initialise(folder / "s", site="demo", people_port=port, nodes_port=free_port()))
    publish(parts)
    assert joint.start(parts) == {}
    app = joint.people_app(parts)
    house = House(folder / "s", parts, TestClient(app, base_url=f"http://localhost:{port}"))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        run = _seed(house)
        while not server.started:
            time.sleep(0.02)
        yield Gallery(house, f"http://localhost:{port}", run)
    finally:
        server.should_exit = True
        thread.join(20)
        house.client.close()
        parts.desk.close()
        parts.engine.dispose()
        shutil.rmtree(folder)


def page_of(browser: Browser, gallery: Gallery, who: str, **options: Any) -> BrowserContext:
    made = browser.new_context(base_url=gallery.url, **{"viewport": {"width": 1280, "height": 900}, **options})
    made.set_default_timeout(10_000)
    made.add_cookies([{"name": COOKIE, "value": gallery.house.people[who].session, "secure": True, "httpOnly": True,
                       "sameSite": "Strict", "url": gallery.url.replace("http:", "https:")}])
    return made


@pytest.mark.browser
@pytest.mark.parametrize(("locale", "scheme", "word"), [("en-US", "light", "Models"), ("zh-CN", "dark", "模型")])
def test_the_new_pages_are_clean(gallery: Gallery, chromium: Browser, locale: str, scheme: Any, word: str) -> None:
    made = page_of(chromium, gallery, "rob", locale=locale, color_scheme=scheme)
    page = made.new_page()
    with watched(page) as seen:
        for path in ("/models", "/models/child", f"/runs/{gallery.run}"):
            answer = page.goto(path)
            assert answer is not None
            assert answer.status == 200, path
            assert page.locator("main h1").count() == 1
            for summary in page.locator("main summary").all():
                summary.click()
            assert violations(page) == [], (path, scheme)
        page.goto("/models")
        assert page.locator("h1").inner_text() == word
        for part in ("/models", "/models/child", f"/runs/{gallery.run}/progress"):
            assert page.request.get(f"/fragments{part}").status == 200, part
    assert seen == []
    made.close()


@pytest.mark.browser
def test_models_show_state_and_lineage_and_lead_on(gallery: Gallery, chromium: Browser) -> None:
    made = page_of(chromium, gallery, "rob")
    page = made.new_page()
    page.goto("/models")
    rows = page.locator("main tbody tr")
    assert [r.split("\t")[:4] for r in rows.all_inner_texts()] == [
        ["base", "none", "1", "approved"], ["child", "high", "1", "draft"]]
    assert "elsewhere" not in page.locator("main").inner_text()  # another tenant's
    page.get_by_role("link", name="child").press("Enter")
    page.wait_for_url("**/models/child")
    text = page.locator("section#v1").inner_text()
    for shown in (CHILD, "base@1", SECRET[:19], "/data/text", "train.py", "interlock model submit child@1"):
        assert shown in text, shown
    assert "elsewhere" not in text
    page.get_by_role("link", name="base@1").click()
    page.wait_for_url("**/models/base#v1")
    assert "interlock model serve base@1" in page.locator("section#v1").inner_text()
    page.locator("section#v1").get_by_role("link", name=gallery.run).click()
    page.wait_for_url(f"**/runs/{gallery.run}")
    made.close()


@pytest.mark.browser
def test_a_run_shows_its_curve_with_a_table_and_its_checkpoints(gallery: Gallery, chromium: Browser) -> None:
    made = page_of(chromium, gallery, "rob", viewport={"width": 320, "height": 700})
    page = made.new_page()
    page.goto(f"/runs/{gallery.run}")
    drawing = page.get_by_role("img")
    assert drawing.locator("polyline").count() == 2
    assert drawing.locator("line.mark").count() == 1  # of the steps 40, 120, 121 and 122 only 40 was reported
    assert page.locator("details table").is_hidden()
    page.locator("summary").press("Enter")
    assert page.locator("details table tbody tr").count() == MAX_ROWS
    with page.expect_event("requestfinished", lambda r: r.url.endswith("/progress")):
        pass
    page.wait_for_timeout(200)
    assert page.locator("details table").is_visible()  # a refresh leaves open what is open
    assert page.evaluate("document.activeElement.id") == "curve-summary"
    kept = page.locator("h2:has-text('Checkpoints') + div tbody tr").all_inner_texts()
    assert [r.split("\t")[:5] for r in kept] == [
        ["122", "weights", "2", "36", "5.1 MiB"], ["121", "weights", "2", "36", "5.1 MiB"],
        ["120", "weights", "2", "36", "5.1 MiB"], ["40", "state", "2", "36", "5.1 MiB"]]
    for path in ("/models", "/models/child", f"/runs/{gallery.run}"):
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 320, path
        assert violations(page) == [], path  # tables that scroll sideways can be reached by the keyboard
    words = page.locator("figure.curve text").all()
    assert min(w.bounding_box()["height"] for w in words) >= 11  # the drawing shrinks, its words do not
    made.close()


def test_a_model_of_another_tenant_is_not_there(gallery: Gallery) -> None:
    signed = {"cookie": f"{COOKIE}={gallery.house.people['rob'].session}"}
    got = {path: gallery.house.client.get(path, headers=signed, follow_redirects=False).status_code
           for path in ("/models/base", "/models/elsewhere", "/models/nothing", "/fragments/models/elsewhere")}
    assert got == {"/models/base": 200, "/models/elsewhere": 404, "/models/nothing": 404,
                   "/fragments/models/elsewhere": 404}


def test_refuses_what_is_not_his_and_what_is_not_there_alike(gallery: Gallery) -> None:
    """Nobody learns by asking whether another tenant has a model of that name, or a run of that id."""
    client, rob = gallery.house.client, gallery.house.people["rob"]
    other = gallery.house.person("nils", "partner")
    told = [client.get(f"/api/models/{name}", headers=rob.headers).json() for name in ("elsewhere", "nothing")]
    assert told[0] == told[1]
    assert told[0]["error"]["code"] == "not_found.model"
    assert client.get("/api/models/base", headers=rob.headers).status_code == 200  # control
    for path in ("/api/runs/{}", "/api/runs/{}/progress"):
        runs = (gallery.run, "run_" + "0" * 32)
        unseen = [client.get(path.format(run), headers=other.headers).json() for run in runs]
        assert unseen[0] == unseen[1], path
        assert unseen[0]["error"]["code"] == "not_found.run"
        assert client.get(path.format(gallery.run), headers=rob.headers).status_code == 200  # control


def test_nobody_reads_models_without_a_session(gallery: Gallery) -> None:
    for path in ("/models", "/models/base"):
        answer = gallery.house.client.get(path, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login"), path
    assert json.loads(gallery.house.client.get("/api/models").text)["error"]["code"].startswith("untrusted")
