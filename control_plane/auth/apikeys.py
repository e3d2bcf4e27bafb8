"""API keys for programs: ``interlock_sk_<id10>_<secret30>_<crc6>``, shown once, stored as a hash.

Rules: found by id, compared in constant time; a wrong checksum is refused before the database is asked; every
key has scopes and an end (at most 90 days); a key never does what needs a second factor or a second person.
"""

import hmac
import re
import secrets
import string
import zlib
from collections.abc import Iterable

from sqlalchemy import Connection

from control_plane.auth.sessions import hash_of
from control_plane.store import people
from control_plane.store import sessions as rows
from control_plane.store.db import now_us
from interlock.call import Action
from interlock.errors import Conflict, Denied, Malformed, Untrusted

PREFIX = "interlock_sk_"
MAX_DAYS = 90
MAX_LIVE, MAX_SITE = 50, 2000  # of one person, of all: every node holds the hashes of all live keys in its snapshot
_DAY_US = 86_400_000_000
_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_FORM = re.compile(r"interlock_sk_([0-9A-Za-z]{10})_([0-9A-Za-z]{30})_([0-9A-Za-z]{6})")
# What a program may do. Everything else needs a person with a second factor.
SCOPES = frozenset(
    {Action.INFER, Action.LAUNCH, Action.CONTINUE, Action.RESTART, Action.READ_DATA, Action.SAVE, Action.LOAD,
     Action.CALL_TOOL, Action.LOOK, Action.EXPORT_EVIDENCE, Action.STOP}
)


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def checksum(text: str) -> str:
    """Return six base-62 digits of CRC-32: tells a mistyped or cut key, protects nothing."""
    value, digits = zlib.crc32(text.encode()), ""
    for _ in range(6):
        value, digit = divmod(value, 62)
        digits = _ALPHABET[digit] + digits
    return digits


def scopes_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the sorted scopes; raises Malformed (unknown, none) or Denied (never for a key)."""
    known = {a.value for a in Action}
    wanted = sorted(set(names))
    if not wanted or not set(wanted) <= known:
        raise Malformed("a key names at least one scope, each the name of an action", code="scope",
                        next_step=f"scopes: {', '.join(sorted(SCOPES))}")
    if not {Action(name) for name in wanted} <= SCOPES:
        raise Denied("a key never does what needs a second factor", code="scope",
                     next_step=f"scopes for keys: {', '.join(sorted(SCOPES))}")
    return tuple(wanted)


def mint(connection: Connection, person: str, name: str, scopes: Iterable[str], days: int) -> tuple[str, rows.ApiKey]:
    """Make a key of `person` and return (the key, shown once, and its row).

    Raises Malformed, Denied or Conflict (``conflict.key_quota``).
    """
    if not 1 <= days <= MAX_DAYS:
        raise Malformed(f"a key lives 1 to {MAX_DAYS} days", code="days")
    granted = scopes_of(scopes)
    body = f"{PREFIX}{_random(10)}_{_random(30)}"
    key = f"{body}_{checksum(body)}"
    now = now_us()
    if len(rows.live_keys(connection, now, person)) >= MAX_LIVE:
        raise Conflict(f"you have {MAX_LIVE} live API keys", code="key_quota",
                       next_step="revoke one: interlock keys revoke")
    if len(rows.live_keys(connection, now)) >= MAX_SITE:
        raise Conflict(f"this site has {MAX_SITE} live API keys", code="key_quota",
                       next_step="revoke what nobody uses; keys end by themselves after their days")
    row = rows.ApiKey("key_" + body.split("_")[2], hash_of(key), person, name, granted, now, now + days * _DAY_US, 0, 0)
    rows.add_key(connection, row)
    return key, row


def no_key() -> Untrusted:
    """Return the one refusal for a key that is unknown, revoked, too old or mistyped."""
    return Untrusted("the API key is not valid", code="api_key", next_step="mint a new one: interlock keys mint")


def current(connection: Connection, key: str) -> tuple[rows.ApiKey, people.Person]:
    """Return the live row of a key and the person behind it; raises Untrusted (``untrusted.api_key``)."""
    form = _FORM.fullmatch(key)
    if form is None or checksum(key.rpartition("_")[0]) != form[3]:
        raise no_key()
    row = rows.key_of(connection, "key_" + form[1])
    if row is None or not hmac.compare_digest(row.hash, hash_of(key)):
        raise no_key()
    if row.revoked_us or now_us() >= row.expires_us:
        raise no_key()
    person = people.by_id(connection, row.person)
    if person is None or not person.enrolled:
        raise no_key()
    return row, person
