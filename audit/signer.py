"""The signer of tree heads: it remembers the last head it signed and refuses a fork.

The memory is a file beside the key, outside the database: a restored or exchanged database cannot obtain
a second head for a history that another head denies. It is written before the signature is given away.
"""

from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from audit.merkle import verify_consistency
from audit.treehead import TreeHead, note_key, open_head, sign_note
from interlock.durable import write_over
from interlock.errors import Conflict, Refusal, Unavailable, Untrusted

MANIFEST = "interlock/export/v1"
Proof = Callable[[int, int], list[bytes]]


def _fork(why: str) -> Conflict:
    return Conflict(
        f"this database contradicts the last signed tree head: {why}", code="fork",
        next_step="docs/runbooks/restore.md: restore the newest database; nothing is signed until it fits",
    )


class HeadSigner:
    """Signs heads of one log. `memory` is the file with the last signed head; its folder exists."""

    def __init__(self, key: Ed25519PrivateKey, origin: str, memory: Path) -> None:
        self.origin = origin
        self.public = note_key(origin, key.public_key())
        self._key, self._memory = key, memory

    def last(self) -> TreeHead | None:
        """Return the last head this signer signed, None before the first; raises Conflict, Unavailable."""
        try:
            note = self._memory.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(f"cannot read {self._memory}: {error.strerror}", code="last_head",
                              next_step="check the file beside the head key") from None
        try:
            return open_head(note, self.origin, [self.public])
        except Refusal:
            raise Conflict(f"{self._memory} is not a tree head of this key", code="last_head",
                           next_step="restore the file; it guards against a forked log") from None

    def check(self, size: int, root: bytes, proof: Proof) -> None:
        """Return when (size, root) continues the last signed head; raises Conflict (``conflict.fork``).

        `proof(old, new)` gives the consistency proof from the stored tree.
        """
        last = self.last()
        if last is None or last.size == 0:
            return
        if size < last.size:
            raise _fork(f"it holds {size} records, {last.size} were signed")
        try:
            verify_consistency(last.size, size, last.root, root, proof(last.size, size))
        except Untrusted as error:
            raise _fork(error.message) from None

    def sign(self, size: int, root: bytes, proof: Proof) -> str:
        """Return the signed head after checking it and noting it down; raises Conflict or Unavailable."""
        self.check(size, root, proof)
        note = sign_note(TreeHead(self.origin, size, root).text(), self.origin, self._key)
        self._remember(note.encode())
        return note

    def sign_manifest(self, digest: str) -> str:
        """Return the note over the digest of an export's manifest; its first line is no origin of a log."""
        return sign_note(f"{MANIFEST}\n{self.origin}\n{digest}\n", self.origin, self._key)

    def _remember(self, note: bytes) -> None:
        try:
            write_over(self._memory, note)
        except OSError as error:
            raise Unavailable(f"cannot note the tree head down: {error.strerror}", code="last_head",
                              next_step="free space beside the head key") from None
