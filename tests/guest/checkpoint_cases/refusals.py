"""What a save and a load refuse, each with the state or the store that is fine as its control."""

import errno
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from running import orders, refusal_of, same, step
from torch.distributed.checkpoint import CheckpointException

import interlock
from interlock import asking, checkpoint, dcp_save, layout, leash, wire
from interlock.errors import Conflict, Malformed, NotFound, Refusal, Stopped
from interlock.opened import OpenFiles, Source


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _saved(count: int = 2) -> tuple[int, dict[str, Any]]:
    """Save `count` tensors of one shape and a value; return the step and a state to load into."""
    state: dict[str, Any] = {f"t{n}": torch.randn(100) for n in range(count)}
    at = step()
    interlock.save({**state, "n": 1}, at)
    return at, {**{n: torch.zeros(100) for n in state}, "n": None}


def _message(call: Callable[[], object]) -> str:
    try:
        call()
    except Refusal as refusal:
        return f"{refusal.code} {refusal.message}"
    return ""


def case_a_flipped_byte() -> None:
    at, into = _saved()
    assert interlock.load(into, step=at) == at
    orders(alter="flip")
    assert refusal_of(lambda: interlock.load(into, step=at)) == "untrusted.digest"
    orders(checks_digests=False)  # and were the broker careless, the guest would not be
    assert refusal_of(lambda: interlock.load(into, step=at)) == "untrusted.sealed"
    orders(checks_digests=True)
    assert refusal_of(lambda: interlock.load(into)) == "untrusted.digest"


def case_a_plain_file() -> None:
    at, into = _saved()
    assert interlock.load(into, step=at) == at
    orders(alter="plain", checks_digests=False)
    assert refusal_of(lambda: interlock.load(into, step=at)) == "malformed.sealed"
    orders(checks_digests=True)


def case_files_that_changed_places() -> None:
    with patched(dcp_save, "FILE", 400):
        state = {"a": torch.randn(100), "b": torch.randn(100)}
        at = step()
        interlock.save(state, at, assets={})
    into = {n: torch.zeros(100) for n in state}
    assert interlock.load(into, step=at) == at
    orders(alter="swap", checks_digests=False)
    assert refusal_of(lambda: interlock.load(into, step=at)) == "untrusted.sealed"
    orders(checks_digests=True)


def case_a_file_of_an_older_step() -> None:
    _saved()
    at, into = _saved()
    assert interlock.load(into, step=at) == at
    orders(alter="older", checks_digests=False)
    assert refusal_of(lambda: interlock.load(into, step=at)) == "untrusted.sealed"
    orders(checks_digests=True)


def _saved_with(change: Callable[[layout.Layout], Any]) -> tuple[int, dict[str, Any]]:
    """Save with a layout that was changed by somebody who holds the key."""
    kept = dcp_save._layout
    with patched(dcp_save, "_layout", lambda metadata, results: change(kept(metadata, results))):
        return _saved()


def case_two_tensors_that_changed_places() -> None:
    def swapped(found: layout.Layout) -> layout.Layout:
        return replace(found, tensors={"t0": found.tensors["t1"], "t1": found.tensors["t0"]})

    at, into = _saved_with(lambda found: found)
    assert interlock.load(into, step=at) == at
    at, into = _saved_with(swapped)
    assert refusal_of(lambda: interlock.load(into, step=at)) == "untrusted.layout"
    assert not into["t0"].any()


def case_a_layout_about_other_files_than_the_manifest() -> None:
    def renamed(found: layout.Layout) -> layout.Layout:
        row = found.tensors["t0"]
        shard = replace(row.shards[0], parts=(replace(row.shards[0].parts[0], file="r9-9.sealed"),))
        return replace(found, tensors={**found.tensors, "t0": replace(row, shards=(shard,))})

    at, into = _saved_with(renamed)
    orders()
    assert refusal_of(lambda: interlock.load(into, step=at)) == "untrusted.layout"
    assert orders()["asked"].count("load_file") == 1  # the layout's own file, and no other
    files = OpenFiles(Source("l", "run", 1, frozenset({"r0-0.sealed"})))
    assert refusal_of(lambda: files.reader("r9-9.sealed")) == "untrusted.layout"
    assert orders()["asked"] == ["orders"]

    kept, at = layout.Layout.encode, step()
    without_b = lambda self: kept(replace(self, tensors={"a": self.tensors["a"]}))  # noqa: E731
    with patched(dcp_save, "FILE", 400), patched(layout.Layout, "encode", without_b):
        interlock.save({"a": torch.ones(100), "b": torch.ones(100)}, at, assets={})
    assert refusal_of(lambda: interlock.load({"a": torch.zeros(100)}, step=at)) == "untrusted.layout"


