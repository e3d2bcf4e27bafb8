"""One-time links: the first administrator's, a recovery's, an invitation's.

Rules: 256 random bits, only their hash is kept; bootstrap and recovery 15 min, invitation 24 h; used up by one
statement when the second factor is confirmed (enrolment.py); bootstrap is refused for ever once an
administrator has enrolled; a new bootstrap link voids the older ones. The secret goes to the terminal or the
answer that asked for it, never to a log or the ledger.
"""

import re
import secrets
from collections.abc import Iterable

from sqlalchemy import Connection, Engine

from audit.ledger import Ledger
from control_plane.auth.sessions import hash_of
from control_plane.auth.site import ADMINISTRATOR, APPROVER, ROLES, TENANT
from control_plane.store import people
from control_plane.store.db import now_us, writing
from interlock.errors import Conflict, Malformed, Untrusted
from interlock.event import Event, EventType

BOOTSTRAP, RECOVERY, INVITATION = "bootstrap", "recovery", "invitation"
BOOTSTRAP_US, INVITATION_US = 900_000_000, 86_400_000_000
ENROLLED_FACT = "administrator_enrolled"
_NAME = re.compile(r"[a-z][a-z0-9._-]{1,62}")
_TENANT = re.compile(r"[a-z][a-z0-9-]{0,31}")


def checked_name(name: str) -> str:
    """Return a valid account name; raises Malformed (``malformed.name``)."""
    if not _NAME.fullmatch(name):
        raise Malformed("a name is 2 to 63 of a-z 0-9 . _ - and begins with a letter", code="name")
    return name


def checked_roles(names: Iterable[str]) -> tuple[str, ...]:
    """Return the sorted roles; raises Malformed (unknown, none) or Conflict (duties that exclude each other)."""
    wanted = frozenset(names)
    if not wanted or not wanted <= ROLES:
        raise Malformed("unknown role", code="role", next_step=f"use one of: {', '.join(sorted(ROLES))}")
    if {ADMINISTRATOR, APPROVER} <= wanted or ("auditor" in wanted and len(wanted) > 1):
        raise Conflict(
            "one person does not hold these roles together", code="duties",
            next_step="who administers people never approves; who audits does nothing else",
        )
    return tuple(sorted(wanted))


def invite(
    connection: Connection, *, made_by: str, name: str, tenant: str, roles: Iterable[str]
) -> tuple[str, people.Link]:
    """Make an invitation and return (secret, link). Raises Malformed or Conflict (name or invitation exists)."""
    if not _TENANT.fullmatch(tenant):
        raise Malformed("a tenant is 1 to 32 of a-z 0-9 - and begins with a letter", code="tenant")
    wanted, now = checked_roles(roles), now_us()
    if people.by_name(connection, checked_name(name)) or people.open_invitation(connection, name, now):
        raise Conflict("this name is taken or has an open invitation", code="name", next_step="choose another name")
    return _add(connection, INVITATION, name, tenant, wanted, made_by, now + INVITATION_US)


def _add(
    connection: Connection, kind: str, name: str, tenant: str, roles: tuple[str, ...], made_by: str, expires_us: int
) -> tuple[str, people.Link]:
    secret = secrets.token_urlsafe(32)
    link = people.Link(hash_of(secret), kind, name, tenant, roles, made_by, expires_us, 0, "")
    people.add_link(connection, link)
    return secret, link


def bootstrap(engine: Engine, ledger: Ledger) -> str:
    """Make the first administrator's link and return its secret.

    Raises Conflict (``conflict.bootstrapped``) once an administrator has enrolled, for ever.
    """
    with writing(engine) as connection:
        if people.site_fact(connection, ENROLLED_FACT):
            raise bootstrapped()
        now = now_us()
        people.expire_links(connection, BOOTSTRAP, now)
        ledger.record(Event(EventType.BOOTSTRAP_LINK, "local", facts={"expires_us": now + BOOTSTRAP_US}), connection)
        secret, _ = _add(connection, BOOTSTRAP, "", TENANT, (ADMINISTRATOR,), "local", now + BOOTSTRAP_US)
    return secret


def bootstrapped() -> Conflict:
    """Return the refusal of a bootstrap link after the first administrator."""
    return Conflict(
        "an administrator has enrolled; the bootstrap link is closed for ever", code="bootstrapped",
        next_step="ask an administrator for an invitation; if there is none: stop the control plane, then --recover",
    )


def recover(engine: Engine, ledger: Ledger) -> str:
    """Make a link for a new administrator after the old one was lost, and return its secret.

    The caller holds the lock that a running control plane holds. The event is durable before the link exists.
    """
    ledger.record(Event(EventType.RECOVERY, "local", facts={"what": "recovery link", "life_s": BOOTSTRAP_US // 10**6}))
    with writing(engine) as connection:
        now = now_us()
        people.expire_links(connection, RECOVERY, now)
        people.put_site_fact(connection, "recovery_us", str(now))
        secret, _ = _add(connection, RECOVERY, "", TENANT, (ADMINISTRATOR,), "local", now + BOOTSTRAP_US)
    return secret


def open_link(connection: Connection, secret: str) -> people.Link:
    """Return the link of a secret while it may be used; raises Untrusted (``untrusted.link``) or Conflict."""
    link = people.link_of(connection, hash_of(secret))
    if link is None or link.used_us or now_us() >= link.expires_us:
        raise no_link()
    if link.kind == BOOTSTRAP and people.site_fact(connection, ENROLLED_FACT):
        raise bootstrapped()
    return link


def no_link() -> Untrusted:
    """Return the one refusal for a link that is unknown, used or too old."""
    return Untrusted("the link is not valid: unknown, used, or too old", code="link", next_step="ask for a new link")
