"""The one place that joins the control plane's parts: settings → objects → two apps (people, nodes)."""

import threading
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware

from control_plane import registry as registry_rules
from control_plane import resume, trust_change
from control_plane.api import (
    approvals,
    context,
    kill,
    ledger,
    node_routes,
    nodes,
    people,
    policies,
    programmes,
    progress,
    registry,
    runs,
    status,
    trust,
    whoami,
    why,
)
from control_plane.auth.approvals import RESUME, TRUST, VERSION, Standing
from control_plane.bell import Bell
from control_plane.console.mount import mount
from control_plane.desk import OrderDesk
from control_plane.keys import FOLDER, RunKeys
from control_plane.order_log import OrderLog
from control_plane.output import OutputStore
from control_plane.parts import Parts
from control_plane.schema import refuse_old
from control_plane.settings import Settings
from control_plane.signing import Signers, read_kek
from control_plane.slot import BundleSlot
from control_plane.store.db import open_engine
from control_plane.store.records import open_ledger
from control_plane.ticker import Ticker, grow_trust, look_for_keks
from control_plane.wall import BodyLimit, PageHeaders
from interlock.errors import Refusal
from policy.gate import Gate

HOSTS = ["localhost", "127.0.0.1"]
PEOPLE_BYTES, NODE_BYTES = 16 << 20, 96 << 20
ROUTERS = (whoami, people, approvals, runs, kill, nodes, ledger, policies, registry, programmes, progress, status,
           trust, why)


def build(settings: Settings) -> Parts:
    """Make every object once. Raises the typed refusals of keys, database and order log."""
    places = settings.places
    signers, kek = Signers.load(places.keys), read_kek(places.keys)
    engine = open_engine(settings.database_url)
    refuse_old(engine)
    book = open_ledger(engine, signers.head, settings.origin, places.keys)
    bell = Bell()
    desk = OrderDesk(engine, OrderLog(places.orders), places.control / "accepted.log", signers, bell, book.record)
    slot = BundleSlot(engine, places.trust)
    gate = Gate(slot.decide, desk.stopped, book.record, desk.epoch)
    keys = RunKeys(settings.kms, places.keys / FOLDER)
    return Parts(settings, engine, kek, signers, book, bell, desk, slot, gate, OutputStore(places.control),
                 keys, threading.Lock())


def start(parts: Parts) -> dict[str, str]:
    """Catch up with the order log, load the bundle, look for the key-encryption key; return what could not be done,
    by name."""
    faults: dict[str, str] = {}
    jobs: tuple[tuple[str, Callable[[], object]], ...] = (
        ("orders", parts.desk.catch_up), ("bundle", parts.slot.load), ("keys", lambda: look_for_keks(parts)))
    for name, job in jobs:
        try:
            job()
        except Refusal as refusal:
            faults[name] = refusal.code  # nothing is granted meanwhile; stops are accepted all the same
    return faults


def _put(app: FastAPI, parts: Parts) -> None:
    app.state.parts = parts
    for name in ("engine", "kek", "ledger", "gate", "settings", "desk", "signers", "slot"):
        setattr(app.state, name, getattr(parts, name))


def people_app(parts: Parts, ticker: Ticker | None = None) -> FastAPI:
    """Return the app of people: API now, console beside it."""
    app = FastAPI(title="Interlock", docs_url=None, redoc_url=None, openapi_url=None)
    _put(app, parts)
    app.state.faults = ticker.faults if ticker else {}
    app.state.enrolled = lambda _person: grow_trust(parts)
    app.state.approved = lambda now: approved(parts, now)
    context.install(app)
    for module in ROUTERS:
        app.include_router(module.router)
    mount(app)
    app.add_middleware(BodyLimit, limit=PEOPLE_BYTES)
    app.add_middleware(PageHeaders)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*HOSTS, *parts.settings.extra_hosts])
    return app


def approved(parts: Parts, now: Standing) -> dict[str, Any]:
    """Act on a request that has all its votes: resume, trust change and version at once; a launch waits for its
    requester."""
    if now.request.kind == TRUST:
        held = trust_change.settle(parts, now)
        return {"trust": held.version, "persons": sorted(held.keys)}
    if now.request.kind == VERSION:
        return registry_rules.settle(parts, now)
    if now.request.kind != RESUME:
        return {}
    made = resume.settle(parts.desk, parts.signers, now, parts.settings.cooldown_ms)
    return {"resume": made.id, "epoch": made.epoch, "clears": list(made.clears)}


def nodes_app(parts: Parts) -> FastAPI:
    """Return the app of the node listener."""
    app = FastAPI(title="Interlock node link", docs_url=None, redoc_url=None, openapi_url=None)
    _put(app, parts)
    context.install(app)
    node_routes.install(app)
    app.add_middleware(BodyLimit, limit=NODE_BYTES)
    return app


