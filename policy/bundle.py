"""A signed policy bundle: its authors' signatures over a manifest, the manifest over every file.

The archive is verified and read in one go: what was hashed is what gets parsed, there is no second read.
Signatures are always demanded; a key id selects a key, it never decides whether to verify. One pinned signer
is enough for everyday rules; two different ones are needed where rules for tier critical or the most powerful
actions change, and for the first bundle of a site. Whatever is refused leaves the active bundle in force,
since `read` changes nothing. Page: docs/formats/policy-bundle.md.
"""

import json
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from interlock import keyfile
from interlock.call import number, text
from interlock.canon import canonical, digest_bytes, parse
from interlock.errors import Conflict, Malformed, Unavailable, Untrusted
from interlock.signed import BUNDLE, Signed, add_signature, key_id, public_from_text, public_text, sign, verify
from interlock.signed import signers as signed_by
from policy import archive as archives
from policy import rules as texts
from policy.rules import Rules

SCHEMA, ENGINE = "interlock/bundle/v1", 1
SIGNED, UNSIGNED = "manifest.signed.json", "manifest.json"
_FIELDS = {"schema", "version", "created_us", "not_after_us", "files", "min_engine"}
_KEY_ID = re.compile(r"ed25519:[0-9a-f]{16}")
DAY_US = 86_400 * 1_000_000


@dataclass(frozen=True)
class Bundle:
    """A verified bundle. `digest` is over the manifest's exact bytes; times in microseconds since the epoch.

    `files` are the verified bytes, `rules` what they say, `signers` the key ids that signed, `archive` the
    exact bytes to store and pass on.
    """

    version: int
    digest: str
    created_us: int
    not_after_us: int
    files: Mapping[str, bytes]
    rules: Rules
    signers: frozenset[str]
    archive: bytes

    def expired(self, now_us: int) -> bool:
        """Return whether the bundle no longer decides; it then counts as absent."""
        return now_us >= self.not_after_us


