"""The one way by which a run key leaves its wrapping: a permit for it, and a lease that lives now."""

from collections.abc import Callable

from interlock.call import Action
from interlock.errors import Denied, Untrusted
from interlock.permit import Permit
from kms.envelope import RunKey
from kms.provider import Provider


def release(
    permit: Permit, run: str, kept: RunKey, provider: Provider, *, epoch: int, lease_live: Callable[[], bool]
) -> bytes:
    """Return the run key `kept` in clear, for the node that runs `run`; without a live lease nothing is unwrapped.

    Args: `permit` to release keys to `run`; `kept` that run's key, or the key of a run whose version it loads;
    `epoch` the present stop epoch; `lease_live` asked right before the provider is, may raise a refusal of its own.
    Raises Untrusted (the permit), Halted (a stop in between), Denied (``denied.lease``), and what
    `Provider.unwrap` raises.
    """
    permit.check(Action.RELEASE_KEY, f"run/{run}", epoch=epoch)
    if permit.run != run:
        raise Untrusted("the permit is for another run", code="permit")
    if not lease_live():
        raise no_lease()
    return provider.unwrap(kept.wrapped, kept.context)


def no_lease() -> Denied:
    """Return the refusal of a key without a live lease."""
    return Denied("the attempt has no live lease, so it gets no key", code="lease",
                  next_step="the node asks again after its next heartbeat")
