"""A KEK in versions: the rules that hold for every provider, asked before the place that holds the key is.

The state (which version is newest, which is the least that counts, whether the KEK is disabled) lies in a private
file beside the control plane's other keys, not in a token: a token forgets nothing that we tell it, but not every
token can refuse, and whoever has its PIN could change it there. The file is read anew at each use, so that
`disable` by another process holds at once. A number is never given to a second key, also not after the file came
back from an older backup.
"""

import fcntl
import json
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from interlock.call import number, text
from interlock.durable import write_over
from interlock.errors import Conflict, Denied, Malformed, NotFound, Refusal, Unavailable
from interlock.keyfile import read_private
from interlock.tier import Tier
from kms.provider import (
    KEY_BYTES,
    NONCE_BYTES,
    Context,
    Health,
    Versions,
    Wrapped,
    bound,
    corrupt,
    pack,
    unpack,
)

_TRIAL = b"interlock/kek-trial/v1"


class TagFailed(Exception):
    """Raised by a `Safe` when a ciphertext does not verify, and it is the ciphertext's fault."""


class Safe(Protocol):
    """Where the versions of a KEK lie: files, or the objects of a token."""

    def present(self) -> frozenset[int]:
        """Return the versions that exist. Raises Unavailable, Untrusted or Denied."""

    def make(self, version: int) -> None:
        """Make a fresh key under a number that is free, durably."""

    def seal(self, version: int, nonce: bytes, aad: bytes, plain: bytes) -> bytes:
        """Return ciphertext and tag (AES-256-GCM). Raises NotFound when there is no such version."""

    def open(self, version: int, nonce: bytes, aad: bytes, sealed: bytes) -> bytes:
        """Return the plaintext; raises TagFailed, or NotFound when there is no such version."""


