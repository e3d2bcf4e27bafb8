"""From a permit to a wrapped run key, and from a run key to the file keys that one manifest lists."""

from dataclasses import dataclass

from interlock import sealed
from interlock.call import Action
from interlock.errors import Untrusted
from interlock.manifest import Manifest
from interlock.permit import Permit
from kms.provider import Context, Provider, Wrapped


@dataclass(frozen=True)
class RunKey:
    """A run key as it is kept: wrapped, with the context that it opens for."""

    wrapped: Wrapped
    context: Context


def mint(permit: Permit, provider: Provider, context: Context, *, action: Action, resource: str, epoch: int) -> RunKey:
    """Return a fresh run key for the run of `permit`, wrapped; the key in clear goes no further than this call.

    Args: `action` and `resource` (its path) that the permit must be for; `epoch` the present stop epoch.
    Raises Untrusted (the permit, or a context of another run), Halted (a stop in between), and what
    `Provider.generate` raises.
    """
    permit.check(action, resource, epoch=epoch)
    if permit.run != context.run:
        raise Untrusted("the permit is for another run", code="permit")
    _, wrapped = provider.generate(context)
    return RunKey(wrapped, context)


def file_keys(run_key: bytes, manifest: Manifest) -> dict[str, bytes]:
    """Return name → file key for exactly the files that a verified `manifest` lists. Raises Untrusted."""
    return {row.name: sealed.unwrap_file_key(run_key, row.wrapped, manifest.run, manifest.step, row.name)
            for row in manifest.files}
