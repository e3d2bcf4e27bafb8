"""A gateway over real HTTP and real engine sockets, with the example policy, in this process.

What stands in: the entitlements (no launcher shares them), the stop page (no supervisor writes it), the records (kept
in a list, and refused on demand), the engine's model (tests/inference/stand_in.py).
"""

import asyncio
import contextlib
import dataclasses
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from interlock.canon import digest_bytes
from interlock.errors import NotRecorded
from interlock.event import Event, Written
from interlock.order import Labels, Mode, Scope, ScopeKind, StopOrder
from interlock.signed import key_id
from interlock.tier import Tier
from policy import bundle
from policy.facts import Facts
from policy.rbac import Engine as Policy
from policy.snapshot import ApiKey, ModelRow, Snapshot
from runners import gateway_process
from runners.inference.front import Patient
from runners.inference.gateway import Gateway
from runners.inference.pool import Engine
from tests.inference.stand_in import VERSION, Script, StandIn

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy"
NODE = "node-1"
MODELS = {
    "luna": Tier.NONE, "nova": Tier.HIGH, "astra": Tier.CRITICAL, "words": Tier.NONE, "idle": Tier.NONE,
}


def credential(name: str, mark: str = "s") -> str:
    """Return the API key of `name`; ids and secrets have their real lengths."""
    return f"interlock_sk_{name[:10]:0<10}_{mark * 30}_aBcD12"


KEYS = {
    "pat": ("lab", frozenset({"trusted-testers"}), frozenset({"infer"})),  # partner
    "rae": ("lab", frozenset[str](), frozenset({"infer"})),  # researcher, no partner
    "eve": ("elsewhere", frozenset[str](), frozenset({"infer"})),  # of another tenant
    "liz": ("lab", frozenset[str](), frozenset({"launch", "look"})),  # a key for something else
}


@functools.cache
def policy() -> Policy:
    """The example policy, signed by two."""
    signers = [Ed25519PrivateKey.generate() for _ in range(2)]
    now = time.time_ns() // 1000
    data = bundle.pack(EXAMPLE, version=1, created_us=now)
    for signer in signers:
        data = bundle.sign_archive(data, signer)
    pinned = {key_id(s.public_key()): s.public_key() for s in signers}
    return Policy(bundle.read(data, pinned, None, now_us=now))


def snapshot() -> Snapshot:
    """Entitlements of three persons, and every model of `MODELS`."""
    keys = {
        f"key_{name:0<10}": ApiKey(f"key_{name:0<10}", digest_bytes(credential(name).encode()), name, tenant, scopes)
        for name, (tenant, _, scopes) in KEYS.items()
    }
    models = tuple(ModelRow(n, "lab", t, VERSION, "serving", ("sol",)) for n, t in MODELS.items())
    members = frozenset((name, p) for name, (_, programmes, _) in KEYS.items() for p in programmes)
    return Snapshot("n", frozenset({("rae", "lab", "researcher")}), members, frozenset(), 1, 0, keys, models)


class View:
    """What the launcher would share."""

    def __init__(self) -> None:
        self.now: Snapshot | None = snapshot()
        self.age = 0

    def decide(self, call: Any, facts: Facts) -> Any:
        return policy().decide(call, facts)

    def facts_of(self, person: str, tenant: str, **told: object) -> Facts:
        assert self.now is not None
        return Facts(self.now.roles_of(person, tenant), programmes=self.now.programmes_of(person),
                     bundle_age_ms=self.age)

    def snapshot(self) -> Snapshot | None:
        return self.now

    def age_ms(self) -> int:
        return self.age


class Page:
    """What the supervisor would write."""

    def __init__(self) -> None:
        self.stops: list[StopOrder] = []
        self.at = 0
        self.epochs: list[int] = []  # answers of the next questions, before `at`

    def stop(self, kind: ScopeKind, name: str = "") -> None:
        self.stops = [StopOrder("stop_1", Scope(kind, name), Mode.KILL, 1, "casey", "drill")]
        self.at += 1

    def stopped(self, labels: Labels) -> StopOrder | None:
        return next((s for s in self.stops if s.scope.matches(labels)), None)

    def epoch(self) -> int:
        return self.epochs.pop(0) if self.epochs else self.at


