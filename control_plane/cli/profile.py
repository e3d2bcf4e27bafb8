"""Where the command keeps who you are: ``$INTERLOCK_HOME/profiles/NAME/`` (0700), files 0600.

`credentials.json` holds the address, the session and the person's id; `person.key` is the Ed25519 key with
which this person approves a resume. It is made here at enrolment and never leaves this folder.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from interlock.errors import Malformed, NotFound, Usage
from interlock.keyfile import read_ed25519, read_private, write_ed25519, write_private

DEFAULT_URL = "http://localhost:7070"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")


def home(environ: Mapping[str, str]) -> Path:
    """Return the folder of all profiles: ``$INTERLOCK_HOME``, else ``~/.config/interlock``."""
    found = environ.get("INTERLOCK_HOME")
    return Path(found) if found else Path.home() / ".config" / "interlock"


@dataclass(frozen=True)
class Profile:
    """One person at one control plane. A name is a plain file name; anything else is a Usage refusal."""

    folder: Path

    @classmethod
    def named(cls, name: str, environ: Mapping[str, str]) -> "Profile":
        """Return the profile `name`; raises Usage (``usage.profile``)."""
        if not _NAME.match(name):
            raise Usage("a profile's name holds letters, digits, dot, dash", code="profile")
        return cls(home(environ) / "profiles" / name)

    @property
    def key_path(self) -> Path:
        """Return the path of the person key."""
        return self.folder / "person.key"

    @property
    def _credentials(self) -> Path:
        return self.folder / "credentials.json"

    def prepare(self) -> None:
        """Make the folder, 0700."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder.chmod(0o700)

    def load(self) -> dict[str, Any]:
        """Return the stored credentials, empty when there are none.

        Raises Untrusted when others can read the file, Malformed when it is no JSON object.
        """
        if not self._credentials.exists():
            return {}
        try:
            found = json.loads(read_private(self._credentials))
        except ValueError:
            raise Malformed(f"{self._credentials} is not JSON", code="credentials",
                            next_step="remove it and sign in again") from None
        if not isinstance(found, dict):
            raise Malformed(f"{self._credentials} is not a JSON object", code="credentials")
        return found

    def save(self, value: Mapping[str, Any]) -> None:
        """Replace the credentials in one rename; never readable by others, not even for a moment."""
        self.prepare()
        fresh = self.folder / f".credentials-{secrets.token_hex(6)}"
        write_private(fresh, json.dumps(dict(value), indent=1).encode())
        os.replace(fresh, self._credentials)

    def forget_session(self) -> None:
        """Drop the session, keep address, name and key."""
        kept = {k: v for k, v in self.load().items() if k != "session"}
        if kept:
            self.save(kept)

    def person_key(self) -> Ed25519PrivateKey:
        """Return the person key; raises NotFound (``not_found.person_key``) or Untrusted."""
        if not self.key_path.exists():
            raise NotFound("this profile holds no person key", code="person_key",
                           next_step="use the profile with which you enrolled: --profile NAME")
        return read_ed25519(self.key_path)

    def own_key(self) -> Ed25519PrivateKey:
        """Return the person key, made now when there is none (a repeated enrolment keeps the first)."""
        self.prepare()
        if not self.key_path.exists():
            write_ed25519(self.key_path, Ed25519PrivateKey.generate())
        return read_ed25519(self.key_path)
