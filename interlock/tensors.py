"""Tensors as bytes in memory, and a training state as a flat list of names. Needs torch.

What is not a plain strided tensor or a DTensor is refused by its name: raw bytes of anything else (sparse,
quantized, a subclass with a life of its own) would come back as something different.
"""

import ctypes
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from interlock import layout
from interlock.chunks import MAX_DIMENSIONS, MAX_NAME
from interlock.errors import Malformed

DTYPES: Final = {name: getattr(torch, name) for name in layout.DTYPES}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def _odd(message: str, next_step: str) -> Malformed:
    return Malformed(message, code="state", next_step=next_step)


@dataclass(frozen=True)
class Leaf:
    """One tensor or value of a state, and the container that holds it: `holder[key]`."""

    holder: Any
    key: Any
    value: Any

    @property
    def is_tensor(self) -> bool:
        """Return whether it is a tensor."""
        return isinstance(self.value, torch.Tensor)


@dataclass(frozen=True)
class Spread:
    """A state taken apart: `leaves` by name; `owners` the objects whose state_dict() was taken, with that dict."""

    leaves: dict[str, Leaf]
    owners: tuple[tuple[Any, dict[str, Any]], ...]


def spread(state: MutableMapping[str, Any]) -> Spread:
    """Take `state` apart into named leaves.

    A name is the keys on the way, joined by dots. Objects with `state_dict` and `load_state_dict` (modules,
    optimizers, schedulers) stand at the top level. Lists are entered only when tensors or dicts lie in them. Raises
    Malformed (``malformed.state``).
    """
    if not isinstance(state, MutableMapping):
        raise _odd("a state is a dict", "call save({'model': model, …}, step)")
    leaves: dict[str, Leaf] = {}
    owners = []
    for key, value in state.items():
        if isinstance(value, Stateful):
            taken = value.state_dict()
            owners.append((value, taken))
            _walk((_part(key),), Leaf(state, key, taken), leaves)
        else:
            _walk((_part(key),), Leaf(state, key, value), leaves)
    return Spread(leaves, tuple(owners))


def _part(key: object) -> str:
    if type(key) not in (str, int):
        raise _odd("a key of the state is neither text nor a whole number", "use text keys")
    return str(key)


def _walk(path: tuple[str, ...], leaf: Leaf, leaves: dict[str, Leaf]) -> None:
    value = leaf.value
    if len(path) > layout.MAX_DEPTH:
        raise _odd("the state is nested too deeply", "flatten it")
    if isinstance(value, Mapping) and value:
        for key, inside in value.items():
            _walk((*path, _part(key)), Leaf(value, key, inside), leaves)
        return
    if isinstance(value, list) and _has_parts(value, 0):
        for number, inside in enumerate(value):
            _walk((*path, str(number)), Leaf(value, number, inside), leaves)
        return
    name = ".".join(path)
    if name in leaves:
        raise _odd(f"two entries of the state are both called {name!r}", "rename a key")
    if not 1 <= len(name) <= MAX_NAME:
        raise _odd(f"a name of the state is longer than {MAX_NAME} characters", "use shorter keys")
    if leaf.is_tensor:
        check(name, value)
    leaves[name] = leaf


def _has_parts(values: list[Any], depth: int) -> bool:
    return depth <= layout.MAX_DEPTH and any(
        isinstance(v, torch.Tensor | Mapping) or (isinstance(v, list) and _has_parts(v, depth + 1)) for v in values
    )


def check(name: str, tensor: Any) -> None:
    """Refuse a tensor whose bytes would not come back as the same tensor; raises Malformed (``malformed.state``)."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
        raise _odd(f"tensor {name!r} is a pending sum over ranks", "redistribute it before the save")
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise _odd(f"tensor {name!r} is a {type(local).__name__}", "keep plain tensors and DTensors")
    if local.layout is not torch.strided or local.is_quantized or local.device.type == "meta":
        raise _odd(f"tensor {name!r} has no plain bytes in memory", "give it strided memory on a device first")
    if local.dtype not in NAMES or local.dim() >= MAX_DIMENSIONS:
        raise _odd(f"tensor {name!r} is of a kind that is not kept: {local.dtype}", "convert it first")


def memory(tensor: Any) -> memoryview:
    """Return the bytes of a contiguous tensor of this host as they lie in memory; the caller keeps it alive."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def on_host(tensor: Any) -> Any:
    """Return a contiguous tensor of this host with the same elements: the same memory where that is possible."""
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def is_plain_memory(tensor: Any) -> bool:
    """Return whether bytes may be written straight into this tensor."""
    return bool(
        tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    )


def prime(optimizer: Any) -> None:
    """Give an optimizer that never stepped its state, so that there is something to load into.

    One step with a rate of 0 over gradients of 0; rates and gradients are put back. Parameters do not move.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    grads = [p.grad for p in params]
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    try:
        for p in params:
            p.grad = torch.zeros_like(p)
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = rates.pop(0)
