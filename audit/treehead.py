"""The tree head: origin, size and root in a C2SP signed note under an Ed25519 key.

    interlock/demo
    42
    CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=

    — interlock/demo x08go/ZJkuBS9UG…

Rules
  1. A note is UTF-8 without control characters but newline; its text ends in a newline; the LAST blank line
     separates text from signatures; each signature line is ``— name base64`` and ends in a newline.
  2. Form is checked before any signature is looked at; at most 100 signatures.
  3. Unknown keys are ignored. A bad signature of a known key rejects the whole note.
  4. A key is known by name AND id; the id selects, it never decides whether to verify.
Sources: C2SP signed-note, tlog-checkpoint (there the tree head is called checkpoint). Page:
docs/formats/tree-head.md.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from audit.merkle import MAX_SIZE
from interlock.errors import Malformed, Untrusted
from interlock.signed import public_bytes

ED25519 = 1
MAX_SIGNATURES = 100
MAX_NOTE = 1 << 16
_SIZE = re.compile(r"^(0|[1-9][0-9]{0,19})$")


@dataclass(frozen=True)
class NoteKey:
    """A pinned key of notes: its name, its 4-byte id and the public key."""

    name: str
    id: bytes
    public: Ed25519PublicKey

    def vkey(self) -> str:
        """Return ``name+hex id+base64(type | public key)``, the form that people pin."""
        raw = bytes([ED25519]) + public_bytes(self.public)
        return f"{self.name}+{self.id.hex()}+{base64.b64encode(raw).decode()}"


@dataclass(frozen=True)
class TreeHead:
    """The body of a tree head; `root` has 32 bytes."""

    origin: str
    size: int
    root: bytes

    def text(self) -> str:
        """Return the text that gets signed."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


def _name(name: str) -> str:
    if not name or "+" in name or any(c.isspace() or ord(c) < 0x20 for c in name):
        raise Malformed("the name of a note key is empty or holds a space or a plus", code="vkey")
    return name


def _decode(text: str, code: str) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Malformed("not base64", code=code) from None
    if base64.b64encode(raw).decode() != text:
        raise Malformed("base64 with loose end bits", code=code)
    return raw


def _id(name: str, raw: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + bytes([ED25519]) + raw).digest()[:4]


def note_key(name: str, public: Ed25519PublicKey) -> NoteKey:
    """Return the note key of that name; raises Malformed."""
    return NoteKey(_name(name), _id(name, public_bytes(public)), public)


def parse_vkey(text: str) -> NoteKey:
    """Parse a vkey line (Ed25519 only); raises Malformed (``malformed.vkey``)."""
    parts = text.strip().split("+", 2)
    if len(parts) != 3 or not re.fullmatch(r"[0-9a-f]{8}", parts[1]):
        raise Malformed("a vkey is name+id+key", code="vkey")
    raw = _decode(parts[2], "vkey")
    if len(raw) != 33 or raw[0] != ED25519:
        raise Malformed("a vkey of an unknown key type", code="vkey", next_step="use an Ed25519 vkey (type 1)")
    key = note_key(parts[0], Ed25519PublicKey.from_public_bytes(raw[1:]))
    if key.id.hex() != parts[1]:
        raise Malformed("the id of a vkey does not fit its key", code="vkey")
    return key


def sign_note(text: str, name: str, key: Ed25519PrivateKey) -> str:
    """Return the note: `text`, a blank line and the signature of `key` under `name`; raises Malformed."""
    _check_form(text)
    signer = note_key(name, key.public_key())
    blob = base64.b64encode(signer.id + key.sign(text.encode())).decode()
    return f"{text}\n— {signer.name} {blob}\n"


def _check_form(text: str) -> None:
    if not text.endswith("\n") or any(ord(c) < 0x20 and c != "\n" for c in text):
        raise Malformed("a note holds a control character or does not end in a newline", code="note")


def _split(note: str) -> tuple[str, list[tuple[str, bytes]]]:
    _check_form(note)
    at = note.rfind("\n\n")
    if at < 0:
        raise Malformed("a note has no blank line before its signatures", code="note")
    lines = note[at + 2 :].split("\n")[:-1]
    if not 0 < len(lines) <= MAX_SIGNATURES:
        raise Malformed(f"a note carries 1 to {MAX_SIGNATURES} signatures", code="note")
    return note[: at + 1], [_signature(line) for line in lines]


def _signature(line: str) -> tuple[str, bytes]:
    dash, _, rest = line.partition(" ")
    name, _, blob = rest.partition(" ")
    raw = _decode(blob, "note")
    if dash != "—" or len(raw) < 5:
        raise Malformed("a signature line of a note is odd", code="note")
    return _name(name), raw


def open_note(note: str | bytes, keys: Sequence[NoteKey]) -> tuple[str, frozenset[str]]:
    """Return the text and the names of the pinned `keys` that signed it, at least one.

    Raises Malformed (``malformed.note``) or Untrusted (``untrusted.note``).
    """
    if len(note) > MAX_NOTE:
        raise Malformed("a note is too long", code="note")
    if isinstance(note, bytes):
        try:
            note = note.decode("utf-8")
        except UnicodeDecodeError:
            raise Malformed("a note is not UTF-8", code="note") from None
    text, signatures = _split(note)
    pinned = {(k.name, k.id): k for k in keys}
    good: set[str] = set()
    for name, raw in signatures:
        key = pinned.get((name, raw[:4]))
        if key is None or name in good:
            continue
        try:
            key.public.verify(raw[4:], text.encode())
        except InvalidSignature:
            raise Untrusted("a signature of a pinned key does not verify", code="note") from None
        good.add(name)
    if not good:
        raise Untrusted("no pinned key signed this note", code="note", next_step="pin the key of this ledger")
    return text, frozenset(good)


def parse_head(text: str) -> TreeHead:
    """Parse the text of a tree head; further lines are covered by the signature and ignored here.

    Raises Malformed (``malformed.head``).
    """
    lines = text.split("\n")
    if len(lines) < 4 or not lines[0] or not _SIZE.match(lines[1]) or int(lines[1]) > MAX_SIZE:
        raise Malformed("a tree head is origin, size, root", code="head")
    root = _decode(lines[2], "head")
    if len(root) != 32:
        raise Malformed("the root of a tree head is not 32 bytes", code="head")
    return TreeHead(lines[0], int(lines[1]), root)


def open_head(note: str | bytes, origin: str, keys: Sequence[NoteKey]) -> TreeHead:
    """Return the tree head of `origin` that a pinned key signed; raises Malformed or Untrusted."""
    head = parse_head(open_note(note, keys)[0])
    if head.origin != origin:
        raise Untrusted("the tree head is of another log", code="head")
    return head