class _Sentinel:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


def case_a_pickle_in_place_of_the_layout_runs_nothing() -> None:
    armed, hostile = Path("armed"), Path("hostile")
    pickle.loads(pickle.dumps(_Sentinel(armed))).close()
    assert armed.exists()
    with patched(layout.Layout, "encode", lambda _: pickle.dumps(_Sentinel(hostile))):
        at, into = _saved()
    assert refusal_of(lambda: interlock.load(into, step=at)) == "untrusted.layout"
    with patched(layout, "encode_value", lambda *_: pickle.dumps(_Sentinel(hostile))):
        at, into = _saved()
    assert refusal_of(lambda: interlock.load(into, step=at)) == "untrusted.layout"
    assert not hostile.exists()


def case_torch_save_and_torch_load_are_never_reached() -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was about to be written or read")

    with patched(torch, "save", never), patched(torch, "load", never):
        at, into = _saved()
        assert interlock.load(into, step=at) == at
    assert into["n"] == 1


def case_a_state_that_does_not_fit() -> None:
    at, into = _saved()
    assert interlock.load(dict(into), step=at) == at
    for change, word in (
        ({"t0": torch.zeros(99)}, "'t0' was saved with shape [100]"),
        ({"t0": torch.zeros(100, dtype=torch.float64)}, "'t0' was saved as float32"),
        ({"t0": torch.zeros(100, dtype=torch.int32)}, "'t0' was saved as float32"),
        ({"t0": 3}, "'t0' is a tensor on one side"),
        ({"n": torch.zeros(1)}, "'n' is a tensor on one side"),
        ({"more": torch.zeros(1)}, "the checkpoint lacks 'more'"),
    ):
        message = _message(lambda change=change: interlock.load({**into, **change}, step=at))
        assert message.startswith("conflict.layout"), message
        assert word in message, message
    less = {n: v for n, v in into.items() if n != "t1"}
    assert "the state lacks 't1'" in _message(lambda: interlock.load(less, step=at))


def case_what_cannot_be_kept() -> None:
    twice: dict[str, Any] = {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}
    loop: list[Any] = []
    loop.append(loop)

    class Own(torch.Tensor):
        pass

    bad: dict[str, Any] = {
        "object": object(), "set": {1}, "tuple": (torch.ones(1),), "size": torch.Size([1]), "type": torch.float32,
        "sparse": torch.eye(3).to_sparse(), "meta": torch.ones(2, device="meta"), "own": torch.ones(1).as_subclass(Own),
        "module": {"inner": torch.nn.Linear(1, 1)}, "loop": loop, "key": {1.5: 2},
        "quantized": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
    }
    orders()
    for name, value in bad.items():
        message = _message(lambda value=value: interlock.save({"fine": torch.ones(1), "deep": {"x": value}}, step()))
        assert message.startswith("malformed.state"), (name, message)
        assert name == "key" or "deep.x" in message, message
    assert _message(lambda: interlock.save(twice, step())).startswith("malformed.state")
    for state, at in ((3, 1), ({}, -1), ({}, True), ({}, 1.0)):
        assert refusal_of(lambda state=state, at=at: interlock.save(state, at)) == "malformed.state"
    assert orders()["asked"] == ["orders"]  # all this was seen before anything was begun
    interlock.save({"fine": torch.ones(1), "deep": {"x": 1}}, step())


def case_assets_that_cannot_be_kept() -> None:
    assert interlock.save({}, step(), assets={"config.json": b"{}"})
    assert refusal_of(lambda: interlock.save({}, step(), assets={"../config.json": b"{}"})) == "malformed.asset_name"
    assert refusal_of(lambda: interlock.save({}, step(), assets={"config.json": "{}"})) == "malformed.state"
    with patched(dcp_save, "FILE", 10):
        assert refusal_of(lambda: interlock.save({}, step(), assets={"config.json": b" " * 11})) == "malformed.state"


def case_a_write_that_fails_fails_the_save() -> None:
    kept, count = dcp_save.Writer.add, iter(range(100))

    def full(self: Any, *args: Any) -> int:
        if next(count) == 1:
            raise OSError(errno.ENOSPC, "no space left")
        return kept(self, *args)

    at = step()
    state = {"a": torch.ones(3), "b": torch.ones(3)}
    with patched(dcp_save.Writer, "add", full):
        assert refusal_of(lambda: interlock.save(state, at)) == "unavailable.rank"
    found = orders()
    assert str(at) not in found["steps"]
    assert found["staged"] == 0
    assert found["asked"][-2:] == ["save_abort", "orders"]
    assert not any(os.readlink(f"/proc/self/fd/{fd}").endswith(".sealed") for fd in os.listdir("/proc/self/fd")
                   if os.path.islink(f"/proc/self/fd/{fd}"))
    interlock.save(state, at)


