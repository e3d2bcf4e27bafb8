"""The local provider: each version of the KEK is a file of 32 bytes, 0600, in a folder that is 0700.

It is as safe as the disk and the owner's account are. So it never wraps for tier critical, and for tier high only
where the settings say so (kms/assignment.py).
"""

import re
import secrets
import stat
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from interlock.errors import Malformed, NotFound, Unavailable, Untrusted
from interlock.keyfile import read_private, write_private
from interlock.tier import Tier
from kms.provider import KEY_BYTES, LOCAL
from kms.ring import KeyRing, TagFailed

_NAME = re.compile(r"v([1-9][0-9]{0,8})\.key")


class KeyFolder:
    """The `Safe` of the local provider. Files and folder are looked at anew for each use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def present(self) -> frozenset[int]:
        """Return the versions whose file is there. Raises Unavailable or Untrusted (the folder)."""
        self._require_private()
        return frozenset(int(m[1]) for p in self._folder.iterdir() if (m := _NAME.fullmatch(p.name)))

    def make(self, version: int) -> None:
        """Write a fresh key file; raises Conflict when the name is taken, Unavailable when the disk refuses."""
        self._require_private()
        try:
            write_private(self._file(version), secrets.token_bytes(KEY_BYTES))
        except OSError as error:
            raise Unavailable(f"cannot write a key file: {error.strerror}", code="provider",
                              next_step="check the disk") from None

    def seal(self, version: int, nonce: bytes, aad: bytes, plain: bytes) -> bytes:
        """Return ciphertext and tag."""
        return self._cipher(version).encrypt(nonce, plain, aad)

    def open(self, version: int, nonce: bytes, aad: bytes, sealed: bytes) -> bytes:
        """Return the plaintext, or raise TagFailed."""
        try:
            return self._cipher(version).decrypt(nonce, sealed, aad)
        except InvalidTag:
            raise TagFailed from None

    def _cipher(self, version: int) -> AESGCM:
        self._require_private()
        path = self._file(version)
        if not path.exists():
            raise NotFound(f"version {version} of the key has no file", code="kek",
                           next_step=f"restore {path} from a backup")
        raw = read_private(path)
        if len(raw) != KEY_BYTES:
            raise Malformed(f"{path} is not a key of {KEY_BYTES} bytes", code="key_file",
                            next_step="restore it from the backup of the keys")
        return AESGCM(raw)

    def _file(self, version: int) -> Path:
        return self._folder / f"v{version}.key"

    def _require_private(self) -> None:
        try:
            info = self._folder.lstat()
        except OSError as error:
            raise Unavailable(f"cannot look at {self._folder}: {error.strerror}", code="provider",
                              next_step="restore it from the backup of the keys") from None
        if not stat.S_ISDIR(info.st_mode) or info.st_mode & 0o077:
            raise Untrusted(f"others can look into {self._folder}", code="key_folder_mode",
                            next_step=f"chmod 700 {self._folder}")


def open_folder(folder: Path, tiers: frozenset[Tier]) -> KeyRing:
    """Return the provider over `folder` (made 0700 when it is missing) for `tiers`; critical is struck out.

    Raises Unavailable when the folder cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"cannot make {folder}: {error.strerror}", code="provider",
                          next_step="check the folder above and its owner") from None
    return KeyRing(LOCAL, KeyFolder(folder), folder / "state.json", tiers - {Tier.CRITICAL})
