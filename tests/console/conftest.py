"""A real control plane with people of each role, and a headless Chromium."""

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pyotp
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from interlock.signed import public_text

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
PASSWORD = "seven green kettles whistle at dawn"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Site:
    """A serving control plane; `people` maps a name to session and TOTP secret."""

    state: Path
    url: str
    process: subprocess.Popen[str]
    people: dict[str, dict[str, str]] = field(default_factory=dict)

    def api(self, who: str, method: str, path: str, **body: Any) -> dict[str, Any]:
        session = self.people[who]["session"]
        answer = httpx.request(
            method, self.url + path, json=body or None, headers={"authorization": f"Bearer {session}"}, timeout=20
        )
        assert answer.status_code < 300, answer.text
        found = answer.json()
        assert isinstance(found, dict)
        return found

    def enrol(self, link: str, name: str = "") -> None:
        """Enrol through a one-time link with the code of the step before, so that the present one stays unused."""
        secret = link.partition("#")[2]
        key = public_text(Ed25519PrivateKey.generate().public_key())
        begun = httpx.post(
            self.url + "/api/enrol",
            json={"secret": secret, "name": name, "password": PASSWORD, "person_key": key},
            timeout=20,
        )
        assert begun.status_code == 200, begun.text
        totp = pyotp.TOTP(begun.json()["totp_secret"])
        done = httpx.post(
            self.url + "/api/enrol/confirm", json={"secret": secret, "code": totp.at(int(time.time()) - 30)}, timeout=20
        )
        assert done.status_code == 200, done.text
        self.people[done.json()["name"]] = {"session": done.json()["session"], "totp": begun.json()["totp_secret"]}

    def bootstrap_link(self) -> str:
        done = control(self.state, "bootstrap")
        return done.stdout.strip().splitlines()[-1]


def control(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-I", "-m", "control_plane", words[0], *words[1:], "--state", str(state)],
        text=True,
        capture_output=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done


def interlock(home: Path, *words: str) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "interlock"), *words],
        text=True,
        capture_output=True,
        check=False,
        env={**os.environ, "INTERLOCK_HOME": str(home)},
        cwd=str(home),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def publish(site: Site, folder: Path) -> None:
    """Publish the example policy under two signers, as an administrator would."""
    bundle = folder / "bundle"
    interlock(
        folder,
        "policy",
        "sign",
        str(ROOT / "examples" / "policy"),
        "--key",
        str(folder / "s1.key"),
        "--key",
        str(folder / "s2.key"),
        "--out",
        str(bundle),
    )
    site.api("ada", "POST", "/api/policy/bundles", archive=base64.b64encode(bundle.read_bytes()).decode())


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="ilk-", dir="/tmp"))
    state, people, nodes = folder / "s", free_port(), free_port()
    control(state, "init", "--site", "demo", "--people-port", str(people), "--nodes-port", str(nodes))
    for name in ("s1", "s2"):
        interlock(folder, "policy", "keygen", name)
        control(state, "trust-signer", str(next(folder.glob(f"{name}*.pub.json"))))
    process = subprocess.Popen(
        [sys.executable, "-I", "-m", "control_plane", "serve", "--state", str(state)],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["ready"] == "control_plane"
        found = Site(state, f"http://localhost:{people}", process)
        found.enrol(found.bootstrap_link(), "ada")
        publish(found, folder)
        for name, role in (
            ("olga", "safety_officer"),
            ("omar", "safety_officer"),
            ("cai", "on_call"),
            ("rosa", "researcher"),
        ):
            made = found.api("ada", "POST", "/api/invitations", name=name, roles=[role], tenant="lab")
            found.enrol(made["link"])
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        pytest.skip("no chromium here: apt-get install chromium")
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=CHROMIUM,
            headless=True,
            args=[
                "--no-sandbox",
                "--disable-dev-shm-usage",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--no-first-run",
                "--disable-quic",
            ],
        )
        yield browser
        browser.close()


def context(browser: Browser, site: Site, who: str | None, **options: Any) -> BrowserContext:
    """Return a browser context, signed in as `who`."""
    made = browser.new_context(base_url=site.url, **{"viewport": {"width": 1280, "height": 900}, **options})
    made.set_default_timeout(10_000)
    if who is not None:
        made.add_cookies(
            [
                {
                    "name": "__Host-interlock",
                    "value": site.people[who]["session"],
                    "url": site.url.replace("http:", "https:"),
                    "secure": True,
                    "httpOnly": True,
                    "sameSite": "Strict",
                }
            ]
        )
    return made