def case_other_items_than_planned_fail_the_save() -> None:
    kept = dcp_save.SealedWriter.write_data

    def forgetful(self: Any, plan: Any, planner: Any) -> Any:
        return kept(self, replace(plan, items=plan.items[:-1]), planner)

    def twice(self: Any, plan: Any, planner: Any) -> Any:
        found = kept(self, plan, planner).value()
        again: Any = torch.futures.Future()
        again.set_result(found + found)
        return again

    at = step()
    state = {"a": torch.ones(3), "b": torch.ones(3)}
    for odd in (forgetful, twice):
        with patched(dcp_save.SealedWriter, "write_data", odd):
            assert refusal_of(lambda: interlock.save(state, at)) == "conflict.items"
    assert str(at) not in orders()["steps"]
    interlock.save(state, at)


def case_a_stop_ends_the_loop() -> None:
    at, into = _saved()
    orders(stopped=True)
    try:
        for call in (
            lambda: interlock.save({}, step()), lambda: interlock.load(into, step=at), interlock.latest,
            lambda: interlock.asset("config.json"),
        ):
            try:
                call()
            except Exception as error:
                raise AssertionError("a loop that catches exceptions would go on") from error
            except Stopped:
                continue
            raise AssertionError("it went on")
    finally:
        orders(stopped=False)
    assert interlock.latest() == at


def case_keys_that_do_not_come() -> None:
    at, into = _saved()
    with patched(asking, "PATIENCE_MS", 300):
        orders(late_keys=100)
        assert refusal_of(lambda: interlock.load(into, step=at)) == "unavailable.keys"
        orders(late_keys=0)
    assert interlock.load(into, step=at) == at


def case_an_interrupt_stays_an_interrupt() -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    at = step()
    with patched(dcp_save.Writer, "add", interrupted):
        try:
            interlock.save({"a": torch.ones(1)}, at)
        except KeyboardInterrupt:
            pass
        except CheckpointException as error:
            raise AssertionError("DCP's own exception came through") from error
    assert orders()["staged"] == 0


def case_nothing_there() -> None:
    into = {"x": torch.zeros(1)}
    assert refusal_of(lambda: interlock.load(into, step=10**6)) == "not_found.checkpoint"
    assert refusal_of(lambda: interlock.load(into, version="sha256:" + "0" * 64)) == "not_found.checkpoint"
    assert refusal_of(lambda: interlock.load(into, step=1, version="sha256:" + "0" * 64)) == "malformed.state"

    def answer(code: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> None:
            raise NotFound("no", code=code)
        return refuse

    with patched(checkpoint, "ask", answer("checkpoint")):
        assert interlock.latest() is None
    with patched(checkpoint, "ask", answer("op")):
        assert refusal_of(interlock.latest) == "not_found.op"


def case_outside_a_run() -> None:
    at, into = _saved()
    with patched(os, "environ", {**os.environ, wire.SOCKET_ENV: "/nowhere/s"}):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert interlock.latest() is None
        assert [str(w.category.__name__) for w in said] == ["RuntimeWarning"]
        assert refusal_of(lambda: interlock.save({}, step())) == "unavailable.broker"
        assert refusal_of(lambda: interlock.load(into, step=at)) == "unavailable.broker"
        assert refusal_of(lambda: interlock.asset("config.json")) == "unavailable.broker"
    leash._state["warned"] = False


def case_a_broker_that_answers_nonsense() -> None:
    at, into = _saved()
    kept = checkpoint.ask
    for change in (
        {"files": None}, {"files": [{"name": "../../etc/passwd", "size": 1}]}, {"step": None}, {"files": [{"size": 1}]},
    ):
        with patched(checkpoint, "ask", lambda *a, change=change, **k: {**kept(*a, **k), **change}):
            assert refusal_of(lambda: interlock.load(into, step=at)).startswith("malformed"), change
    before = into["t0"].clone()
    assert interlock.load(into, step=at) == at
    assert not same(before, into["t0"])


def case_what_dcp_raises_is_ours() -> None:
    assert not issubclass(CheckpointException, Exception)  # why a loop that catches exceptions would miss it

    def odd(*_: Any) -> None:
        raise ValueError("with words of the state in it")

    message = ""
    with patched(dcp_save.Writer, "add", odd):
        message = _message(lambda: interlock.save({"a": torch.ones(1)}, step()))
    assert message == "unavailable.rank the save failed on a rank: ValueError"
    first = checkpoint._first([ValueError(), Malformed("x"), Stopped("y")])
    assert isinstance(first, Stopped)
    assert isinstance(checkpoint._first([ValueError(), Conflict("x")]), Conflict)
