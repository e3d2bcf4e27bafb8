"""Several ranks over gloo: saved on 2, loaded on 1, 2 and 3; what fails on one rank fails on all."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from running import orders, ranks, refusal_of, step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import interlock
from interlock import asking, checkpoint, dcp_save
from interlock.errors import Stopped
from interlock.tensors import memory, on_host

HERE = Path.cwd()


def _build(sharded: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2, bias=False))
    if sharded:
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for n in range(steps):
        torch.manual_seed(n)
        optimizer.zero_grad()
        model(torch.randn(4, 6)).pow(2).sum().backward()
        optimizer.step()


def _digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return a digest of each whole tensor of model and optimizer."""
    found: dict[str, Any] = dict(model.state_dict())
    for n, row in optimizer.state_dict()["state"].items():
        found.update({f"{n}.{k}": v for k, v in row.items()})
    whole = {n: on_host(t.full_tensor() if isinstance(t, DTensor) else t) for n, t in found.items()}
    return {n: hashlib.sha256(bytes(memory(t))).hexdigest() for n, t in whole.items()}


def _save_sharded(at: int) -> None:
    model, optimizer = _build(True)
    _train(model, optimizer, 3)
    digest = interlock.save({"model": model, "optimizer": optimizer, f"seen.{dist.get_rank()}": dist.get_rank()}, at)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, digest)
    assert set(told) == {digest}
    found = _digests(model, optimizer)
    if dist.get_rank() == 0:
        (HERE / "whole.json").write_text(json.dumps(found))


def _load_and_compare(at: int, sharded: bool) -> None:
    model, optimizer = _build(sharded)
    seen = {f"seen.{n}": None for n in range(2)}
    assert interlock.load({"model": model, "optimizer": optimizer, **seen}, step=at) == at
    assert _digests(model, optimizer) == json.loads((HERE / "whole.json").read_text())


def case_saved_on_two_ranks_loads_on_one_two_and_three() -> None:
    at = step()
    orders()
    assert ranks(2, lambda: _save_sharded(at), HERE) == [0, 0]
    asked = orders()["asked"]
    assert [asked.count(op) for op in ("save_begin", "save_file", "save_commit")] == [1, 3, 1]
    _load_and_compare(at, sharded=False)
    for count in (2, 3):
        assert ranks(count, lambda: _load_and_compare(at, sharded=True), HERE) == [0] * count


def case_sharded_weights_bring_all_of_it() -> None:
    def save() -> None:
        model, _ = _build(True)
        interlock.save({"model": model}, at, assets={"config.json": b"{}"})

    at = step()
    assert ranks(2, save, HERE) == [0, 0]
    model, _ = _build(False)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert interlock.load({"model": model}, step=at) == at
    fresh, _ = _build(False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def case_cut_along_the_second_dimension() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(42, dtype=torch.float32).reshape(6, 7)

    def save() -> None:
        mesh = init_device_mesh("cpu", (2,))
        interlock.save({"w": distribute_tensor(whole, mesh, [Shard(1)])}, at)

    def load() -> None:
        mesh = init_device_mesh("cpu", (3,))
        target = distribute_tensor(torch.zeros(6, 7), mesh, [Shard(0)])
        interlock.load({"w": target}, step=at)
        assert torch.equal(target.full_tensor(), whole)

    at = step()
    assert ranks(2, save, HERE) == [0, 0]
    assert ranks(3, load, HERE) == [0, 0, 0]
    target = torch.zeros(6, 7)
    interlock.load({"w": target}, step=at)
    assert torch.equal(target, whole)


def case_a_pending_sum_is_refused() -> None:
    from torch.distributed.tensor import Partial

    def save() -> None:
        mesh = init_device_mesh("cpu", (2,))
        pending = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        assert refusal_of(lambda: interlock.save({"w": pending}, at)) == "malformed.state"
        interlock.save({"w": pending.redistribute(mesh, [dist.tensor.Replicate()])}, at)

    at = step()
    assert ranks(2, save, HERE) == [0, 0]


def case_a_write_that_fails_on_one_rank_fails_on_all() -> None:
    def save() -> None:
        model, _ = _build(True)
        kept = dcp_save.Writer.add

        def full(*_: Any) -> int:
            raise OSError("no space left")

        if os.environ["RANK"] == "1":
            dcp_save.Writer.add = full
        assert refusal_of(lambda: interlock.save({"model": model}, at)) == "unavailable.rank"
        dist.barrier()
        if dist.get_rank() == 0:
            found = orders()
            assert str(at) not in found["steps"], found
            assert found["staged"] == 0, found
        dist.barrier()
        dcp_save.Writer.add = kept
        assert interlock.save({"model": model}, at).startswith("sha256:")

    at = step()
    assert ranks(2, save, HERE) == [0, 0]


def case_a_stop_that_one_rank_hears_ends_all() -> None:
    def save() -> None:
        model, _ = _build(True)
        if os.environ["RANK"] == "1":
            def stopped(*_: Any, **__: Any) -> None:
                raise Stopped("the lease is gone")
            dcp_save.ask_for_file = stopped
        assert refusal_of(lambda: interlock.save({"model": model}, at)) == "stopped"

    at = step()
    assert ranks(2, save, HERE) == [0, 0]
    assert str(at) not in orders()["steps"]


def case_a_refused_load_is_refused_on_all() -> None:
    def load() -> None:
        assert refusal_of(lambda: interlock.load({"x": torch.zeros(1)}, step=10**6)) == "not_found.checkpoint"
        odd = {"x": torch.zeros(1 + dist.get_rank())}  # fits on rank 0 alone
        assert refusal_of(lambda: interlock.load(odd, step=at)) == "conflict.layout"
        assert interlock.load({"x": torch.zeros(1)}, step=at) == at
        kept = checkpoint._begin_answer
        if dist.get_rank() == 0:
            checkpoint._begin_answer = lambda *_: 1 / 0
        try:
            assert refusal_of(lambda: interlock.load({"x": torch.zeros(1)}, step=at)) == "unavailable.rank"
        except ZeroDivisionError:
            assert dist.get_rank() == 0
        checkpoint._begin_answer = kept
        dist.barrier()
        if dist.get_rank() == 0:
            orders(stopped=True)
        dist.barrier()
        assert refusal_of(lambda: interlock.load({"x": torch.zeros(1)}, step=at)) == "stopped"

    at = step()
    interlock.save({"x": torch.ones(1)}, at)
    try:
        assert ranks(2, load, HERE) == [0, 0]
    finally:
        orders(stopped=False)


def case_a_rank_that_dies_leaves_nothing_committed() -> None:
    def save() -> None:
        model, _ = _build(True)
        if os.environ["RANK"] == "1":
            dcp_save.ask_for_file = lambda *_, **__: os._exit(9)
        assert refusal_of(lambda: interlock.save({"model": model}, at)) == "unavailable.rank"
        os._exit(0)  # the group is broken: there is nothing to take down together

    at = step()
    assert ranks(2, save, HERE) == [0, 9]
    assert str(at) not in orders()["steps"]
    assert asking.ask("save_begin", step=at, kind="state")["save"]
