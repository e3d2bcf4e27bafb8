"""The whole error tree. Every refusal has a stable code, a sentence for people and the next step.

    Refusal (Exception)
    ├── Malformed              malformed            input that cannot be read
    ├── Untrusted              untrusted            a signature, certificate or peer that is not ours
    ├── Denied                 denied               policy said no
    │   ├── StepUpRequired     step_up_required     a fresh second factor is missing
    │   └── ApprovalRequired   approval_required    a second person is missing
    ├── Halted                 stopped              an active stop order covers this call
    ├── Stale                  stale                bundle, snapshot or stop state is too old
    ├── NotRecorded            not_recorded         no durable record, hence no permit
    ├── Conflict               conflict             half-made state, second start, id used twice
    ├── NotFound               not_found            no such object, or not yours
    ├── Unavailable            unavailable          a part that this needs does not answer
    ├── TooMany                too_many             throttled; try again later
    ├── LayerMissing           layer_missing        the host lacks a sandbox layer
    ├── NotConfirmed           not_confirmed        the effect of a stop is not proven
    └── Usage                  usage                the command's words are off

    Stopped (BaseException)    stopped              raised inside a workload when its lease is gone:
                                                    `except Exception` must not swallow it

A subclass's `code` is its default; the constructor takes a finer one (``denied.no_role``), whose first
part is always the class code. Errors never carry secrets or plaintext.
"""

from typing import Any, ClassVar


class Refusal(Exception):
    """A typed refusal.

    Args: `message` one sentence for people; `code` stable, dotted, first part the class code;
    `next_step` what the reader can do; `details` JSON-safe facts without secrets.
    """

    default_code: ClassVar[str] = "refused"
    http_status: ClassVar[int] = 400

    def __init__(
        self, message: str, *, code: str | None = None, next_step: str = "", details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = self.default_code if code is None else f"{self.default_code}.{code}"
        self.next_step = next_step
        self.details = details or {}

    def as_json(self) -> dict[str, Any]:
        """Return ``{code, message, next_step, details}`` for the wire and for `--json`."""
        return {
            "code": self.code,
            "message": self.message,
            "next_step": self.next_step,
            "details": self.details,
        }

    def __str__(self) -> str:
        step = f" Next step: {self.next_step}" if self.next_step else ""
        return f"[{self.code}] {self.message}{step}"


class Malformed(Refusal):
    """Input that cannot be read; nothing was done with it."""

    default_code = "malformed"
    http_status = 422


class Untrusted(Refusal):
    """A signature, key, certificate or peer that is not one of ours."""

    default_code = "untrusted"
    http_status = 401


class Denied(Refusal):
    """Policy said no."""

    default_code = "denied"
    http_status = 403


class StepUpRequired(Denied):
    """A fresh second factor, bound to this very object, is missing."""

    default_code = "step_up_required"


class ApprovalRequired(Denied):
    """One or more further persons must approve this very digest."""

    default_code = "approval_required"


class Halted(Refusal):
    """An active stop order covers this call."""

    default_code = "stopped"
    http_status = 423


class Stale(Refusal):
    """Bundle, snapshot or stop state is older than its limit; counts as deny or stopped."""

    default_code = "stale"
    http_status = 503


class NotRecorded(Refusal):
    """The record could not be made durable, so there is no permit."""

    default_code = "not_recorded"
    http_status = 503


class Conflict(Refusal):
    """Half-made state, a second start, an id or a code used twice."""

    default_code = "conflict"
    http_status = 409


class NotFound(Refusal):
    """No such object, or it belongs to somebody else."""

    default_code = "not_found"
    http_status = 404


class Unavailable(Refusal):
    """A part that this call needs does not answer."""

    default_code = "unavailable"
    http_status = 503


class TooMany(Refusal):
    """Throttled; the details carry `retry_after_s`."""

    default_code = "too_many"
    http_status = 429


class LayerMissing(Refusal):
    """The host lacks a sandbox layer that the profile requires; nothing was started."""

    default_code = "layer_missing"
    http_status = 503


class NotConfirmed(Refusal):
    """A stop whose effect is not proven; the details name survivors or the unreachable node."""

    default_code = "not_confirmed"
    http_status = 503


class Usage(Refusal):
    """The words of a command are off."""

    default_code = "usage"


class Stopped(BaseException):
    """Raised in a workload when its lease is gone; deliberately not an Exception."""

    code = "stopped"


CLASSES: dict[str, type[Refusal]] = {
    c.default_code: c
    for c in (
        Malformed, Untrusted, Denied, StepUpRequired, ApprovalRequired, Halted, Stale, NotRecorded,
        Conflict, NotFound, Unavailable, TooMany, LayerMissing, NotConfirmed, Usage,
    )
}


def from_json(value: dict[str, Any]) -> Refusal:
    """Rebuild the typed refusal that `as_json` described; an unknown code becomes a plain Refusal."""
    code = str(value.get("code", "refused"))
    head, _, tail = code.partition(".")
    cls = CLASSES.get(head, Refusal)
    details = value.get("details")
    return cls(
        str(value.get("message", "refused")),
        code=tail or None,
        next_step=str(value.get("next_step", "")),
        details=details if isinstance(details, dict) else {},
    )