def read(
    archive: bytes | Path, signers: Mapping[str, Ed25519PublicKey], active: Bundle | None, *,
    now_us: int | None = None, stored: bool = False,
) -> Bundle:
    """Return the verified bundle, or refuse and change nothing.

    Args: `signers` pinned key id → key; `active` the bundle now in force, or None for a first one; `now_us`
    microseconds since the epoch (default: the clock); `stored` for bytes from this program's own state that it
    had accepted before: one good signature is enough, since the second was seen at acceptance.
    Raises Untrusted (signature, member, digest), Malformed (form, rules), Conflict (version), Unavailable.
    """
    data = _load(archive)
    files = archives.unpack(data)
    signed = _signature_file(files)
    manifest = _manifest(verify(signed, BUNDLE, signers))
    _match_files(manifest["files"], files)
    _in_force(manifest, active, time.time_ns() // 1000 if now_us is None else now_us)
    rules = texts.parse(files)
    who = signed_by(signed, signers)
    needed = 1 if stored else threshold(rules, active)
    if len(who) < needed:
        raise Untrusted(
            f"{len(who)} of {needed} needed signatures by different pinned signers", code="threshold",
            next_step="have a second signer run interlock policy sign on the same bundle",
            details={"needed": needed, "given": len(who)},
        )
    return Bundle(
        manifest["version"], digest_bytes(signed.payload), manifest["created_us"], manifest["not_after_us"],
        MappingProxyType(files), rules, who, data,
    )


def threshold(rules: Rules, active: Bundle | None) -> int:
    """Return how many different signers `rules` need over `active`: 2 for a first bundle or a critical change."""
    if active is not None and texts.critical_part(rules) == texts.critical_part(active.rules):
        return 1
    return 2


def _load(archive: bytes | Path) -> bytes:
    if isinstance(archive, bytes):
        return archive
    try:
        with archive.open("rb") as source:
            return source.read(archives.MAX_ARCHIVE + 1)
    except OSError as error:
        raise Unavailable(f"cannot read {archive}: {error.strerror}", code="bundle") from None


def _signature_file(files: dict[str, bytes]) -> Signed:
    """Take the signed manifest out of `files`; nobody but pinned signers can have made it."""
    if SIGNED not in files:
        raise Untrusted("the bundle is not signed", code="unsigned",
                        next_step="have a pinned signer run interlock policy sign")
    signed = _signed(files.pop(SIGNED))
    for kid, _ in signed.signatures:
        if not _KEY_ID.fullmatch(kid):
            raise Untrusted("a signature of an unknown algorithm", code="algorithm")
    return signed


def _signed(data: bytes) -> Signed:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise Malformed("the signed manifest is not JSON", code="manifest") from None
    return Signed.from_json(value)


def _manifest(body: dict[str, Any]) -> dict[str, Any]:
    if set(body) != _FIELDS or text(body, "schema") != SCHEMA:
        raise Malformed("unknown schema of a manifest", code="manifest")
    for name in ("created_us", "not_after_us"):
        number(body, name)
    number(body, "version", low=1)
    if number(body, "min_engine", low=1) > ENGINE:
        raise Malformed("the bundle needs a newer engine", code="min_engine", next_step="update Interlock first")
    listed = body["files"]
    if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
        raise Malformed("a manifest lists files with their digests", code="manifest")
    return body


def _match_files(listed: Mapping[str, str], files: Mapping[str, bytes]) -> None:
    if extra := sorted(set(files) - set(listed)):
        raise Untrusted(f"{extra[0]} is not in the manifest", code="extra_file")
    if missing := sorted(set(listed) - set(files)):
        raise Untrusted(f"{missing[0]} is missing", code="missing_file")
    for name, data in files.items():
        if digest_bytes(data) != listed[name]:
            raise Untrusted(f"{name} is not the file that was signed", code="digest")


def _in_force(manifest: Mapping[str, Any], active: Bundle | None, now_us: int) -> None:
    if now_us >= manifest["not_after_us"]:
        raise Untrusted("the bundle has expired", code="expired", next_step="sign it again with a new life")
    if active is not None and manifest["version"] <= active.version:
        raise Conflict(
            f"version {manifest['version']} is not above the active {active.version}", code="version",
            next_step="a rollback is a new version, signed again",
        )


# ---- what authors do -------------------------------------------------------------------------------

def pack(
    folder: Path, *, version: int | None = None, life_days: int = 90, created_us: int | None = None
) -> bytes:
    """Return the UNSIGNED archive of the model and policy in `folder`.

    Args: `version` must rise with each bundle (default: seconds since the epoch); `life_days` 1 to 366.
    Raises Malformed when the files do not parse, Unavailable when they cannot be read.
    """
    if not 1 <= life_days <= 366:
        raise Malformed("a bundle lives 1 to 366 days", code="life")
    created = time.time_ns() // 1000 if created_us is None else created_us
    files = {name: _source(folder / name) for name in (texts.MODEL_FILE, texts.POLICY_FILE)}
    texts.parse(files)
    manifest = {
        "schema": SCHEMA, "version": created // 1_000_000 if version is None else version, "created_us": created,
        "not_after_us": created + life_days * DAY_US, "min_engine": ENGINE,
        "files": {name: digest_bytes(data) for name, data in files.items()},
    }
    _manifest(manifest)
    return archives.pack({**files, UNSIGNED: canonical(manifest)})


def _source(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"cannot read {path}: {error.strerror}", code="policy_file") from None
    with os.fdopen(fd, "rb") as source:
        if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            raise Untrusted(f"{path} is no regular file", code="member")
        return source.read(archives.MAX_ARCHIVE)


def sign_archive(archive: bytes, key: Ed25519PrivateKey) -> bytes:
    """Return `archive` signed by `key`, beside the signatures that it has; raises Conflict for a second time."""
    files = archives.unpack(archive)
    if SIGNED in files:
        before = _signed(files.pop(SIGNED))
        if key_id(key.public_key()) in {kid for kid, _ in before.signatures}:
            raise Conflict("this key has signed the bundle already", code="signed",
                           next_step="the second signature comes from another person")
        signed = add_signature(before, key)
    elif UNSIGNED in files:
        signed = sign(BUNDLE, _body(files.pop(UNSIGNED)), key)
    else:
        raise Malformed("the archive holds no manifest", code="manifest")
    _match_files(_manifest(signed.body())["files"], files)
    texts.parse(files)
    return archives.pack({**files, SIGNED: canonical(signed.as_json())})


def _body(data: bytes) -> dict[str, Any]:
    value = parse(data)
    if not isinstance(value, dict):
        raise Malformed("a manifest is an object", code="manifest")
    return value


def describe(archive: bytes) -> dict[str, Any]:
    """Return what an archive claims, UNVERIFIED: manifest, key ids, digest. For people who sign or publish."""
    files = archives.unpack(archive)
    signed = _signed(files[SIGNED]) if SIGNED in files else None
    if signed is None and UNSIGNED not in files:
        raise Malformed("the archive holds no manifest", code="manifest")
    payload = files[UNSIGNED] if signed is None else signed.payload
    return {
        "manifest": _manifest(_body(payload)), "digest": digest_bytes(payload),
        "keys": [] if signed is None else [kid for kid, _ in signed.signatures],
    }


def keygen(path: Path, name: str) -> dict[str, str]:
    """Make a signer: the private key at `path` (0600), the public half at `path`.pub.json; returns the latter.

    Raises Conflict when the file exists.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,63}", name):
        raise Malformed("a signer's name is lower-case letters, digits and _.-", code="signer")
    key = Ed25519PrivateKey.generate()
    keyfile.write_ed25519(path, key)
    public = {"name": name, "key": public_text(key.public_key())}
    path.with_name(path.name + ".pub.json").write_bytes(canonical(public) + b"\n")
    return public


def pinned(rows: Iterable[Mapping[str, Any]]) -> dict[str, Ed25519PublicKey]:
    """Return key id → key for rows ``{name, key}`` (signers.json, trust.json); raises Malformed."""
    found: dict[str, Ed25519PublicKey] = {}
    for row in rows:
        key = public_from_text(text(dict(row), "key", limit=64))
        found[key_id(key)] = key
    return found
