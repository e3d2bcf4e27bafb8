"""Passwords: argon2id with the OWASP setting, two hashes at a time, one hash for unknown names too.

Rules: at least 12 characters (15 recommended), no composition rules, a small blocklist. A name that does not
exist costs the same work as one that does, so that time tells nothing (I13). Sources: ASVS 5.0 6.2, 6.3.8.
"""

import threading
import unicodedata

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from interlock.errors import Malformed

MIN_LENGTH, RECOMMENDED_LENGTH, MAX_BYTES = 12, 15, 1024
_HASHER = PasswordHasher(time_cost=2, memory_cost=19456, parallelism=1)
_ROOM = threading.BoundedSemaphore(2)  # 19 MiB each: memory, not time, is what a flood would exhaust
# The hash of random bytes that nobody kept, same parameters as real ones.
_NOBODY = "$argon2id$v=19$m=19456,t=2,p=1$k81h2T4NUHaLeXq0VYdKPg$2b7V7Q/uwczZZjj+FT1U+TnL5cuOjHF9JLDLtaCYPx8"
_COMMON = frozenset(
    {
        "password", "passwort", "passw0rd", "123456", "1234567890", "0123456789", "qwerty", "qwertyuiop", "asdfghjkl",
        "letmein", "changeme", "welcome", "iloveyou", "administrator", "admin", "root", "secret", "interlock", "abc123",
        "correcthorsebatterystaple", "trustno1", "football", "baseball", "superman", "monkey", "dragon", "sunshine",
        "princess", "whatever", "default", "temporary", "testtest", "test", "hunter2", "master", "killswitch",
    }
)


def _normal(password: str) -> str:
    """Return the form that is hashed: one form of each character, on every keyboard (63B: NFKC)."""
    return unicodedata.normalize("NFKC", password)


def _is_repetition(text: str) -> bool:
    """Return whether the text is one piece over and over (``abcabcabcabc``)."""
    return any(text == (text[:n] * len(text))[: len(text)] for n in range(1, len(text) // 2 + 1))


def check_new(password: str, name: str) -> None:
    """Refuse a password that is too short, too long, common, repeated or built on the account's name.

    Raises Malformed (``malformed.password``); the message never holds the password.
    """
    plain = _normal(password)
    if len(plain) < MIN_LENGTH or len(plain.encode(errors="replace")) > MAX_BYTES:
        raise Malformed(
            f"a password has {MIN_LENGTH} to {MAX_BYTES} characters", code="password",
            next_step=f"choose {RECOMMENDED_LENGTH} characters or more; a sentence is fine",
        )
    if not plain.isprintable():
        raise Malformed("a password holds a character that cannot be typed", code="password")
    folded = "".join(plain.casefold().split())
    core = folded.strip("0123456789!.?-_#$*")
    if folded in _COMMON or core in _COMMON or core == name.casefold() or not core or _is_repetition(folded):
        raise Malformed(
            "this password is one of the first that would be guessed", code="password",
            next_step="choose another one; a sentence is fine",
        )


def hashed(password: str) -> str:
    """Return the argon2id hash; at most two run at once."""
    with _ROOM:
        return _HASHER.hash(_normal(password).encode(errors="replace"))


def matches(stored: str, password: str) -> bool:
    """Return whether `password` has the hash `stored`; exactly one hash is computed in every case.

    An empty or broken `stored` (an unknown name) is compared with a hash that nothing matches.
    """
    known = stored.startswith("$argon2id$")
    with _ROOM:
        try:
            found = _HASHER.verify(stored if known else _NOBODY, _normal(password[:MAX_BYTES]).encode(errors="replace"))
        except (VerificationError, InvalidHashError):
            return False
    return found and known
