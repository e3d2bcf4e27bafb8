"""The second factor: time-based codes (RFC 6238), each accepted once, whoever asks and how often.

Rules: the input is normalised once, before anything looks at it (I1: NFKC, no blanks, six ASCII digits);
current and previous step count, never the next; the accepted timecode is advanced by ONE statement whose row
count decides (I2); wrong and replayed codes get the same words; a clock that is off gets a hint after the
failure was counted. The secret is sealed under the KEK and tied to its person.
"""

import hmac
import re
import secrets
import time
import unicodedata
from urllib.parse import quote

import pyotp
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import Connection

from control_plane.store import people
from interlock.errors import Malformed, Untrusted

STEP_S = 30
SECRET_BYTES = 20  # 160 bit, RFC 4226 §4
_VERSION = b"\x01"
_AAD = b"interlock/totp/v1\n"
_CODE = re.compile(r"[0-9]{6}")
_HINT_STEPS = 10


def new_secret() -> str:
    """Return a new 160-bit secret in base32, as authenticators take it."""
    return pyotp.random_base32(SECRET_BYTES * 8 // 5)


def uri(secret: str, name: str, issuer: str = "Interlock") -> str:
    """Return the otpauth URI for a QR code."""
    return f"otpauth://totp/{quote(issuer)}:{quote(name)}?secret={secret}&issuer={quote(issuer)}"


def seal(kek: bytes, person: str, secret: str) -> bytes:
    """Return the secret encrypted by AES-256-GCM under `kek` (32 bytes), usable for this person only."""
    nonce = secrets.token_bytes(12)
    return _VERSION + nonce + AESGCM(kek).encrypt(nonce, secret.encode(), _AAD + person.encode())


def unseal(kek: bytes, person: str, sealed: bytes) -> str:
    """Return the secret; raises Untrusted when it was sealed by another key or for another person."""
    if sealed[:1] != _VERSION:
        raise Malformed("a sealed second factor has an unknown format", code="totp")
    try:
        return AESGCM(kek).decrypt(sealed[1:13], sealed[13:], _AAD + person.encode()).decode()
    except InvalidTag:
        raise Untrusted(
            "the second factor of this person cannot be unsealed", code="kek",
            next_step="restore the key-encryption key that the state was made with",
        ) from None


def normal(code: str) -> str:
    """Return the six digits of what a person typed, empty when it is no code."""
    plain = "".join(unicodedata.normalize("NFKC", code[:64]).split())
    return plain if _CODE.fullmatch(plain) else ""


def _at(secret: str, timecode: int) -> str:
    return pyotp.TOTP(secret, interval=STEP_S).generate_otp(timecode)


def timecode_of(secret: str, code: str, now_s: float) -> int | None:
    """Return the timecode within current and previous step whose code this is, None for no match."""
    plain = normal(code)
    current = int(now_s) // STEP_S
    found = None
    for timecode in (current, current - 1):  # both are computed in any case
        if hmac.compare_digest(_at(secret, timecode), plain or "------") and found is None:
            found = timecode
    return found


def wrong() -> Untrusted:
    """Return the one refusal for a wrong, a replayed and a malformed code."""
    return Untrusted("the code is not valid", code="factor", next_step="wait for the next code and try again")


def _refusal(person: people.Person, secret: str, code: str, now_s: float) -> Untrusted:
    plain, current = normal(code), int(now_s) // STEP_S
    for step in range(-_HINT_STEPS, _HINT_STEPS + 1):
        timecode = current + step
        if plain and timecode > max(person.totp_last, 0) and hmac.compare_digest(_at(secret, timecode), plain):
            return Untrusted("the code is not valid", code="factor_clock",
                             next_step="the clock of your phone is off: set it to automatic time")
    return wrong()


def accept(connection: Connection, kek: bytes, person: people.Person, code: str, now_s: float | None = None) -> int:
    """Use the code up for this person and return its timecode.

    Raises Untrusted (``untrusted.factor``): wrong, replayed or malformed, in the same words. The caller has
    charged the attempt (`throttle.charge`) before.
    """
    now = time.time() if now_s is None else now_s
    if person.totp_sealed is None:
        raise wrong()
    secret = unseal(kek, person.id, person.totp_sealed)
    timecode = timecode_of(secret, code, now)
    if timecode is None:
        raise _refusal(person, secret, code, now)
    if not people.advance_timecode(connection, person.id, timecode):
        raise wrong()
    return timecode
