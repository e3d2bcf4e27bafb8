"""Every page in headless Chromium: no console error, no CSP violation, axe clean, both schemes and languages."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyotp
import pytest
from playwright.sync_api import Browser, Page

from tests.console.conftest import PASSWORD, Site, context

pytestmark = pytest.mark.browser
AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
PAGES = ["/", "/runs", "/kill", "/audit", "/approvals"]
TAGS = "{runOnly:['wcag2a','wcag2aa','wcag21aa','wcag22aa']}"


@contextmanager
def watched(page: Page) -> Iterator[list[str]]:
    """Collect everything that the browser complains about."""
    seen: list[str] = []
    page.on("console", lambda m: seen.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: seen.append(str(e)))
    yield seen


def violations(page: Page) -> list[Any]:
    page.evaluate(AXE)
    found = page.evaluate(f"axe.run(document,{TAGS})")["violations"]
    return [(v["id"], [n["html"][:160] for n in v["nodes"]][:3]) for v in found]


@pytest.fixture(scope="session")
def stopped(site: Site) -> dict[str, Any]:
    """Something to look at: a stop of a run that is nobody's, a launch that waits for approval."""
    plan = {"argv": ["true"], "tier": "critical", "tenant": "lab"}
    session = site.people["rosa"]
    code = pyotp.TOTP(session["totp"]).now()
    probe = httpx.post(
        site.url + "/api/runs", json={"plan": plan}, headers={"authorization": f"Bearer {session['session']}"}
    )
    bound = probe.json()["error"]["details"].get("bound", "")
    made: dict[str, Any] = {"first": probe.json()["error"]}
    if probe.json()["error"]["code"].startswith("step_up"):
        proof = site.api("rosa", "POST", "/api/step-up", code=code, action="launch", bound=bound)
        probe = httpx.post(
            site.url + "/api/runs",
            json={"plan": plan, "step_up": proof["step_up"]},
            headers={"authorization": f"Bearer {session['session']}"},
        )
        made["second"] = probe.json()["error"]
    made["stop"] = site.api(
        "cai", "POST", "/api/stop", scope="run:run_00", reason="drill <img src=x onerror=window.pwn=1>"
    )
    time.sleep(1.5)
    return made


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("locale", "word"), [("en-US", "Status"), ("zh-CN", "状态")])
def test_every_page_is_clean(
    site: Site,
    chromium: Browser,
    stopped: dict[str, Any],
    scheme: Any,
    locale: str,
    word: str,
) -> None:
    made = context(chromium, site, "olga", locale=locale, color_scheme=scheme)
    page = made.new_page()
    with watched(page) as seen:
        for path in [*PAGES, f"/kill/{stopped['stop']['order']}"]:
            answer = page.goto(path)
            assert answer is not None
            assert answer.status == 200, path
            assert page.locator("main h1").count() == 1
            assert violations(page) == [], (path, scheme)
        page.goto("/")
        assert page.locator("h1").inner_text() == word
        assert page.evaluate("document.documentElement.dataset.bsTheme") == scheme
        page.goto("/login")
        assert violations(page) == []
    assert seen == []
    made.close()


@pytest.mark.parametrize("path", PAGES)
def test_nothing_is_cut_off_on_a_phone(site: Site, chromium: Browser, stopped: dict[str, Any], path: str) -> None:
    made = context(chromium, site, "cai", viewport={"width": 320, "height": 700})
    page = made.new_page()
    page.goto(path)
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    box = page.locator("a.stop").bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 320
    made.close()


def test_a_trust_change_is_shown_with_names_and_key_ids(site: Site, chromium: Browser) -> None:
    """Two pinned officers: the Status page warns; the request says whose keys nodes will believe."""
    site.enrol(site.api("ada", "POST", "/api/invitations", name="opal", roles=["safety_officer"], tenant="lab")["link"])
    asked = site.api("ada", "POST", "/api/trust/changes", add=["opal"], reason="a third officer")
    waits = site.api("olga", "GET", "/api/trust")["waiting"][0]
    made = context(chromium, site, "olga", viewport={"width": 320, "height": 700})
    page = made.new_page()
    with watched(page) as seen:
        page.goto("/")
        assert "Fewer than three pinned safety officers" in page.locator("main").inner_text()
        page.goto(f"/approvals/{asked['request']}")
        row = page.locator("tr", has_text="opal").inner_text()
        assert waits["key_id"] in row
        assert "added" in row
        assert f"interlock approve {asked['request']}" in page.locator("main").inner_text()
        assert page.locator("main form input[name=code]").count() == 0
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert seen == []
    made.close()


def test_sign_in_with_both_factors_and_out(site: Site, chromium: Browser) -> None:
    made = context(chromium, site, None)
    page = made.new_page()
    page.goto("/runs")
    assert page.url.endswith("/login")
    page.fill("#name", "omar")
    page.fill("#password", "wrong " + PASSWORD)
    page.click("main button[type=submit]")
    assert "untrusted.login" in page.locator("[role=alert]").inner_text()
    page.fill("#name", "omar")
    page.fill("#password", PASSWORD)
    page.click("main button[type=submit]")
    page.wait_for_url("**/login/factor")
    page.goto("/runs")
    assert page.url.endswith("/login"), "a half login serves no page"
    page.goto("/login/factor")
    page.fill("#code", pyotp.TOTP(site.people["omar"]["totp"]).now())
    page.click("main button[type=submit]")
    page.wait_for_url(site.url + "/")
    page.click("text=Sign out")
    page.wait_for_url("**/login")
    page.goto("/")
    assert page.url.endswith("/login")
    made.close()


