"""The keys that this node believes: grant keys from the supervisor's trust list, bundle signers from that list
and from this host's own `signers.json`, which only local root writes. Nothing of this comes over the wire here.
"""

import json
from pathlib import Path

from interlock.canon import canonical
from interlock.durable import write_over
from interlock.errors import Malformed, Untrusted
from interlock.keyfile import read_private
from killswitch.trust import Keys, Trust, load
from policy.bundle import pinned
from runners.folders import Folders


class Pinned:
    """Reads the lists again when their files change."""

    def __init__(self, found: Folders) -> None:
        self._trust_file = found.supervisor / "trust.json"
        self._signers_file = found.node / "signers.json"
        self._shared = found.shared / "trust.json"
        self._seen: tuple[int, int] = (0, 0)
        self._trust: Trust | None = None

    def _current(self) -> Trust:
        try:
            info = self._trust_file.stat()
        except OSError:
            raise Untrusted("this node has no trust list", code="trust", next_step="join this node again") from None
        seen = (info.st_mtime_ns, info.st_ino)
        if self._trust is None or seen != self._seen:
            self._trust = load(self._trust_file)
            write_over(self._shared, self._trust_file.read_bytes(), 0o644)
            self._seen = seen
        if self._trust is None:
            raise Untrusted("this node has no trust list", code="trust", next_step="join this node again")
        return self._trust

    def grant_keys(self) -> Keys:
        """Return the grant keys in force; raises Untrusted without a trust list."""
        return self._current().grant_keys

    def signers(self) -> Keys:
        """Return the bundle signers pinned for this node, by either list."""
        rows = [{"name": n, "key": k} for n, k in self._current().signers]
        return pinned([*rows, *read_signers(self._signers_file)])


def read_signers(path: Path) -> list[dict[str, str]]:
    """Return the rows of the local list, none when there is none; raises Untrusted or Malformed."""
    if not path.exists():
        return []
    try:
        rows = json.loads(read_private(path))
    except ValueError:
        rows = None
    if not isinstance(rows, list) or not all(isinstance(r, dict) and set(r) == {"name", "key"} for r in rows):
        raise Malformed("signers.json is not a list of names and keys", code="signers")
    return rows


def pin_signer(found: Folders, public: Path) -> str:
    """Pin the signer in `public` ({name, key}) for this node, as local root; returns the name.

    Raises Malformed when the file is no public key of a signer.
    """
    try:
        row = json.loads(public.read_bytes())
    except (OSError, ValueError):
        raise Malformed(f"{public} is not a public key of a signer", code="signer",
                        next_step="use the .pub.json that interlock policy keygen wrote") from None
    if not isinstance(row, dict) or set(row) != {"name", "key"}:
        raise Malformed(f"{public} is not a public key of a signer", code="signer")
    pinned([row])
    path = found.node / "signers.json"
    rows = [r for r in read_signers(path) if r["key"] != row["key"]]
    write_over(path, canonical([*rows, {"name": str(row["name"]), "key": str(row["key"])}]), 0o600)
    return str(row["name"])
