"""A real control plane's identity part: SQLite file, ledger, gate with the example policy, uvicorn on a port."""

import base64
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import pyotp
import pytest
import uvicorn
from argon2 import PasswordHasher
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fastapi import FastAPI
from sqlalchemy import Engine

from audit.ledger import Ledger
from control_plane import trust_list
from control_plane.api import approvals as approval_routes
from control_plane.api import context, people, whoami
from control_plane.auth import approvals, links, passwords, totp
from control_plane.auth.site import Site
from control_plane.settings import Places, Settings
from control_plane.store import tables
from control_plane.store import versions as run
from control_plane.store.db import now_us, open_engine, writing
from interlock.signed import RESUME_APPROVAL, key_id, public_text, sign
from policy import bundle
from policy.decide import decide
from policy.gate import Gate
from policy.rbac import Engine as Rules

T = TypeVar("T")
# Cheap hashes keep the room's tests short; test_I13 checks the parameters of the real ones.
QUICK, REAL = PasswordHasher(time_cost=1, memory_cost=64, parallelism=1), passwords._HASHER
PASSWORD = "a long walk by the sea"
EXAMPLE = Path(__file__).parents[3] / "examples" / "policy"


class Phone:
    """An authenticator whose clock the test sets: each code is a step later than the last one."""

    def __init__(self, secret: str) -> None:
        self.totp = pyotp.TOTP(secret)

    def at(self, timecode: int) -> str:
        return self.totp.generate_otp(timecode)


class Clock:
    """The time that codes are checked at; tests step it by hand instead of waiting 30 s for each code."""

    def __init__(self) -> None:
        self.timecode = int(time.time()) // totp.STEP_S

    def time(self) -> float:
        return self.timecode * totp.STEP_S + 1.0

    def next(self) -> int:
        self.timecode += 1
        return self.timecode


@dataclass
class Human:
    """A person as seen from outside: what he knows and holds."""

    id: str
    name: str
    phone: Phone
    key: Ed25519PrivateKey
    session: str


@dataclass
class House:
    """The served app and what a test needs to play people and to look behind the scenes."""

    url: str
    app: FastAPI
    engine: Engine
    clock: Clock
    client: httpx.Client
    humans: dict[str, Human] = field(default_factory=dict)

    @property
    def site(self) -> Site:
        return Site(self.engine, self.app.state.kek, self.app.state.gate, self.app.state.ledger)

    def send(self, method: str, path: str, session: str = "", **more: Any) -> httpx.Response:
        headers = dict(more.pop("headers", {}))
        if session:
            headers["authorization"] = f"Bearer {session}"
        return self.client.request(method, self.url + path, headers=headers, **more)

    def post(self, path: str, body: dict[str, Any] | None = None, session: str = "", **more: Any) -> httpx.Response:
        return self.send("POST", path, session, json=body or {}, **more)

    def get(self, path: str, session: str = "", **more: Any) -> httpx.Response:
        return self.send("GET", path, session, **more)

    def code(self, human: Human) -> str:
        """A code that nobody used yet."""
        return human.phone.at(self.clock.next())

    def enrol(self, secret: str, name: str, **more: Any) -> Human:
        key = Ed25519PrivateKey.generate()
        body = {"secret": secret, "name": name, "password": PASSWORD, "person_key": public_text(key.public_key())}
        begun = self.post("/api/enrol", {**body, **more})
        assert begun.status_code == 200, begun.text
        phone = Phone(begun.json()["totp_secret"])
        done = self.post("/api/enrol/confirm", {"secret": secret, "code": phone.at(self.clock.next())})
        assert done.status_code == 200, done.text
        human = Human(done.json()["person"], name, phone, key, done.json()["session"])
        self.humans[name] = human
        return human

    def invite(self, name: str, *roles: str, by: str = "ada") -> str:
        answer = self.post("/api/invitations", {"name": name, "roles": list(roles), "tenant": "lab"},
                           self.humans[by].session)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["link"]).partition("#")[2]

    def join(self, name: str, *roles: str) -> Human:
        return self.enrol(self.invite(name, *roles), name)

    def launch_request(self, by: Human, *, needed: int = 2, tier: str = "critical", **more: Any) -> str:
        """Leave a launch request behind, as the runs API does."""
        body = {"argv": ["/bin/true", secrets.token_hex(4)], "tier": tier, "tenant": "lab"}
        with writing(self.engine) as connection:
            return approvals.ask(connection, kind="launch", body=body, tenant="lab", asked_by=by.id, owner=by.id,
                                 needed=needed, **more).id

    def vote(self, request: str, human: Human, verb: str = "approve", **more: Any) -> httpx.Response:
        return self.post(f"/api/approvals/{request}/{verb}", {"code": self.code(human), **more}, human.session)

    def signature(self, asked: str, human: Human, **other: Any) -> dict[str, Any]:
        body = self.get(f"/api/approvals/{asked}", human.session).json()["body"]
        return sign(RESUME_APPROVAL, {**body, "person": human.id, **other}, human.key).as_json()

    def events(self, kind: str) -> list[dict[str, Any]]:
        self.app.state.ledger.lead()
        self.app.state.ledger.sequence()
        return [row.event for row in self.app.state.ledger.rows(limit=1000) if row.event["type"] == kind]


class Desk:
    """What the order desk tells the approvals: the head of the order log."""

    def __init__(self) -> None:
        self.present = "0:start"

    def head(self) -> str:
        return self.present

    def active(self) -> list[Any]:
        return []


