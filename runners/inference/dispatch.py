"""The one place where an engine is asked. What asks it holds a permit, and the permit is checked right here."""

from collections.abc import Callable

from interlock.call import Action
from interlock.errors import Untrusted
from interlock.permit import Permit
from interlock.terms import FULL, PROFILES, RESTRICTED, Terms
from policy.snapshot import ModelRow
from runners.inference import frames
from runners.inference.pool import Line

# Which profile a permit is worth. Nothing else says so: not a body, not a header, not the model.
PROFILE_OF = {Action.INFER: FULL, Action.INFER_RESTRICTED: RESTRICTED}


def terms_of(permit: Permit) -> Terms:
    """Return the terms on which a model answers under `permit`; raises Untrusted for a permit to something else."""
    profile = PROFILE_OF.get(permit.action)
    if profile is None:
        raise Untrusted("the permit is for something else", code="permit")
    return PROFILES[profile]


def ask(
    permit: Permit, line: Line, row: ModelRow, call: frames.Complete | frames.Embed, epoch: Callable[[], int]
) -> None:
    """Send `call` to the engine behind `line`.

    Raises Untrusted (the permit is not for this model, this engine or these terms, or is too old) or Halted (the stop
    state moved since it was given). Nothing was sent then.
    """
    permit.check(permit.action, f"model/{row.name}", epoch=epoch())
    if permit.run != line.engine.run or not line.engine.serves(row) or call.terms != terms_of(permit):
        raise Untrusted("the permit is for another engine", code="permit")
    if isinstance(call, frames.Complete):
        call = frames.within(call)
    line.ask(frames.encode(call.as_json()))