@dataclass(frozen=True)
class State:
    """The durable state of a KEK. `kek` is its random name: a KEK that was made anew is another one."""

    kek: str
    newest: int = 0
    minimum: int = 1
    disabled: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object of the state file."""
        return {"kek": self.kek, "newest": self.newest, "minimum": self.minimum, "disabled": self.disabled}


class KeyRing:
    """A `Provider` over one `Safe`.

    Args: `name` of the provider; `state_file` private, in an existing folder; `tiers` whose run keys it wraps.
    Safe for threads and for several processes on one host.
    """

    def __init__(self, name: str, safe: Safe, state_file: Path, tiers: frozenset[Tier]) -> None:
        self._name, self._safe, self._file, self._tiers = name, safe, state_file, tiers
        self._lock = threading.Lock()
        self._expected = False

    @property
    def name(self) -> str:
        """Return the provider's name."""
        return self._name

    # --- run keys ---------------------------------------------------------------------------------
    def generate(self, context: Context) -> tuple[bytes, Wrapped]:
        """See `Provider.generate`."""
        self._admit(context)
        state = self._usable(self.prepare())
        key = secrets.token_bytes(KEY_BYTES)
        return key, self._wrap(state, state.newest, key, context)

    def unwrap(self, wrapped: Wrapped, context: Context) -> bytes:
        """See `Provider.unwrap`."""
        self._admit(context)
        state = self._usable(self._read())
        if (wrapped.provider, wrapped.kek) != (self._name, state.kek):
            raise _unknown()
        _in_range(state, wrapped.version)
        nonce, sealed = unpack(wrapped.data, context)
        try:
            key = self._safe.open(wrapped.version, nonce, bound(context, state.kek, wrapped.version), sealed)
        except TagFailed:
            raise corrupt() from None
        if len(key) != KEY_BYTES:
            raise corrupt()
        return key

    def rewrap(self, wrapped: Wrapped, context: Context, to_version: int | None = None) -> Wrapped:
        """See `Provider.rewrap`. The key passes through this process's memory: no GCM wrap mechanism of a token
        binds a context."""
        key, state = self.unwrap(wrapped, context), self._usable(self._read())
        version = state.newest if to_version is None else to_version
        _in_range(state, version)
        return self._wrap(state, version, key, context)

    def _wrap(self, state: State, version: int, key: bytes, context: Context) -> Wrapped:
        nonce = secrets.token_bytes(NONCE_BYTES)  # random, ours alone: one use a run key, far below 2^32 a version
        sealed = self._safe.seal(version, nonce, bound(context, state.kek, version), key)
        return Wrapped(self._name, state.kek, version, pack(context, nonce, sealed))

    def _admit(self, context: Context) -> None:
        if context.tier not in self._tiers:
            raise Denied(f"the {self._name} provider wraps no run key of tier {context.tier.value}", code="provider",
                         next_step="set up kms.pkcs11 (docs/formats/key-hierarchy.md)")

    # --- versions ---------------------------------------------------------------------------------
    def expect(self) -> None:
        """Say that this KEK has wrapped keys before: when it is gone, no other is made in its place."""
        self._expected = True

    def prepare(self) -> State:
        """Make the first version when there is none yet, and return the state. Raises Conflict
        (``conflict.kek_state``) when there was one."""
        if self._file.exists():
            state = self._read()
            if state.newest:
                return state
        with self._alone():
            if not self._file.exists():
                if self._expected or self._safe.present():
                    raise Conflict("there are keys, but the file that says which of them count is gone",
                                   code="kek_state", next_step=f"restore {self._file} from a backup")
                self._write(State(f"kek-{secrets.token_hex(8)}"))
            state = self._read()
            return state if state.newest else self._grown(state)

    def rotate(self) -> int:
        """See `Provider.rotate`."""
        self.prepare()
        with self._alone():
            return self._grown(self._usable(self._read())).newest

    def _grown(self, state: State) -> State:
        """Make the next version and try it before it counts: one that does not work must not become the newest."""
        version = max(self._safe.present() | {state.newest}) + 1
        self._safe.make(version)
        self._try(version)
        grown = replace(state, newest=version)
        self._write(grown)
        return grown

    def _try(self, version: int) -> None:
        nonce, plain = secrets.token_bytes(NONCE_BYTES), secrets.token_bytes(KEY_BYTES)
        try:
            back = self._safe.open(version, nonce, _TRIAL, self._safe.seal(version, nonce, _TRIAL, plain))
        except TagFailed:
            back = b""
        if back != plain:
            raise Unavailable("a new version of the key does not open what it sealed", code="provider",
                              next_step="the version before stays in use; look at the token")

    def set_minimum(self, version: int) -> None:
        """See `Provider.set_minimum`."""
        with self._alone():
            state = self._read()
            if not 1 <= version <= state.newest:
                raise Denied(f"the minimum is a version from 1 to {state.newest}", code="kek_version",
                             next_step="rotate first, then rewrap what is below the new minimum")
            self._write(replace(state, minimum=version))

    def disable(self) -> None:
        """See `Provider.disable`."""
        self._set_disabled(True)

    def enable(self) -> None:
        """See `Provider.enable`."""
        self._set_disabled(False)

    def _set_disabled(self, value: bool) -> None:
        with self._alone():
            self._write(replace(self._read(), disabled=value))

    def versions(self) -> Versions:
        """See `Provider.versions`."""
        state = self._read()
        present = tuple(sorted(self._safe.present()))
        return Versions(state.kek, state.newest, state.minimum, state.disabled, present)

    def health(self) -> Health:
        """See `Provider.health`."""
        try:
            self._try(self._usable(self._read()).newest)
        except Refusal as refusal:
            return Health(False, refusal.code)
        return Health(True)

    # --- the state file ---------------------------------------------------------------------------
    def _usable(self, state: State) -> State:
        if state.disabled:
            raise Denied("the key-encryption key is disabled", code="kek_disabled",
                         next_step="enable it, or restore what it wrapped under another")
        return state

    def _read(self) -> State:
        if not self._file.exists():
            raise _unknown()
        try:
            value = json.loads(read_private(self._file))
            state = State(text(value, "kek", limit=64), number(value, "newest"), number(value, "minimum", low=1),
                          value["disabled"])
        except (ValueError, KeyError, TypeError, AttributeError, Malformed):
            raise Malformed(f"{self._file} cannot be read", code="kek_state",
                            next_step="restore it from a backup") from None
        if not isinstance(state.disabled, bool):
            raise Malformed(f"{self._file} cannot be read", code="kek_state", next_step="restore it from a backup")
        return state

    def _write(self, state: State) -> None:
        try:
            write_over(self._file, json.dumps(state.as_json(), indent=1).encode() + b"\n")
        except OSError as error:
            raise Unavailable(f"cannot write {self._file}: {error.strerror}", code="provider",
                              next_step="check the disk") from None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads and processes from changing the state meanwhile."""
        with self._lock:
            try:
                fd = os.open(self._file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                             0o600)
            except OSError as error:
                raise Unavailable(f"cannot lock {self._file}: {error.strerror}", code="provider",
                                  next_step="check the folder and its owner") from None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield
            finally:
                os.close(fd)


def _unknown() -> NotFound:
    return NotFound("no such key-encryption key here", code="kek",
                    next_step="restore the folder keys/run-kek, or the token, from a backup")


def _in_range(state: State, version: int) -> None:
    """Refuse a version that does not count. Raises Denied (``denied.kek_version``)."""
    if not state.minimum <= version <= state.newest:
        raise Denied(f"version {version} of the key is not among those in use", code="kek_version",
                     next_step=f"in use are {state.minimum} to {state.newest}; rewrap before you raise the minimum")