def test_stop_works_without_javascript_and_by_keyboard(site: Site, chromium: Browser) -> None:
    made = context(chromium, site, "cai", java_script_enabled=False, viewport={"width": 320, "height": 700})
    page = made.new_page()
    page.goto("/")
    page.get_by_role("link", name="STOP", exact=True).focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/kill**")
    page.locator("#scope").select_option("everything")
    page.locator("#reason").fill("keyboard drill")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url("**/kill/stop_*")
    assert "everything" in page.locator("main").inner_text()
    made.close()
    stops = site.api("cai", "GET", "/api/stops")["stops"]
    assert any(s["scope"] == "everything" and s["reason"] == "keyboard drill" for s in stops)


def test_a_researcher_is_not_offered_to_stop_everything(site: Site, chromium: Browser) -> None:
    made = context(chromium, site, "rosa")
    page = made.new_page()
    page.goto("/kill")
    assert page.locator("option[value=everything]").count() == 0
    token = page.locator("section#stop input[name=csrf]").get_attribute("value")
    answer = page.request.post(
        "/stop",
        form={"csrf": token or "", "scope": "everything", "reason": ""},
        headers={"origin": site.url, "sec-fetch-site": "same-origin"},
        max_redirects=0,
    )
    assert answer.status == 403
    made.close()


def test_refuses_when_a_form_comes_from_elsewhere(site: Site, chromium: Browser) -> None:
    made = context(chromium, site, "cai")
    page = made.new_page()
    page.goto("/kill")
    token = page.locator("section#stop input[name=csrf]").get_attribute("value") or ""
    before = len(site.api("cai", "GET", "/api/stops")["stops"])
    fields = {"scope": "run:run_01", "reason": "forged"}
    for form, headers in (
        (fields, {"origin": site.url, "sec-fetch-site": "same-origin"}),
        ({**fields, "csrf": "x" * 43}, {"origin": site.url, "sec-fetch-site": "same-origin"}),
        ({**fields, "csrf": token}, {"origin": "http://evil.test", "sec-fetch-site": "cross-site"}),
    ):
        answer = page.request.post("/stop", form=form, headers=headers, max_redirects=0)
        assert answer.status == 401, form
    assert len(site.api("cai", "GET", "/api/stops")["stops"]) == before
    good = page.request.post(
        "/stop",
        form={**fields, "csrf": token, "reason": "control"},
        headers={"origin": site.url, "sec-fetch-site": "same-origin"},
        max_redirects=0,
    )
    assert good.status == 303
    made.close()


def test_text_of_others_is_shown_and_never_run(site: Site, chromium: Browser, stopped: dict[str, Any]) -> None:
    made = context(chromium, site, "cai")
    page = made.new_page()
    for path in ("/kill", f"/kill/{stopped['stop']['order']}", "/audit"):
        page.goto(path)
        assert page.evaluate("window.pwn") is None
    page.goto(f"/kill/{stopped['stop']['order']}")
    assert "onerror=window.pwn=1" in page.locator("main").inner_text()
    made.close()


def test_a_live_part_that_is_not_refreshed_says_so(site: Site, chromium: Browser) -> None:
    made = context(chromium, site, "cai")
    page = made.new_page()
    page.goto("/")
    page.wait_for_timeout(2500)
    assert page.locator(".stale").count() == 0
    page.route("**/fragments/**", lambda route: route.abort())
    page.wait_for_selector(".stale", timeout=16_000)
    assert "Stale" in (page.locator(".stale").get_attribute("data-stale") or "")
    made.close()


def test_live_parts_do_not_flood_the_ledger(site: Site, chromium: Browser) -> None:
    made = context(chromium, site, "olga")
    page = made.new_page()
    page.goto("/")
    page.wait_for_timeout(2500)
    before = site.api("olga", "GET", "/api/audit/head")["size"]
    page.wait_for_timeout(6000)
    after = site.api("olga", "GET", "/api/audit/head")["size"]
    assert after - before <= 3
    made.close()


def test_enrolment_by_page_shows_a_code_that_a_phone_can_read(site: Site, chromium: Browser) -> None:
    link = site.api("ada", "POST", "/api/invitations", name="petra", roles=["researcher"], tenant="lab")["link"]
    made = context(chromium, site, None, color_scheme="dark")
    page = made.new_page()
    with watched(page) as seen:
        page.goto(link.replace(site.url, ""))
        assert re.fullmatch(r".{20,}", page.locator("#secret").input_value())
        assert "#" not in page.url
        page.fill("#password", PASSWORD)
        page.click("main button[type=submit]")
        secret = page.locator("code.break").inner_text()
        assert violations(page) == []
        page.fill("#code", pyotp.TOTP(secret).now())
        page.click("main button[type=submit]")
        page.wait_for_url(site.url + "/")
    assert seen == []
    made.close()
