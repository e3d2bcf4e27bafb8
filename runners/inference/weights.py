"""A model from a sealed version: built hollow from its config, then filled file by file through the broker.

No plaintext weight file exists at any time. Only names on a list below become a model: no code comes with weights,
and the tokenizer is read from its JSON alone, whatever class its config names.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

from interlock import checkpoint
from interlock.errors import Conflict, Malformed, NotFound
from runners.inference.embedding import VectorModel
from runners.inference.frames import Kind
from runners.inference.generating import TextModel, room

ARCHITECTURES: dict[str, tuple[Any, Any, Kind]] = {
    "LlamaForCausalLM": (LlamaForCausalLM, LlamaConfig, "text"),
    "BertModel": (BertModel, BertConfig, "embedding"),
}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOKENIZER_TOO = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class Source(Protocol):
    """Where a version comes from."""

    def asset(self, name: str) -> bytes | None:
        """Return the bytes of an asset, or None when the version has none of that name."""

    def fill(self, state: dict[str, Any]) -> None:
        """Fill every tensor of `state` in place; raises a Refusal when one is missing or of another shape."""


@dataclass(frozen=True)
class Sealed:
    """The version of that digest, through this run's broker."""

    version: str

    def asset(self, name: str) -> bytes | None:
        """Return the bytes of an asset; raises what the broker refuses."""
        try:
            return checkpoint.asset(name, version=self.version)
        except NotFound:
            return None

    def fill(self, state: dict[str, Any]) -> None:
        """Fill the tensors in place, each decrypted straight into its memory; raises what the broker refuses.

        Names are those of the model's `state_dict()`, or the same below `model`: `save({"model": model}, …)`.
        """
        try:
            checkpoint.load(state, version=self.version)
        except Conflict as differs:
            try:
                checkpoint.load({"model": state}, version=self.version)
            except Conflict:
                raise differs from None


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to be started."""

    kind: Kind
    model: TextModel | VectorModel


def load(source: Source) -> Loaded:
    """Return the model of a version, on the accelerator where the host has one.

    Raises Malformed (``malformed.model``) for a config that names no model of the list, and what `source` raises.
    """
    config = _json(source, CONFIG)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise Malformed("this engine does not know the architecture that config.json names", code="model",
                        next_step=f"serve one of: {', '.join(sorted(ARCHITECTURES))}")
    cls, config_cls, kind = ARCHITECTURES[names[0]]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _filled(_hollow(cls, _settings(config_cls, config)), source, _type(config), device)
    tokenizer = _tokenizer(source)
    if kind == "embedding":
        return Loaded(kind, VectorModel(model, tokenizer))
    return Loaded(kind, TextModel(model, tokenizer, _ends(source, model.config), room(device)))


def _json(source: Source, name: str) -> dict[str, Any]:
    data = source.asset(name)
    try:
        found = json.loads(data or b"")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Malformed(f"the version has no {name} that can be read", code="model",
                        next_step="save it with its assets: interlock.save(state, step, assets={...})")
    return found


def _settings(cls: Any, config: Mapping[str, Any]) -> Any:
    found = cls.from_dict(dict(config))
    found._attn_implementation = "sdpa"  # a config could name a kernel to be fetched from elsewhere
    return found


def _type(config: Mapping[str, Any]) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in TYPES:
        raise Malformed("the version's numbers are of a type that this engine does not know", code="model",
                        next_step=f"save it as one of: {', '.join(TYPES)}")
    return TYPES[name]


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Let modules make their parameters on the meta device; buffers (rotary tables, positions) stay real: they are
    in no checkpoint."""
    real = torch.nn.Module.register_parameter

    def light(self: Any, name: str, given: Any) -> None:
        real(self, name, given)
        if given is not None:
            self._parameters[name] = torch.nn.Parameter(given.detach().to("meta"), requires_grad=False)

    torch.nn.Module.register_parameter = light
    try:
        with no_init_weights():
            yield
    finally:
        torch.nn.Module.register_parameter = real


def _hollow(cls: Any, config: Any) -> Any:
    with _parameters_without_memory():
        return cls(config).eval()


def _filled(model: Any, source: Source, dtype: torch.dtype, device: torch.device) -> Any:
    state = {
        name: torch.empty(hollow.shape, dtype=dtype if hollow.is_floating_point() else hollow.dtype, device=device)
        for name, hollow in model.state_dict().items()
    }
    source.fill(state)
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    return model.to(device).requires_grad_(False)


def _tokenizer(source: Source) -> Any:
    found = {name: source.asset(name) for name in (TOKENIZER, *TOKENIZER_TOO)}
    if found[TOKENIZER] is None:
        raise Malformed("the version has no tokenizer.json", code="model", next_step="save it with its assets")
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
        for name, data in found.items():
            if data is not None:
                (Path(folder) / name).write_bytes(data)
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _ends(source: Source, config: Any) -> frozenset[int]:
    """Return the tokens that end an answer: those of generation_config.json, else of config.json."""
    value = config.eos_token_id
    if source.asset(GENERATION) is not None:
        value = _json(source, GENERATION).get("eos_token_id", value)
    rows = value if isinstance(value, list) else [value]
    return frozenset(one for one in rows if isinstance(one, int) and one >= 0)