def rules(folder: Path) -> Rules:
    """The example policy, signed by two authors and read as a site reads it."""
    authors = [Ed25519PrivateKey.generate() for _ in range(2)]
    archive = bundle.pack(EXAMPLE)
    for author in authors:
        archive = bundle.sign_archive(archive, author)
    pinned = {key_id(a.public_key()): a.public_key() for a in authors}
    return Rules(bundle.read(archive, pinned, None))


def build(folder: Path, active: Rules | None, kek: bytes) -> FastAPI:
    """The identity part of the app, joined as the composition root joins it."""
    engine = open_engine(f"sqlite:///{folder / 'control.db'}")
    run.upgrade(engine)
    ledger = Ledger(engine, tables.ledger, Ed25519PrivateKey.generate(), "test.example/ledger",
                    last_head=folder / "head.json")
    app = FastAPI()
    app.state.engine, app.state.kek, app.state.ledger = engine, kek, ledger
    app.state.gate = Gate(partial(decide, active), lambda _: None, ledger.record, lambda: 0)
    app.state.settings = SimpleNamespace(people_url="http://localhost:7070")
    app.state.desk = Desk()
    for router in (whoami.router, people.router, approval_routes.router):
        app.include_router(router)
    context.install(app)
    return app


@pytest.fixture(scope="session")
def example_rules(tmp_path_factory: pytest.TempPathFactory) -> Rules:
    return rules(tmp_path_factory.mktemp("policy"))


class Door:
    """One uvicorn for all tests of the room: it hands each request to the app of the present test."""

    app: FastAPI
    url: str

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


@pytest.fixture(scope="session")
def door() -> Iterator[Door]:
    """Serve by uvicorn in a thread, as the control plane does: proxy headers are not trusted."""
    made = Door()
    # asyncio sets TCP_NODELAY only where the protocol is named; without it each answer waits 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(made, log_level="critical", proxy_headers=False, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    made.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield made
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


@contextmanager
def opened(door: Door, folder: Path, active: Rules, kek: bytes, clock: Clock) -> Iterator[House]:
    """Serve the database in `folder` (an empty one is made)."""
    with pytest.MonkeyPatch.context() as patch:
        app = build(folder, active, kek)
        patch.setattr(totp, "time", clock)
        patch.setattr(passwords, "_HASHER", QUICK)
        door.app = app
        with httpx.Client(trust_env=False, timeout=60, verify=False) as client:
            yield House(door.url, app, app.state.engine, clock, client)
        app.state.engine.dispose()


@dataclass
class Template:
    """A database in which people have enrolled; each test serves a copy of its own."""

    folder: Path
    kek: bytes
    timecode: int
    humans: dict[str, Human]


def _template(door: Door, folder: Path, active: Rules, *roles: tuple[str, str]) -> Template:
    kek, clock = secrets.token_bytes(32), Clock()
    with opened(door, folder, active, kek, clock) as house:
        house.enrol(links.bootstrap(house.engine, house.site.ledger), "ada")
        for name, role in roles:
            house.join(name, role)
        with writing(house.engine) as connection:
            trust_list.grow(connection, Settings(Places(folder)), now_us())
    return Template(folder, kek, clock.timecode, house.humans)


@pytest.fixture(scope="session")
def with_ada(door: Door, tmp_path_factory: pytest.TempPathFactory, example_rules: Rules) -> Template:
    return _template(door, tmp_path_factory.mktemp("ada"), example_rules)


@pytest.fixture(scope="session")
def with_five(door: Door, tmp_path_factory: pytest.TempPathFactory, example_rules: Rules) -> Template:
    roles = ("rob", "researcher"), ("sue", "safety_officer"), ("sam", "safety_officer"), ("olly", "on_call")
    return _template(door, tmp_path_factory.mktemp("five"), example_rules, *roles)


@contextmanager
def copied(door: Door, template: Template, folder: Path, active: Rules) -> Iterator[House]:
    """Serve a copy of the template's database; the humans keep their sessions, phones and keys."""
    clock = Clock()
    clock.timecode = template.timecode
    shutil.copy2(template.folder / "control.db", folder / "control.db")
    with opened(door, folder, active, template.kek, clock) as house:
        house.humans = {name: replace(human) for name, human in template.humans.items()}
        yield house


@pytest.fixture
def empty(door: Door, tmp_path: Path, example_rules: Rules) -> Iterator[House]:
    """A site with nobody in it."""
    with opened(door, tmp_path, example_rules, secrets.token_bytes(32), Clock()) as house:
        yield house


@pytest.fixture
def house(door: Door, tmp_path: Path, example_rules: Rules, with_ada: Template) -> Iterator[House]:
    """A site whose administrator ada has enrolled through the bootstrap link."""
    with copied(door, with_ada, tmp_path, example_rules) as made:
        yield made


@pytest.fixture
def lab(door: Door, tmp_path: Path, example_rules: Rules, with_five: Template) -> Iterator[House]:
    """Administrator ada, researcher rob, safety officers sue and sam, on-call olly."""
    with copied(door, with_five, tmp_path, example_rules) as made:
        yield made


def at_once(count: int, act: Callable[[int], T]) -> list[T]:
    """Run `act` in `count` threads that start together."""
    gate = threading.Barrier(count)
    answers: list[T] = []

    def go(number: int) -> None:
        gate.wait()
        answers.append(act(number))

    threads = [threading.Thread(target=go, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def raw_key() -> str:
    return base64.b64encode(secrets.token_bytes(32)).decode()


__all__ = ["Clock", "Desk", "House", "Human", "Phone", "at_once"]
