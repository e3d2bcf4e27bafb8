"""A real control plane without programs: initialised state, SQLite, order log, gate with the example policy.

`House` plays people (sessions made in the store) and `Host` a node (its certificate key and supervisor key).
"""

import base64
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from fastapi.testclient import TestClient

from control_plane import app as joint
from control_plane import heartbeat, joining, settings, signing
from control_plane.api.nodes import make_join_file
from control_plane.auth import sessions
from control_plane.init import initialise
from control_plane.parts import Parts
from control_plane.store import nodes, people
from control_plane.store.db import now_us, writing
from control_plane.ticker import grow_trust
from interlock.call import new_id
from interlock.order import Mode, Scope, StopOrder
from interlock.signed import RECEIPT, RESUME_APPROVAL, STOP, Signed, public_text, sign
from policy import bundle

ROOT = Path(__file__).parents[2]
FACTS = {"layers": [], "profiles": [{"name": "standard", "digest": "sha256:0", "probes": {"total": 15, "failed": 0}}],
         "tiers": ["none", "high", "critical"], "data_roots": [], "environments": ["guest"], "gateway": True}


@dataclass
class Human:
    """A person with a session and a person key."""

    id: str
    name: str
    session: str
    key: Ed25519PrivateKey

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.session}"}


@dataclass
class Host:
    """A joined node as the control plane sees it."""

    parts: Parts
    name: str
    supervisor: Ed25519PrivateKey
    key: ec.EllipticCurvePrivateKey
    certificate: str

    def beat(self, *runs: tuple[str, int], **more: Any) -> dict[str, Any]:
        """Send a heartbeat; every run gets a fresh nonce."""
        rows = [{"nonce": new_id("beat"), "run": r, "attempt": a, "epoch": 0} for r, a in runs]
        body = {"boot_id": "boot", "nonce": new_id("snap"), "digest": "", "floor": 0, "trust_version": 1, "beats": rows,
                "orders": [], "receipts": [], **more}
        return heartbeat.respond(self.parts, self.name, heartbeat.Heartbeat.from_json(body))

    def receipt(self, order: str, result: str = "confirmed", at_ms: int = 1, **more: Any) -> Signed:
        return sign(RECEIPT, {"order": order, "node": self.name, "boot_id": "boot", "nonce": "n", "result": result,
                              "runs": [], "survivors": [], "at_ms": at_ms, **more}, self.supervisor)

    def local_stop(self, scope: str, epoch: int = 0) -> Signed:
        order = StopOrder(new_id("stop"), Scope.parse(scope), Mode.KILL, epoch, "root", "local")
        return sign(STOP, order.as_json(), self.supervisor)


@dataclass
class House:
    """The parts, a client of the people API, and the people."""

    state: Path
    parts: Parts
    client: TestClient
    people: dict[str, Human] = field(default_factory=dict)

    def person(self, name: str, *roles: str) -> Human:
        key = Ed25519PrivateKey.generate()
        human = people.Person(new_id("per"), name, "lab", "person", "", "x", None, 0, True,
                              public_text(key.public_key()), False, now_us())
        with writing(self.parts.engine) as connection:
            people.add(connection, human)
            people.set_roles(connection, human.id, "lab", frozenset(roles))
            session = sessions.begin(connection, human.id, factor=True, client="cli")
        grow_trust(self.parts)
        self.people[name] = Human(human.id, name, session, key)
        return self.people[name]

    def staff(self) -> None:
        """The five people of the demo."""
        for name, role in (("ada", "administrator"), ("rob", "researcher"), ("olga", "safety_officer"),
                           ("omar", "safety_officer"), ("cora", "on_call")):
            self.person(name, role)

    def host(self, name: str = "n1") -> Host:
        """Join a node through the join file, and let it report facts and beat once."""
        parts = self.parts
        file = make_join_file(parts.engine, parts.desk.log, parts.signers.authority, parts.settings, name, "test")
        key, supervisor = ec.generate_private_key(ec.SECP256R1()), Ed25519PrivateKey.generate()
        joined = joining.join(parts, file["secret"], csr(key, name), public_text(supervisor.public_key()))
        host = Host(parts, name, supervisor, key, joined["certificate"])
        with writing(parts.engine) as connection:
            nodes.set_facts(connection, name, FACTS, now_us())
        host.beat()
        return host

    def post(self, path: str, who: Human, body: dict[str, Any]) -> Any:
        return self.client.post(path, json=body, headers=who.headers)

    def get(self, path: str, who: Human) -> Any:
        return self.client.get(path, headers=who.headers)

    def launch(self, who: Human | None = None, **plan: Any) -> str:
        answer = self.post("/api/runs", who or self.people["rob"], {"plan": {
            "argv": ["true"], "tier": "none", "tenant": "lab", **plan}})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["run"])

    def stop(self, scope: str, who: str = "cora") -> str:
        answer = self.post("/api/stop", self.people[who], {"scope": scope, "reason": "test"})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["order"])

    def approval(self, asked: dict[str, Any], human: Human, **other: Any) -> dict[str, Any]:
        return sign(RESUME_APPROVAL, {**asked["body"], "person": human.id, **other}, human.key).as_json()


def csr(key: ec.EllipticCurvePrivateKey, name: str) -> str:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    built = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return built.public_bytes(Encoding.PEM).decode()


def publish(parts: Parts) -> None:
    """Sign the example policy by two pinned signers and publish it."""
    keys = [Ed25519PrivateKey.generate() for _ in range(2)]
    for number, key in enumerate(keys):
        signing.add_bundle_signer(parts.settings.places.trust, f"signer{number}", public_text(key.public_key()))
    archive = bundle.pack(ROOT / "examples" / "policy", version=1)
    for key in keys:
        archive = bundle.sign_archive(archive, key)
    parts.slot.publish(archive, "test")


@pytest.fixture
def state() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="il-"))
    yield folder / "s"
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def template() -> Iterator[Path]:
    """One initialised state with a published policy, copied by each test: making keys and tables is not its matter."""
    folder = Path(tempfile.mkdtemp(prefix="il-"))
    parts = joint.build(initialise(folder / "s", site="demo", people_port=27070, nodes_port=27071))
    publish(parts)
    parts.desk.close()
    parts.engine.dispose()
    yield folder / "s"
    shutil.rmtree(folder)


@pytest.fixture
def house(state: Path, template: Path) -> Iterator[House]:
    """An empty site with a published policy."""
    shutil.copytree(template, state)
    parts = joint.build(replace(settings.load(state), extra_hosts=("testserver",)))
    assert joint.start(parts) == {}
    client = TestClient(joint.people_app(parts), raise_server_exceptions=True)
    yield House(state, parts, client)
    client.close()
    parts.desk.close()
    parts.engine.dispose()


@pytest.fixture
def staffed(house: House) -> House:
    house.staff()
    return house


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
