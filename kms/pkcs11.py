"""The PKCS#11 provider: the versions of the KEK are keys of a token, which never leave it.

Rules, each with its reason:
1. One lock a process around the module. Threads with a session each break SoftHSM for good.
2. Keys are sensitive, not extractable and made by the token itself; one that is not is refused, whoever put it there.
3. A key is wrapped by AES-256-GCM *encryption* with the context as additional data: tokens refuse GCM as a wrap
   mechanism, and the others bind no context.
4. A token says ``GeneralError`` both for a tag that does not verify and for being broken. So a round trip with the
   same key is tried: if it works, the ciphertext was at fault; else the module is started anew, once.
5. A PIN that was refused is not shown a second time: tokens lock themselves after a few.
"""

import hashlib
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pkcs11
from pkcs11 import Attribute, GCMParams, KeyType, Mechanism, MechanismFlag, ObjectClass

from interlock.errors import Conflict, Denied, NotFound, Unavailable, Untrusted
from interlock.keyfile import read_private
from interlock.tier import Tier
from kms.assignment import TokenPlace
from kms.provider import NONCE_BYTES, PKCS11
from kms.ring import KeyRing, TagFailed

WAIT_S = 5.0
_LABEL = re.compile(r"interlock-kek/v([1-9][0-9]{0,8})")
_WANTED = {Attribute.SENSITIVE: True, Attribute.ALWAYS_SENSITIVE: True, Attribute.EXTRACTABLE: False,
           Attribute.NEVER_EXTRACTABLE: True, Attribute.LOCAL: True}
_TEMPLATE = {Attribute.SENSITIVE: True, Attribute.EXTRACTABLE: False, Attribute.PRIVATE: True,
             Attribute.MODIFIABLE: False}
_PIN = (pkcs11.PinIncorrect, pkcs11.PinLocked, pkcs11.PinExpired, pkcs11.PinInvalid, pkcs11.PinLenRange,
        pkcs11.UserPinNotInitialized)
_CIPHERTEXT = (pkcs11.GeneralError, pkcs11.EncryptedDataInvalid, pkcs11.EncryptedDataLenRange, pkcs11.DataInvalid,
               pkcs11.DataLenRange, pkcs11.FunctionFailed)
T = TypeVar("T")


