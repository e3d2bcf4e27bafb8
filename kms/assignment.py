"""Which provider wraps for which tier: the one place that says so.

Rules: tier none goes to the local key file; high and critical to PKCS#11. The settings may name the local one for
high, in so many words. Critical is never local: settings that say so are refused at start.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from interlock.errors import Conflict, Denied, Malformed
from interlock.tier import Tier, tier_of
from kms.provider import LOCAL, PKCS11

USUAL: Mapping[Tier, str] = MappingProxyType({Tier.NONE: LOCAL, Tier.HIGH: PKCS11, Tier.CRITICAL: PKCS11})
_NEXT = "set kms.pkcs11 in settings.json (docs/formats/key-hierarchy.md), then start the control plane again"


@dataclass(frozen=True)
class TokenPlace:
    """Where a PKCS#11 token is: module file, token label, file with its PIN, SoftHSM's conf file or None."""

    module: Path
    token: str
    pin_file: Path
    conf: Path | None = None


@dataclass(frozen=True)
class Assignment:
    """Tier → provider, and the token when there is one."""

    tiers: Mapping[Tier, str] = field(default_factory=lambda: USUAL)
    pkcs11: TokenPlace | None = None

    def provider(self, tier: Tier) -> str:
        """Return the name of the provider that wraps for `tier`; raises Denied (``denied.provider``)."""
        name = self.tiers[tier]
        if name == PKCS11 and self.pkcs11 is None:
            raise Denied(f"no key provider is set up for tier {tier.value}", code="provider", next_step=_NEXT)
        return name

    def local_tiers(self) -> frozenset[Tier]:
        """Return the tiers whose run keys the local provider may wrap and open; critical is never one."""
        return frozenset(t for t, name in self.tiers.items() if name == LOCAL) - {Tier.CRITICAL}


def read(value: object) -> Assignment:
    """Return the assignment that the settings' object `kms` says.

    Raises Malformed (unknown field, tier or provider) or Conflict (``conflict.kms_tier``: critical on the local
    provider).
    """
    if not isinstance(value, dict) or set(value) - {"pkcs11", "tiers"}:
        raise Malformed("kms holds pkcs11 and tiers", code="settings")
    tiers = {**USUAL, **_tiers(value.get("tiers", {}))}
    if tiers[Tier.CRITICAL] == LOCAL:
        raise Conflict("the keys of tier critical are never wrapped by a key file", code="kms_tier",
                       next_step='set kms.tiers.critical to "pkcs11"')
    return Assignment(MappingProxyType(tiers), _token(value["pkcs11"]) if "pkcs11" in value else None)


def _tiers(value: object) -> dict[Tier, str]:
    if not isinstance(value, dict) or not all(name in (LOCAL, PKCS11) for name in value.values()):
        raise Malformed(f"kms.tiers maps a tier to {LOCAL} or {PKCS11}", code="settings")
    return {tier_of(tier): str(name) for tier, name in value.items()}


def _token(value: object) -> TokenPlace:
    if not isinstance(value, dict) or set(value) - {"module", "token", "pin_file", "conf"}:
        raise Malformed("kms.pkcs11 holds module, token, pin_file and conf", code="settings")
    label = value.get("token")
    if not isinstance(label, str) or not 0 < len(label.encode()) <= 32:
        raise Malformed("kms.pkcs11.token is a label of 1 to 32 bytes", code="settings")
    conf = _path(value, "conf") if value.get("conf") is not None else None
    return TokenPlace(_path(value, "module"), label, _path(value, "pin_file"), conf)


def _path(value: dict[str, Any], name: str) -> Path:
    found = value.get(name)
    if not isinstance(found, str) or not found.startswith("/"):
        raise Malformed(f"kms.pkcs11.{name} is an absolute path", code="settings")
    return Path(found)
