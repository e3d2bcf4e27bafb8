"""The permit: the only way to what lies behind the gate.

Only `policy/gate.py` issues one (an architecture test searches for any other construction). What acts on
a permit calls `check` right before the effect. Across processes of one host a permit travels sealed by an
HMAC under the host's permit key; between control plane and node it does not travel at all.
"""

import base64
import binascii
import hashlib
import hmac
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from interlock.call import Action, number, text
from interlock.canon import canonical, parse
from interlock.errors import Halted, Malformed, Untrusted

MAX_LIFE_MS = 5_000
_ISSUER = object()


def boottime_ms() -> int:
    """Return milliseconds of CLOCK_BOOTTIME; the only clock of deadlines."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


@dataclass(frozen=True)
class Permit:
    """A decision that was recorded. `expires_ms` is on CLOCK_BOOTTIME of this host.

    `call` is the digest of the Call, `resource` its path, `epoch` the stop epoch at which it was given,
    `record` the id of the durable record.
    """

    call: str
    action: Action
    resource: str
    run: str
    expires_ms: int
    epoch: int
    record: str
    issuer: object = None
    domain: ClassVar[bytes] = b"interlock/permit/v1\n"

    def __post_init__(self) -> None:
        if self.issuer is not _ISSUER:
            raise TypeError("only policy/gate.py makes a permit")

    def __copy__(self) -> "Permit":
        raise TypeError("a permit is not copied")

    def __deepcopy__(self, memo: object) -> "Permit":
        raise TypeError("a permit is not copied")

    def __reduce__(self) -> str:
        raise TypeError("a permit is not pickled; seal it")

    def check(self, action: Action, resource: str, *, epoch: int, now_ms: int | None = None) -> None:
        """Refuse right before the effect: wrong action or resource, expired, or a stop in between.

        Raises Untrusted (``untrusted.permit``) or Halted (``stopped.epoch``).
        """
        if self.action is not action or self.resource != resource:
            raise Untrusted("the permit is for something else", code="permit")
        if (boottime_ms() if now_ms is None else now_ms) >= self.expires_ms:
            raise Untrusted("the permit has expired", code="permit", next_step="ask the gate again")
        if epoch != self.epoch:
            raise Halted("the stop state moved since the permit was given", code="epoch",
                         next_step="ask the gate again")

    def seal(self, key: bytes) -> str:
        """Return the text form for another process of this host, under the 32-byte permit key."""
        body = canonical({
            "call": self.call, "action": self.action.value, "resource": self.resource, "run": self.run,
            "expires_ms": self.expires_ms, "epoch": self.epoch, "record": self.record,
        })
        tag = hmac.new(key, self.domain + body, hashlib.sha256).digest()
        return base64.urlsafe_b64encode(tag + body).decode()


def issue(
    *, call: str, action: Action, resource: str, run: str, expires_ms: int, epoch: int, record: str
) -> Permit:
    """Make a permit. Called by `policy/gate.py` alone."""
    return Permit(call, action, resource, run, expires_ms, epoch, record, _ISSUER)


def unseal(sealed: str, key: bytes) -> Permit:
    """Return the permit that another process of this host sealed; raises Untrusted or Malformed."""
    if len(key) != 32:
        raise Untrusted("no permit key", code="permit")
    try:
        raw = base64.urlsafe_b64decode(sealed.encode())
    except (ValueError, binascii.Error, UnicodeEncodeError):
        raise Malformed("a sealed permit is not base64", code="permit") from None
    tag, body = raw[:32], raw[32:]
    if not hmac.compare_digest(tag, hmac.new(key, Permit.domain + body, hashlib.sha256).digest()):
        raise Untrusted("the seal of the permit does not verify", code="permit")
    value: dict[str, Any] = parse(body, limit=8192)
    return Permit(
        text(value, "call"), Action(value["action"]), text(value, "resource"), text(value, "run", empty=True),
        number(value, "expires_ms"), number(value, "epoch"), text(value, "record"), _ISSUER,
    )
