"""Who calls: an API key of the snapshot, or nobody in particular. Pure, but for the dummy that is made at start.

A call that shows any credential at all is judged by that credential: one that is malformed, unknown or in the wrong
place is refused, never taken for an anonymous call. The comparison takes as long for an unknown id as for a wrong
secret.
"""

import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from interlock.call import Action, Subject
from interlock.canon import digest_bytes
from interlock.errors import Denied, Stale, Untrusted
from interlock.order import Labels
from interlock.tier import Tier
from policy.facts import ANONYMOUS
from policy.snapshot import Snapshot
from runners.inference.limits import ANONYMOUS as FREE
from runners.inference.limits import KEY, PERSON, Allowance, source_of

PUBLIC = "public"
MISPLACED = frozenset({b"x-api-key", b"api-key", b"proxy-authorization"})
_FORM = re.compile(rb"[Bb]earer (interlock_sk_([0-9A-Za-z]{10})_[0-9A-Za-z]{30}_[0-9A-Za-z]{6})")
_DUMMY = digest_bytes(secrets.token_bytes(32))


@dataclass(frozen=True)
class Caller:
    """One caller. `id` is the id of his key or ``anonymous``, `person` the human behind, `source` his address."""

    id: str
    tenant: str
    person: str
    source: str

    @property
    def anonymous(self) -> bool:
        """Return whether he showed no key."""
        return self.id == ANONYMOUS

    @property
    def subject(self) -> Subject:
        """Return him as the gate knows him."""
        return Subject(self.id, self.tenant, ANONYMOUS if self.anonymous else "service", self.person)

    @property
    def bucket(self) -> str:
        """Return the name under which his calls are counted first: his key, or where he comes from."""
        return f"from {source_of(self.source)}" if self.anonymous else self.id

    @property
    def limits(self) -> tuple[tuple[str, Allowance], ...]:
        """Return his limits, and under which name each is counted: of the key, then of the human behind it."""
        if self.anonymous:
            return ((self.bucket, FREE),)
        return (self.bucket, KEY), (f"person {self.person or self.id}", PERSON)

    def labels(self, node: str) -> Labels:
        """Return what a stop order can name of him: his tenant, his key, the person behind it."""
        return Labels(self.tenant, self.id, self.person or self.id, "", node, Tier.NONE)


def authenticate(headers: Iterable[tuple[bytes, bytes]], snapshot: Snapshot | None, source: str) -> Caller:
    """Return who calls.

    Args: `headers` names in lower case; `snapshot` the present entitlements; `source` the peer's address. Raises
    Untrusted (``untrusted.api_key``, ``untrusted.credential`` for one in the wrong place), Denied (``denied.scope``),
    Stale (``stale.entitlements``: a key cannot be looked up).
    """
    given: list[bytes] = []
    for name, value in headers:
        if name == b"authorization":
            given.append(value)
        elif name in MISPLACED:
            raise Untrusted("credentials go into the header Authorization: Bearer …, nowhere else", code="credential",
                            next_step="send the API key as Authorization: Bearer …")
    if not given:
        return Caller(ANONYMOUS, PUBLIC, "", source)
    form = _FORM.fullmatch(given[0]) if len(given) == 1 else None
    if form is None:
        raise no_key()
    if snapshot is None:
        raise Stale("no entitlements are known here, so no key can be looked up", code="entitlements",
                    next_step="restore the connection to the control plane")
    found = snapshot.keys.get("key_" + form[2].decode())
    same = hmac.compare_digest(_DUMMY if found is None else found.hash, digest_bytes(form[1]))
    if found is None or not same:
        raise no_key()
    if Action.INFER.value not in found.scopes:
        raise Denied("this key may not call models", code="scope", next_step="mint a key with the scope infer")
    return Caller(found.id, found.tenant, found.person, source)


def no_key() -> Untrusted:
    """Return the one refusal for a key that is malformed, unknown, revoked or too old."""
    return Untrusted("the API key is not valid", code="api_key", next_step="mint a new one: interlock keys mint")
