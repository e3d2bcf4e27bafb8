"""The manifest of a checkpoint: what its files are, under a MAC of the run key. Format: docs/formats/sealed.md.

The digest of the body names a version everywhere. A reader opens only what a verified manifest lists.
"""

import base64
import binascii
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from interlock import canon
from interlock.errors import Malformed, Untrusted
from interlock.sealed import KEY_BYTES, MAX_WRAPPED

FORMAT: Final = "interlock/manifest/v1"
STATE, WEIGHTS = "state", "weights"
KINDS: Final = (STATE, WEIGHTS)
MAX_FILES: Final = 128
MAX_ASSETS: Final = 64
MAX_WEIGHTS_FILE: Final = 100_000_000
MAX_BYTES: Final = 256 << 10

_MAX_INT = 2**53 - 1
_FILE = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\.sealed")
_ASSET = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_FIELDS = frozenset({"format", "run", "step", "attempt", "kind", "parent", "items", "assets", "files"})
_FILE_FIELDS = frozenset({"name", "size", "digest", "wrapped"})


def _bad(why: str) -> Malformed:
    return Malformed(f"a manifest cannot be read: {why}", code="manifest")


def file_name(text: object) -> str:
    """Return `text` when it may name a sealed file of a checkpoint; raises Malformed (`malformed.file_name`)."""
    if not isinstance(text, str) or _FILE.fullmatch(text) is None:
        raise Malformed(
            "a sealed file's name is 1 to 64 of a-z, 0-9, '.', '_', '-' and then '.sealed'", code="file_name",
        )
    return text


def asset_name(text: object) -> str:
    """Return `text` when it may name an asset such as config.json; raises Malformed (`malformed.asset_name`)."""
    if not isinstance(text, str) or _ASSET.fullmatch(text) is None:
        raise Malformed("an asset's name is 1 to 64 of a-z, 0-9, '.', '_' and '-'", code="asset_name")
    return text


def _number(value: object, what: str, least: int) -> int:
    if type(value) is not int or not least <= value <= _MAX_INT:
        raise _bad(f"{what} is a whole number from {least}")
    return value