class Module:
    """The one module of this process. `generation` counts its starts: a session of an older one is no session."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._from: tuple[Path, Path | None] | None = None
        self._library: Any = None
        self.generation = 0

    @contextmanager
    def held(self, place: TokenPlace) -> Iterator[Any]:
        """Yield the library while nobody else of this process is in it.

        Raises Unavailable (not had in 5 s, or it cannot be loaded), Conflict (another one is loaded) or Untrusted
        (others may write the module file).
        """
        if not self._lock.acquire(timeout=WAIT_S):
            raise away("busy")
        try:
            if self._library is None:
                self._load(place)
            if self._from != (place.module, place.conf):
                raise Conflict("this process has loaded another PKCS#11 module", code="kms_module",
                               next_step="one module and one conf file a process")
            yield self._library
        finally:
            self._lock.release()

    def restart(self) -> None:
        """Start the module anew: after its token was away, nothing else brings it back. Called while it is held."""
        self.generation += 1
        with suppress(pkcs11.PKCS11Error):
            self._library.reinitialize()

    def _load(self, place: TokenPlace) -> None:
        _require_module(place.module)
        if place.conf is not None:
            os.environ["SOFTHSM2_CONF"] = str(place.conf)  # SoftHSM reads it when it starts, and nowhere else
        try:
            self._library = pkcs11.lib(str(place.module))
        except (pkcs11.PKCS11Error, OSError, RuntimeError) as error:
            raise away(type(error).__name__) from None
        self._from = (place.module, place.conf)


MODULE = Module()


class Token:
    """The `Safe` of the PKCS#11 provider. Logs in at the first use, not before: a token that is away keeps no
    control plane from starting."""

    def __init__(self, place: TokenPlace, module: Module = MODULE) -> None:
        self._place, self._module = place, module
        self._session: Any = None
        self._generation = -1
        self._keys: dict[int, Any] = {}
        self._refused_pin = b""

    def present(self) -> frozenset[int]:
        """Return the versions that the token holds."""
        return self._ask(lambda: frozenset(
            int(m[1]) for key in self._found() if (m := _LABEL.fullmatch(str(key.label)))))

    def make(self, version: int) -> None:
        """Let the token make a key. Raises Conflict when its label is taken. Asked once only: a second try might
        leave two keys under one label."""
        def work() -> None:
            if self._found(_label(version)):
                raise Conflict("the token has a key under that label", code="key_exists",
                               next_step="rotate again: the next number is free")
            self._session.generate_key(
                KeyType.AES, 256, label=_label(version), store=True, template=dict(_TEMPLATE),
                capabilities=MechanismFlag.ENCRYPT | MechanismFlag.DECRYPT)

        self._ask(work, again=False)

    def seal(self, version: int, nonce: bytes, aad: bytes, plain: bytes) -> bytes:
        """Return ciphertext and tag."""
        return self._ask(lambda: _sealed(self._key(version), nonce, aad, plain))

    def open(self, version: int, nonce: bytes, aad: bytes, sealed: bytes) -> bytes:
        """Return the plaintext, or raise TagFailed when the token works and this ciphertext does not."""
        def work() -> bytes:
            key = self._key(version)
            try:
                return _opened(key, nonce, aad, sealed)
            except _CIPHERTEXT:
                _known_good(key)
                raise TagFailed from None

        return self._ask(work)

    def close(self) -> None:
        """Log out."""
        with self._module.held(self._place):
            self._drop()

    # --- the session ------------------------------------------------------------------------------
    def _ask(self, work: Callable[[], T], *, again: bool = True) -> T:
        """Do `work` with a session, with the module held; after a fault start the module anew and try once more."""
        with self._module.held(self._place) as library:
            try:
                return self._done(library, work)
            except (Unavailable, NotFound):
                if not again:
                    raise
            self._drop()
            self._module.restart()
            return self._done(library, work)

    def _done(self, library: Any, work: Callable[[], T]) -> T:
        try:
            self._log_in(library)
            return work()
        except _PIN as error:
            raise _denied(type(error).__name__) from None
        except pkcs11.PKCS11Error as error:
            raise away(type(error).__name__) from None

    def _log_in(self, library: Any) -> None:
        if self._session is not None and self._generation == self._module.generation:
            return
        self._session, self._keys = None, {}  # of a module that was started anew since: its handles mean nothing
        pin = read_private(self._place.pin_file, limit=256).strip()
        if self._seen(pin) == self._refused_pin:
            raise _denied("PinIncorrect")
        token = library.get_token(token_label=self._place.token)
        try:
            self._session = token.open(user_pin=pin.decode("utf-8", "replace"), rw=True)
        except _PIN:
            self._refused_pin = self._seen(pin)
            raise
        self._generation, self._refused_pin = self._module.generation, b""

    def _seen(self, pin: bytes) -> bytes:
        return hashlib.sha256(pin).digest()

    def _drop(self) -> None:
        if self._session is not None and self._generation == self._module.generation:
            with suppress(pkcs11.PKCS11Error):
                self._session.close()
        self._session, self._keys = None, {}

    def _found(self, label: str = "") -> list[Any]:
        """Return the secret keys (under that label). As a list: a search that is left half-way ends at some later
        time, in any thread and without the lock."""
        wanted = {Attribute.CLASS: ObjectClass.SECRET_KEY, **({Attribute.LABEL: label} if label else {})}
        return list(self._session.get_objects(wanted))

    def _key(self, version: int) -> Any:
        if version not in self._keys:
            found = self._found(_label(version))
            if not found:
                raise NotFound("the token holds no such version of the key", code="kek",
                               next_step="restore the token from its backup")
            if len(found) > 1:
                raise Untrusted("the token holds two keys under one label", code="kek_label",
                                next_step="remove the one that is not yours")
            key = found[0]
            wrong = [a.name for a, wanted in _WANTED.items() if key[a] is not wanted]
            if wrong:
                raise Untrusted("a key of the token could be read out, or was brought in", code="kek_attributes",
                                next_step="make a new version: rotate", details={"attributes": wrong})
            self._keys[version] = key
        return self._keys[version]


def open_token(place: TokenPlace, state_file: Path) -> KeyRing:
    """Return the provider over a token; `state_file` lies with the control plane's other keys. Asks nothing yet."""
    return KeyRing(PKCS11, Token(place), state_file, frozenset(Tier))


def away(reason: str) -> Unavailable:
    """Return the refusal of a token that does not answer; worth asking again."""
    return Unavailable("the PKCS#11 token does not answer", code="provider", details={"reason": reason},
                       next_step="look at the token and kms.pkcs11 in settings.json; it is asked again by itself")


def _denied(reason: str) -> Denied:
    return Denied("the PKCS#11 token refuses the PIN", code="token", details={"reason": reason},
                  next_step="put the right PIN into the pin_file; the one that was refused is not tried again")


def _require_module(path: Path) -> None:
    """Refuse to load code that others may change. Raises Unavailable or Untrusted."""
    try:
        info = path.stat()
    except OSError as error:
        raise away(error.strerror or "module") from None
    if info.st_uid not in (0, os.geteuid()) or stat.S_IMODE(info.st_mode) & 0o022:
        raise Untrusted(f"others can write {path}", code="kms_module", next_step=f"chmod go-w {path}")


def _label(version: int) -> str:
    return f"interlock-kek/v{version}"


def _sealed(key: Any, nonce: bytes, aad: bytes, plain: bytes) -> bytes:
    return bytes(key.encrypt(plain, mechanism=Mechanism.AES_GCM, mechanism_param=GCMParams(nonce, aad, 128)))


def _opened(key: Any, nonce: bytes, aad: bytes, sealed: bytes) -> bytes:
    return bytes(key.decrypt(sealed, mechanism=Mechanism.AES_GCM, mechanism_param=GCMParams(nonce, aad, 128)))


def _known_good(key: Any) -> None:
    """Return when the token still opens what it seals; raises its error when it does not."""
    nonce, plain = secrets.token_bytes(NONCE_BYTES), secrets.token_bytes(32)
    if _opened(key, nonce, b"known good", _sealed(key, nonce, b"known good", plain)) != plain:
        raise pkcs11.DeviceError("a round trip failed")