class Records:
    """The spool: what is durable. `full` refuses from then on; `refuse` refuses one type."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.full = False
        self.refuse = ""
        self.held = threading.Event()  # cleared: the record of an answer takes until it is set
        self.held.set()

    def __call__(self, event: Event) -> Written:
        if self.full or event.type.value == self.refuse:
            raise NotRecorded("the disk under the spool is full", code="full")
        event.canonical()
        if event.type.value == "infer.answered":
            self.held.wait(5)
        self.events.append(event)
        return Written(event.id, "gateway", len(self.events))

    def of(self, kind: str) -> list[Event]:
        return [e for e in self.events if e.type.value == kind]


class Room:
    """One gateway that serves; `close` ends it and shows that nothing is left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.view, self.page, self.records = folder, View(), Page(), Records()
        self.key = os.urandom(32)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._up, self._end = threading.Event(), asyncio.Event()
        self._thread.start()
        assert self._up.wait(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self.gateway = Gateway(self.view, self.page, self.records, NODE, self.key)  # type: ignore[arg-type]
        listener = gateway_process.bind(0)
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(self.gateway.app, http=Patient, ws="none", lifespan="off", log_config=None,
                                log_level="critical", access_log=False, server_header=False, proxy_headers=False,
                                timeout_graceful_shutdown=2)
        server = gateway_process.Listener(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])  # without its main loop, which looks ten times a second for the end
        self._up.set()
        await self._end.wait()
        self.gateway.pool.close_all()
        for each in server.servers:
            each.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        await asyncio.gather(*server.server_state.tasks)
        await self.gateway.close()
        listener.close()

    def soon(self, coroutine: Any) -> Any:
        """Run a coroutine in the gateway's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(5)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the gateway's loop and return its result."""
        async def run() -> Any:
            return function(*args)

        return self.soon(run())

    def labels(self, model: str, run: str) -> Labels:
        return Labels("lab", "rae", "rae", run, NODE, MODELS[model], model, ("sol",))

    @contextlib.contextmanager
    def engine(self, model: str = "luna", script: Script | None = None, **more: Any) -> Iterator[Script]:
        """Serve `model` by a stand-in while the block runs, and wait until it is ready."""
        run, path = f"run_{model}", str(self.folder / f"{model}.sock")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(32)
        engine = Engine(run, 1, os.getuid(), self.labels(model, run), VERSION)
        self.soon(self.gateway.pool.open(engine, listener))
        with StandIn(path, script, run=run, name=model, **more) as stand_in:
            try:
                wait_for(lambda: engine.ready)
                yield stand_in.script
            finally:
                self.call(self.gateway.pool.close, run, 1)
                Path(path).unlink()

    def client(self, who: str = "", **more: Any) -> httpx.Client:
        headers = {"authorization": f"Bearer {credential(who)}"} if who else {}
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=10, trust_env=False,
                            verify=False, **more)

    def ask(self, who: str = "", path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """One call in a connection of its own."""
        value = {"model": "luna", **({"prompt": "once"} if path == "/v1/completions" else {}), **body}
        with self.client(who) as client:
            return client.post(path, json=value)

    def settled(self, kind: str, count: int = 1) -> list[Event]:
        """Return the records of a type, when there are `count`."""
        wait_for(lambda: len(self.records.of(kind)) >= count)
        found = self.records.of(kind)
        assert len(found) == count, found
        return found

    def without(self, person: str) -> None:
        """Take a person's keys away, as the next snapshot would."""
        assert self.view.now is not None
        keys = {i: k for i, k in self.view.now.keys.items() if k.person != person}
        self.view.now = dataclasses.replace(self.view.now, keys=keys)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        assert not self._thread.is_alive()
        assert self.gateway.calls.slots.held == 0


def wait_for(what: Callable[[], Any], seconds: float = 5.0) -> float:
    """Return how many seconds it took until `what()` is true."""
    begun = time.monotonic()
    while not what():
        assert time.monotonic() - begun < seconds, "it did not happen"
        time.sleep(0.003)
    return time.monotonic() - begun