@dataclass(frozen=True)
class FileRow:
    """One file: `size` in bytes, `digest` of all its bytes as they lie in the store, `wrapped` its wrapped key."""

    name: str
    size: int
    digest: str
    wrapped: bytes

    def __post_init__(self) -> None:
        file_name(self.name)
        _number(self.size, "a file's size", 1)
        if not isinstance(self.digest, str) or _DIGEST.fullmatch(self.digest) is None:
            raise _bad("a file's digest is sha256: and 64 hex digits")
        if not isinstance(self.wrapped, bytes) or not 1 <= len(self.wrapped) <= MAX_WRAPPED:
            raise _bad("a file has a wrapped key")


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint. Making one checks every field; raises Malformed.

    Args: `step` from 0, `attempt` from 1; `kind` `state` or `weights`; `parent` digest of the manifest that the
    run loaded or saved before, or None; `items` how many items its files hold together; `assets` asset name →
    the file that holds an item of that name with an empty offset (kind `weights` only); `files` 1 to 128.
    """

    run: str
    step: int
    attempt: int
    kind: str
    parent: str | None
    items: int
    assets: Mapping[str, str]
    files: tuple[FileRow, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.run, str) or not self.run:
            raise _bad("it names no run")
        _number(self.step, "a step", 0)
        _number(self.attempt, "an attempt", 1)
        _number(self.items, "the count of items", 0)
        if self.kind not in KINDS:
            raise _bad("its kind is state or weights")
        if self.parent is not None and (not isinstance(self.parent, str) or _DIGEST.fullmatch(self.parent) is None):
            raise _bad("its parent is a digest or null")
        self._check_files()
        self._check_assets()

    def _check_files(self) -> None:
        if not 1 <= len(self.files) <= MAX_FILES:
            raise _bad(f"it lists 1 to {MAX_FILES} files")
        if len({f.name.casefold() for f in self.files}) != len(self.files):
            raise _bad("two files have one name")
        if self.kind == WEIGHTS and any(f.size > MAX_WEIGHTS_FILE for f in self.files):
            raise _bad(f"a file of weights is larger than {MAX_WEIGHTS_FILE} bytes")

    def _check_assets(self) -> None:
        if not isinstance(self.assets, Mapping) or len(self.assets) > MAX_ASSETS:
            raise _bad(f"it has at most {MAX_ASSETS} assets")
        if self.assets and self.kind != WEIGHTS:
            raise _bad("only weights have assets")
        names = {f.name for f in self.files}
        for asset, name in self.assets.items():
            if asset_name(asset) and name not in names:
                raise _bad("an asset lies in a file that is not listed")

    def body(self) -> dict[str, Any]:
        """Return the JSON value that is named by its digest and covered by the MAC; files ordered by name."""
        files = [
            {"name": f.name, "size": f.size, "digest": f.digest, "wrapped": base64.b64encode(f.wrapped).decode()}
            for f in sorted(self.files, key=lambda f: f.name)
        ]
        return {
            "format": FORMAT, "run": self.run, "step": self.step, "attempt": self.attempt, "kind": self.kind,
            "parent": self.parent, "items": self.items, "assets": dict(self.assets), "files": files,
        }

    def digest(self) -> str:
        """Return ``sha256:<hex>`` of the canonical body: the name of this version."""
        return canon.digest(self.body())

    def seal(self, run_key: bytes) -> bytes:
        """Return the bytes to store: canonical ``{"body", "mac"}``; raises Malformed."""
        body = self.body()
        data = canon.canonical({"body": body, "mac": base64.b64encode(_mac(run_key, body)).decode()})
        if len(data) > MAX_BYTES:
            raise _bad(f"it is larger than {MAX_BYTES} bytes")
        return data


def _mac(run_key: bytes, body: object) -> bytes:
    if len(run_key) != KEY_BYTES:
        raise Malformed("a key is 32 bytes", code="key")
    key = HKDF(SHA256(), KEY_BYTES, None, FORMAT.encode()).derive(run_key)
    return hmac.digest(key, canon.canonical(body), "sha256")


def _open(data: bytes) -> tuple[Any, bytes]:
    """Return body and MAC of stored bytes, neither of them trusted; raises Malformed."""
    try:
        value = canon.parse(data, limit=MAX_BYTES)
    except Malformed as error:
        raise _bad(error.message) from None
    if not isinstance(value, dict) or set(value) != {"body", "mac"} or not isinstance(value["mac"], str):
        raise _bad("it is no body with a mac")
    return value["body"], _unbase64(value["mac"])


def _unbase64(text: object) -> bytes:
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        pass
    raise _bad("bytes are not base64")


def _from_body(body: Any) -> Manifest:
    if not isinstance(body, dict) or set(body) != _FIELDS or body["format"] != FORMAT:
        raise _bad(f"its body has other fields than {FORMAT}")
    rows, assets = body["files"], body["assets"]
    if not isinstance(rows, list) or not all(isinstance(r, dict) and set(r) == _FILE_FIELDS for r in rows):
        raise _bad("its list of files has other fields")
    files = tuple(FileRow(r["name"], r["size"], r["digest"], _unbase64(r["wrapped"])) for r in rows)
    found = Manifest(
        body["run"], body["step"], body["attempt"], body["kind"], body["parent"], body["items"], assets, files,
    )
    if found.body() != body:  # files in another order, or base64 with loose bits, would be a second digest
        raise _bad("it is not in the one form that a writer gives it")
    return found


def read(data: bytes) -> Manifest:
    """Parse a stored manifest WITHOUT trusting it: its MAC is not looked at. Raises Malformed."""
    return _from_body(_open(data)[0])


def verify(data: bytes, run_key: bytes) -> Manifest:
    """Return the manifest when its MAC is by `run_key`; raises Untrusted (`untrusted.manifest`), Malformed."""
    body, mac = _open(data)
    if not hmac.compare_digest(mac, _mac(run_key, body)):
        raise Untrusted("a manifest was not written by the owner of this run's key", code="manifest",
                        next_step="load an older step; somebody altered the store")
    return _from_body(body)


def verify_digest(data: bytes, digest: str) -> Manifest:
    """Return the manifest when its body has that digest; raises Untrusted (`untrusted.digest`), Malformed.

    For a reader who has the digest from a registered version and not the run key.
    """
    body, _ = _open(data)
    if not hmac.compare_digest(canon.digest(body), digest):
        raise Untrusted("a manifest is not the one that was registered", code="digest",
                        next_step="restore the checkpoint in the broker's store; somebody altered it")
    return _from_body(body)
