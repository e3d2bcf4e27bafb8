"""What every key provider offers, and the values that pass: a run key in clear, wrapped, and its context.

A provider holds key-encryption keys (KEKs) in versions and wraps run keys under them. Our own state (disabled,
minimum version) is asked before the provider is; a provider's text is never the explanation that a caller gets.

| what went wrong | class and code | ask again? |
|---|---|---|
| no such KEK or version | NotFound ``not_found.kek`` | no |
| the KEK is disabled | Denied ``denied.kek_disabled`` | no |
| a version below the minimum, or above the newest | Denied ``denied.kek_version`` | no |
| wrapped for something else | Untrusted ``untrusted.key_context`` | no |
| the token refuses us (PIN) | Denied ``denied.token`` | no |
| this provider is not for that tier | Denied ``denied.provider`` | no |
| it does not answer | Unavailable ``unavailable.provider`` | yes |
| the wrapped bytes are damaged or forged | Untrusted ``untrusted.wrapped_key`` | no |

Page: docs/formats/key-hierarchy.md.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol, Self

from interlock.call import text
from interlock.canon import canonical
from interlock.errors import Malformed, Untrusted
from interlock.tier import Tier, tier_of

KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
LOCAL, PKCS11 = "local", "pkcs11"
_DOMAIN = b"interlock/run-key/v1\n"
_MAGIC = b"IWK1"
_LENGTH = len(_MAGIC) + 32 + NONCE_BYTES + KEY_BYTES + TAG_BYTES


@dataclass(frozen=True)
class Context:
    """What a run key is for. It is authenticated: a key that was wrapped for one run opens for no other."""

    tenant: str
    model: str
    run: str
    tier: Tier

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {"tenant": self.tenant, "model": self.model, "run": self.run, "tier": self.tier.value}

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Parse `as_json`; raises Malformed, also when a field is absent or unknown."""
        if not isinstance(value, dict) or set(value) != {"tenant", "model", "run", "tier"}:
            raise Malformed("a key's context has tenant, model, run and tier", code="context")
        return cls(text(value, "tenant"), text(value, "model", empty=True), text(value, "run"),
                   tier_of(value.get("tier")))


@dataclass(frozen=True)
class Wrapped:
    """A run key as it may lie anywhere: `provider` and `kek` (with `version`) say who can open it."""

    provider: str
    kek: str
    version: int
    data: bytes


@dataclass(frozen=True)
class Versions:
    """The versions of a KEK: the `newest` wraps; what is below `minimum` opens nothing; `present` exist."""

    kek: str
    newest: int
    minimum: int
    disabled: bool
    present: tuple[int, ...]


@dataclass(frozen=True)
class Health:
    """Whether the provider answers now; `code` is the refusal's when it does not."""

    ok: bool
    code: str = ""


class Provider(Protocol):
    """A key provider. Every method raises the refusals of the table above. No method takes a nonce."""

    @property
    def name(self) -> str:
        """Return ``local`` or ``pkcs11``."""

    def generate(self, context: Context) -> tuple[bytes, Wrapped]:
        """Return a fresh run key of 32 bytes, in clear and wrapped under the newest version."""

    def unwrap(self, wrapped: Wrapped, context: Context) -> bytes:
        """Return the run key that was wrapped for exactly `context`."""

    def rewrap(self, wrapped: Wrapped, context: Context, to_version: int | None = None) -> Wrapped:
        """Return the same run key under `to_version`, which is obeyed or refused (None: the newest)."""

    def rotate(self) -> int:
        """Make a new version, try it, make it the newest; return its number. A fault leaves the old one newest."""

    def set_minimum(self, version: int) -> None:
        """Refuse all versions below `version` from now on; one above the newest is refused."""

    def disable(self) -> None:
        """Refuse every use of the KEK until `enable`."""

    def enable(self) -> None:
        """Admit use again."""

    def versions(self) -> Versions:
        """Return which versions there are and which of them count."""

    def health(self) -> Health:
        """Ask the provider for a round trip; raises nothing."""


def bound(context: Context, kek: str, version: int) -> bytes:
    """Return the bytes that a wrapping authenticates beside the key: context, KEK and version."""
    return _DOMAIN + canonical({"context": context.as_json(), "kek": kek, "version": version})


def pack(context: Context, nonce: bytes, sealed: bytes) -> bytes:
    """Return the stored form: magic, digest of the context, nonce, ciphertext with tag.

    The digest only tells another context from damage, so that the refusal can say which; what refuses is the tag.
    """
    return _MAGIC + _named(context) + nonce + sealed


def unpack(data: bytes, context: Context) -> tuple[bytes, bytes]:
    """Return (nonce, ciphertext with tag). Raises Untrusted: damaged, or for another context."""
    if len(data) != _LENGTH or not data.startswith(_MAGIC):
        raise corrupt()
    rest = data[len(_MAGIC):]
    if rest[:32] != _named(context):
        raise Untrusted("the run key was wrapped for another context", code="key_context",
                        next_step="it opens only for its own tenant, model, run and tier")
    return rest[32:32 + NONCE_BYTES], rest[32 + NONCE_BYTES:]


def corrupt() -> Untrusted:
    """Return the refusal of wrapped bytes that do not verify."""
    return Untrusted("a wrapped run key is damaged or forged", code="wrapped_key",
                     next_step="restore the database, or the keys, from a backup")


def _named(context: Context) -> bytes:
    return hashlib.sha256(_DOMAIN + canonical(context.as_json())).digest()
