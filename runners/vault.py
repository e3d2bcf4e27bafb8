"""Keys of live attempts, in the broker's memory alone.

They come by the control socket, are asked for at each save and load, and go when the attempt ends, a stop covers it
or its lease is over. Nothing here writes, logs or prints a key. Forgetting overwrites what lies here; the copies that
Python made on the way (JSON text, the cipher's own) are the interpreter's to free, which is why the process takes
no core dump and lets nobody of its own uid look in (runners/inherited.py).
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from interlock.errors import Malformed, Unavailable
from interlock.sealed import KEY_BYTES


def missing_keys() -> Unavailable:
    """Return the refusal while keys have not come, or are gone again."""
    return Unavailable("the keys of this run are not here", code="keys",
                       next_step="they come a moment after the start, while the control plane answers; ask again")


class _Held:
    def __init__(self, run_key: bytes | None, files: Mapping[str, Mapping[str, bytes]]) -> None:
        self.run_key = None if run_key is None else bytearray(run_key)
        self.files = {v: {n: bytearray(k) for n, k in found.items()} for v, found in files.items()}

    def wipe(self) -> None:
        every = [k for found in self.files.values() for k in found.values()]
        for key in [*every, *([] if self.run_key is None else [self.run_key])]:
            key[:] = bytes(len(key))
        self.run_key, self.files = None, {}


class Vault:
    """Keys by attempt. The broker's one loop puts, asks and forgets; workers get copies."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], _Held] = {}

    def put(self, run: str, attempt: int, run_key: bytes | None, files: Mapping[str, Mapping[str, bytes]]) -> None:
        """Keep the keys of an attempt in place of those from before. Args: `files` version → file → key."""
        self.forget(run, attempt)
        self._held[run, attempt] = _Held(run_key, files)

    def run_key(self, run: str, attempt: int) -> bytes:
        """Return the run key; raises Unavailable (``unavailable.keys``) while it is not here."""
        held = self._held.get((run, attempt))
        if held is None or held.run_key is None:
            raise missing_keys()
        return bytes(held.run_key)

    def file_key(self, run: str, attempt: int, version: str, name: str) -> bytes:
        """Return the key of one file of a version that the plan names; raises Unavailable (``unavailable.keys``)."""
        held = self._held.get((run, attempt))
        if held is None or name not in held.files.get(version, {}):
            raise missing_keys()
        return bytes(held.files[version][name])

    def has_version(self, run: str, attempt: int, version: str) -> bool:
        """Return whether keys of files of that version are here."""
        held = self._held.get((run, attempt))
        return held is not None and bool(held.files.get(version))

    def held(self) -> list[tuple[str, int]]:
        """Return the attempts whose keys are here."""
        return list(self._held)

    def forget(self, run: str, attempt: int) -> None:
        """Overwrite and drop the keys of an attempt."""
        found = self._held.pop((run, attempt), None)
        if found is not None:
            found.wipe()


def read_keys(answer: Mapping[str, Any]) -> tuple[bytes | None, dict[str, dict[str, bytes]]]:
    """Return run key and file keys (version → file → key) of ``{run_key, files}`` in base64; raises Malformed."""
    files = answer.get("files")
    if not isinstance(files, dict) or not all(isinstance(f, dict) for f in files.values()):
        raise Malformed("the answer holds no file keys", code="keys")
    run_key = answer.get("run_key")
    return (
        None if run_key is None else key_of(run_key),
        {str(v): {str(name): key_of(key) for name, key in found.items()} for v, found in files.items()},
    )


def newest_of(answer: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (step, attempt) of the newest checkpoint of the run that the control plane knows, or None; raises
    Malformed."""
    found = answer.get("newest")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int for n in found):
        raise Malformed("the newest checkpoint is a step and an attempt", code="keys")
    return found[0], found[1]


def key_of(text: object) -> bytes:
    """Return the 32 bytes of a base64 key; raises Malformed (``malformed.keys``), which never shows it."""
    try:
        key = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != KEY_BYTES:
        raise Malformed(f"a key is {KEY_BYTES} bytes in base64", code="keys")
    return key
