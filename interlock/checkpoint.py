"""Sealed checkpoints of a training run: `save`, `load`, `latest`, `asset`. How to use them: docs/howto/training.md.

The broker hands out each file with its own key and commits a checkpoint whole or not at all. With several ranks
`save` and `load` are called by all of them; an error on one rank is raised on every rank. torch is imported only
when a tensor is about to move.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

from interlock import leash
from interlock.asking import ask
from interlock.errors import Malformed, NotFound, Refusal, Stopped, Unavailable, from_json
from interlock.layout import METADATA, decode
from interlock.manifest import STATE, WEIGHTS, file_name
from interlock.opened import OpenFiles, Source


def save(state: MutableMapping[str, Any], step: int, *, assets: Mapping[str, bytes] | None = None) -> str:
    """Save a sealed checkpoint and return its digest. Every rank calls it with the same step.

    Args: `state` dict of tensors, values and objects with `state_dict` (docs/howto/training.md); nothing in it is
    altered; `step` from 0; `assets` files such as config.json, name → bytes: makes it weights that can be served.
    Raises Malformed (``malformed.state``), Stopped, the broker's refusal; nothing is committed then.
    """
    from torch.distributed.checkpoint import save as dcp_save

    from interlock.dcp_save import SealedSavePlanner, SealedWriter

    if type(step) is not int or step < 0:
        raise Malformed("a step is a whole number from 0", code="state")
    writer = SealedWriter(_own_run(), step, STATE if assets is None else WEIGHTS, assets or {})
    try:
        with _as_refusal("save"):
            found = dcp_save({}, storage_writer=writer, planner=SealedSavePlanner(state), no_dist=not _is_many())
    except BaseException:
        if writer.save:
            with suppress(Refusal, Stopped):  # the broker drops it anyway when the next save begins
                ask("save_abort", save=writer.save)
        raise
    return str(found.planner_data)


def load(state: MutableMapping[str, Any], *, step: int | None = None, version: str | None = None) -> int:
    """Fill `state` in place from a checkpoint and return its step. Every rank calls it.

    Args: `state` as it was when it was saved: same names, shapes and dtypes; `step` of this run's own checkpoints
    (default the newest) or `version` the digest of a registered version that the plan names in `weights`. Raises
    Conflict (``conflict.layout``) when they do not fit, Untrusted when anything was altered, NotFound, Stopped, the
    broker's refusal. After a refusal the tensors of `state` hold anything: do not train on.
    """
    from torch.distributed.checkpoint import load as dcp_load

    from interlock.dcp_load import SealedLoadPlanner, SealedReader

    def begin() -> dict[str, Any]:
        answer = _begin_answer(step, version)
        files = OpenFiles(_source(answer))
        try:
            return {"answer": answer, "layout": files.item(METADATA, "metadata")}
        finally:
            files.close()

    told = _from_first_rank(begin)
    source, found = _source(told["answer"]), decode(told["layout"])
    reader, planner = SealedReader(found, OpenFiles(source), source.files), SealedLoadPlanner(state, found)
    with _as_refusal("load"):
        dcp_load({}, storage_reader=reader, planner=planner, no_dist=not _is_many())
        planner.set_values()
    return source.step


def latest() -> int | None:
    """Return the step of this run's newest checkpoint, None when it has none.

    Outside a run it returns None and says so once, like `interlock.step`. Raises Stopped, the broker's refusal.
    """
    if not leash.connected():
        leash.warn("latest()")
        return None
    try:
        return int(ask("load_begin")["step"])
    except NotFound as refusal:
        if refusal.code == "not_found.op":  # the plan has no checkpoints: that is no answer
            raise
        return None


def asset(name: str, *, version: str | None = None) -> bytes:
    """Return a file that was saved beside weights, such as config.json.

    Args: `name` its name; `version` the digest of a registered version (default: this run's newest checkpoint).
    Raises NotFound (``not_found.asset``), Untrusted, Stopped, the broker's refusal.
    """
    answer = _begin_answer(None, version)
    assets = answer.get("assets")
    if not isinstance(assets, dict) or name not in assets:
        raise NotFound("this checkpoint has no such asset", code="asset", next_step="name an asset that was saved")
    files = OpenFiles(_source(answer))
    try:
        return files.item(str(assets[name]), name)
    finally:
        files.close()


def _begin_answer(step: int | None, version: str | None) -> dict[str, Any]:
    if step is not None and version is not None:
        raise Malformed("a load names a step of this run or a version, not both", code="state")
    if not leash.connected():
        raise _no_run()
    fields = {"step": step, "version": version}
    return ask("load_begin", **{k: v for k, v in fields.items() if v is not None})


def _source(answer: dict[str, Any]) -> Source:
    try:
        names = frozenset(file_name(row["name"]) for row in answer["files"])
        return Source(str(answer["load"]), str(answer["run"]), int(answer["step"]), names)
    except (KeyError, TypeError, ValueError):
        raise Malformed("the broker's answer names no checkpoint", code="wire") from None


def _own_run() -> str:
    if not leash.connected() or not leash.run_id():
        raise _no_run()
    return leash.run_id()


def _no_run() -> Unavailable:
    return Unavailable(
        "there is no run here, hence no keys", code="broker", next_step="start the script by `interlock train`",
    )


def _is_many() -> bool:
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized())


def _from_first_rank(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return on every rank what `make` returned on rank 0; what it raised is raised everywhere."""
    if not _is_many():
        return make()
    import torch.distributed as dist

    told: list[dict[str, Any]] = [{}]
    failure: BaseException | None = None
    if dist.get_rank() == 0:
        try:
            told = [{"found": make()}]
        except BaseException as error:  # the others wait: whatever it is, they hear of it
            told, failure = [_told(error)], error
    dist.broadcast_object_list(told, src=0)
    if failure is not None:
        raise failure
    if "found" in told[0]:
        return dict(told[0]["found"])
    if "stopped" in told[0]:
        raise Stopped(told[0]["stopped"])
    raise from_json(told[0]["refused"])


def _told(error: BaseException) -> dict[str, Any]:
    if isinstance(error, Stopped):
        return {"stopped": str(error)}
    return {"refused": (error if isinstance(error, Refusal) else _failed("load", error)).as_json()}


@contextmanager
def _as_refusal(what: str) -> Iterator[None]:
    """Turn what DCP raises into our refusals: its CheckpointException is no Exception, so a loop could miss it."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        found = _first([pair[0] for _, pair in sorted(error.failures.items())])
        if isinstance(found, Refusal) or not isinstance(found, Exception):
            raise found from None
        raise _failed(what, found) from found
    except Refusal:
        raise
    except Exception as error:
        raise _failed(what, error) from error


def _first(failures: list[BaseException]) -> BaseException:
    """Return the failure that counts: the end of the process, then of the run, then a refusal, then any other."""
    for kind in (KeyboardInterrupt, SystemExit, Stopped, Refusal):
        for failure in failures:
            if isinstance(failure, kind):
                return failure
    return failures[0]


def _failed(what: str, error: BaseException) -> Unavailable:
    return Unavailable(
        f"the {what} failed on a rank: {type(error).__name__}", code="rank",
        next_step="look at the cause above; nothing was committed" if what == "save" else "look at the cause above",
    )
