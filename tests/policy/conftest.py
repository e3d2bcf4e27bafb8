"""Two pinned signers, bundles made from a few lines, and calls of one researcher."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from interlock.call import Action, Call, Resource, Subject
from interlock.signed import key_id
from interlock.tier import Tier
from policy import archive, bundle
from policy.bundle import Bundle
from policy.rbac import Engine

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy"
MODEL = (EXAMPLE / "model.conf").read_bytes()
NOW = 1_800_000_000_000_000
FEW = "p, researcher, same, */*, launch, none, -, allow\np, on_call, *, */*, look, *, -, allow\n"


@dataclass(frozen=True)
class Signers:
    """Private keys of three persons; the first two are pinned."""

    ada: Ed25519PrivateKey
    ben: Ed25519PrivateKey
    mallory: Ed25519PrivateKey

    @property
    def pinned(self) -> dict[str, Ed25519PublicKey]:
        return {key_id(k.public_key()): k.public_key() for k in (self.ada, self.ben)}


@pytest.fixture(scope="session")
def signers() -> Signers:
    return Signers(*(Ed25519PrivateKey.generate() for _ in range(3)))


def packed(policy: str, folder: Path, *, model: bytes = MODEL, version: int = 1, created_us: int = NOW) -> bytes:
    """Return the unsigned archive of these two files."""
    folder.mkdir(exist_ok=True)
    (folder / "model.conf").write_bytes(model)
    (folder / "policy.csv").write_text(policy)
    return bundle.pack(folder, version=version, created_us=created_us)


@pytest.fixture
def make(signers: Signers, tmp_path: Path) -> Callable[..., bytes]:
    """Return a maker of signed archives; by default two persons sign."""

    def build(policy: str = FEW, *, by: str = "ada ben", **more: Any) -> bytes:
        data = packed(policy, tmp_path / "policy", **more)
        for name in by.split():
            data = bundle.sign_archive(data, getattr(signers, name))
        return data

    return build


@pytest.fixture
def load(make: Callable[..., bytes], signers: Signers) -> Callable[..., Bundle]:
    """Return a maker of verified bundles."""
    return lambda policy=FEW, **more: bundle.read(make(policy, **more), signers.pinned, None, now_us=NOW)


@pytest.fixture
def engine(load: Callable[..., Bundle]) -> Callable[..., Engine]:
    """Return a maker of engines."""
    return lambda policy=FEW: Engine(load(policy), lambda: NOW)


@pytest.fixture
def example(engine: Callable[..., Engine]) -> Engine:
    """The engine of examples/policy."""
    return engine((EXAMPLE / "policy.csv").read_text())


def call(
    action: Action = Action.LAUNCH, tier: Tier = Tier.NONE, *, kind: str = "pool", name: str = "default",
    tenant: str = "demo", home: str = "demo", bound: str = "",
) -> Call:
    """Return a call of one person of tenant `home`."""
    return Call(action, Subject("per_1", home, "person", "per_1"), Resource(kind, name, tenant, tier), bound=bound)


def repacked(data: bytes, **changes: bytes | None) -> bytes:
    """Return the archive with members replaced, added or (None) removed; dots are written as ``__``."""
    files: dict[str, bytes] = archive.unpack(data)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del files[name]
        else:
            files[name] = value
    return archive.pack(files)
