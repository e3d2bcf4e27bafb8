"""The control plane's own signing keys, one purpose each: grants, stops, tree heads; and the site CA."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from control_plane.certificates import Authority
from interlock.errors import Conflict, Malformed
from interlock.keyfile import read_ed25519, read_private
from interlock.signed import key_id, public_from_text, public_text


@dataclass(frozen=True)
class Signers:
    """Private halves, held in memory; files are 0600 and refused when others can read them."""

    grant: Ed25519PrivateKey
    stop: Ed25519PrivateKey
    head: Ed25519PrivateKey
    authority: Authority

    @classmethod
    def load(cls, keys: Path) -> "Signers":
        """Read all keys; raises Untrusted, Unavailable or Malformed."""
        return cls(
            read_ed25519(keys / "grant.key"), read_ed25519(keys / "stop.key"), read_ed25519(keys / "head.key"),
            Authority.load(keys),
        )

    @property
    def stop_pins(self) -> dict[str, Ed25519PublicKey]:
        """Return the pinned keys that may sign a stop for the whole site."""
        return pins(self.stop.public_key())

    @property
    def grant_pins(self) -> dict[str, Ed25519PublicKey]:
        """Return the pinned keys of grants, leases and resumes."""
        return pins(self.grant.public_key())


def pins(*keys: Ed25519PublicKey) -> dict[str, Ed25519PublicKey]:
    """Return key id → key, the form that `interlock.signed.verify` takes."""
    return {key_id(k): k for k in keys}


def read_kek(keys: Path) -> bytes:
    """Return the 32-byte key-encryption key; raises Untrusted, Unavailable or Malformed."""
    raw = read_private(keys / "kek.key")
    if len(raw) != 32:
        raise Malformed("kek.key is not a key of 32 bytes", code="key_file",
                        next_step="restore it from the backup of the keys")
    return raw


def bundle_signers(trust: Path) -> list[dict[str, str]]:
    """Return ``[{name, key}]`` of ``trust/signers.json``, empty when nobody is pinned yet."""
    path = trust / "signers.json"
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_bytes())
        found = [{"name": str(r["name"]), "key": public_text(public_from_text(str(r["key"])))} for r in rows]
    except (ValueError, KeyError, TypeError):
        raise Malformed(f"{path} cannot be read", code="signers") from None
    return found


def bundle_pins(trust: Path) -> Mapping[str, Ed25519PublicKey]:
    """Return the pinned bundle signers as key id → key."""
    return pins(*(public_from_text(row["key"]) for row in bundle_signers(trust)))


def add_bundle_signer(trust: Path, name: str, key: str) -> list[dict[str, str]]:
    """Pin one more bundle signer; the same one twice changes nothing. Raises Conflict (name reused)."""
    rows = bundle_signers(trust)
    row = {"name": name, "key": public_text(public_from_text(key))}
    if row in rows:
        return rows
    if any(r["name"] == name or r["key"] == row["key"] for r in rows):
        raise Conflict("that name or key is pinned already", code="signer", next_step="see trust/signers.json")
    rows.append(row)
    path = trust / "signers.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(rows, indent=1) + "\n")
    fresh.chmod(0o644)
    fresh.replace(path)
    return rows
