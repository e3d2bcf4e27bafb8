"""Train a small Llama-style model on the bytes of real text, on one or several ranks, with sealed checkpoints.

    interlock train --ranks 2 --data text=/usr/share/doc -- examples/train/train_bytes.py --steps 120 --save-every 20

A rank that dies takes the others along; the control plane starts the run again and it goes on from its last
committed step. At the end it says how many bits it needs for a byte of text that it has never seen, beside a model
that only knows how often each byte occurs, and saves its weights with all that an engine needs to serve them.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import interlock

BYTES, END = 256, 256
SPECIAL = {END: "<|end|>"}
BLOCK, HELD_OUT = 4096, 20  # of twenty blocks of text one is held out
NAMES = ("METADATA", "copyright")
ENDINGS = (".txt", ".md", ".rst")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def options() -> argparse.Namespace:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--text", type=Path, default=Path("/data/text"))
    words.add_argument("--steps", type=int, default=120)
    words.add_argument("--save-every", type=int, default=20)
    words.add_argument("--batch", type=int, default=16, help="sequences of each rank in a step")
    words.add_argument("--context", type=int, default=128)
    words.add_argument("--width", type=int, default=128)
    words.add_argument("--layers", type=int, default=2)
    words.add_argument("--rate", type=float, default=6e-3)
    words.add_argument("--megabytes", type=float, default=4.0, help="text that is read at most")
    words.add_argument("--slow", type=float, default=0.0, help="seconds to wait in a step, for whoever wants to watch")
    return words.parse_args()


# --- text ---------------------------------------------------------------------------------------------------------
def read_text(folder: Path, limit: int) -> bytes:
    """Return the texts below `folder` in order of their names, each once, at most `limit` bytes."""
    found, seen, size = [], set(), 0
    for path in sorted(p for p in folder.rglob("*") if is_text(p)):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        mark = hashlib.sha256(data).digest()
        if mark in seen or b"\0" in data:
            continue
        seen.add(mark)
        found.append(data + b"\n")
        size += len(data) + 1
        if size >= limit:
            break
    return b"".join(found)[:limit]


def is_text(path: Path) -> bool:
    known = path.name in NAMES or path.name.startswith("LICENSE") or path.suffix in ENDINGS
    return known and path.is_file() and not path.is_symlink()


def split(text: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (what is trained on, what is held out): of each twenty blocks the last."""
    blocks = [text[i:i + BLOCK] for i in range(0, len(text), BLOCK)]
    kept = b"".join(b for i, b in enumerate(blocks) if i % HELD_OUT != HELD_OUT - 1)
    held = b"".join(b for i, b in enumerate(blocks) if i % HELD_OUT == HELD_OUT - 1)
    return tuple(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (kept, held))


def unigram_bits(train: torch.Tensor, held: torch.Tensor) -> float:
    """Return the bits a byte of a model that only knows how often each byte occurs."""
    counts = torch.bincount(train.long(), minlength=BYTES).double() + 1
    return float(-(counts / counts.sum()).log2()[held.long()].mean())


def batch_of(text: torch.Tensor, step: int, rank: int, size: int, context: int) -> torch.Tensor:
    """Return the sequences of one rank in one step: the same after a restart as without one."""
    draw = torch.Generator().manual_seed(step * 1009 + rank)
    starts = torch.randint(0, len(text) - context, (size,), generator=draw)
    return torch.stack([text[s:s + context] for s in starts]).long()


# --- model --------------------------------------------------------------------------------------------------------
def config_of(given: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=BYTES + len(SPECIAL), hidden_size=given.width, intermediate_size=given.width * 8 // 3,
        num_hidden_layers=given.layers, num_attention_heads=max(1, given.width // 32), max_position_embeddings=8192,
        bos_token_id=END, eos_token_id=END, pad_token_id=END, architectures=["LlamaForCausalLM"], dtype="float32",
    )


def byte_tokenizer() -> bytes:
    """Return a tokenizer.json whose token n is the byte n: byte-level BPE that merges nothing."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {sign: number for number, sign in enumerate(signs())}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for _, word in sorted(SPECIAL.items())])
    return made.to_str().encode()


def signs() -> list[str]:
    """Return the sign by which byte-level BPE writes each byte: itself where it can be seen, else one beyond 255."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    found = {byte: chr(byte) for byte in seen}
    hidden = (byte for byte in range(BYTES) if byte not in found)
    found.update({byte: chr(BYTES + n) for n, byte in enumerate(hidden)})
    return [found[byte] for byte in range(BYTES)]


def assets(config: LlamaConfig) -> dict[str, bytes]:
    """Return the files beside the weights that an engine reads."""
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[END], "pad_token": SPECIAL[END],
             "model_max_length": config.max_position_embeddings, "clean_up_tokenization_spaces": False,
             "chat_template": TEMPLATE}
    return {"config.json": json.dumps(config.to_dict()).encode(), "tokenizer.json": byte_tokenizer(),
            "tokenizer_config.json": json.dumps(words).encode(), "chat_template.jinja": TEMPLATE.encode()}


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(tokens).logits[:, :-1, :BYTES]
    return torch.nn.functional.cross_entropy(scores.reshape(-1, BYTES), tokens[:, 1:].reshape(-1))


@torch.no_grad()
def held_out_bits(model: Any, held: torch.Tensor, context: int, most: int = 24) -> float:
    """Return the bits a byte on held-out text. Every rank walks the same way: the shards are gathered for each."""
    rows = held[: len(held) // context * context].view(-1, context).long()
    rows = rows[:: max(1, len(rows) // (most * 8))][: most * 8]
    losses = [loss_of(model, rows[i:i + 8]) * len(rows[i:i + 8]) for i in range(0, len(rows), 8)]
    return float(torch.stack(losses).sum() / len(rows)) / math.log(2)


# --- training -----------------------------------------------------------------------------------------------------
def mean_over_ranks(loss: torch.Tensor, world: int) -> float:
    found = loss.detach().clone()
    if world > 1:
        dist.all_reduce(found)
    return float(found) / world


class Training:
    """Model, optimizer and where they stand; all ranks do the same."""

    def __init__(self, given: argparse.Namespace, rank: int, world: int) -> None:
        self.given, self.rank, self.world = given, rank, world
        torch.manual_seed(1)
        self.config = config_of(given)
        self.model = LlamaForCausalLM(self.config)
        if world > 1:
            mesh = init_device_mesh("cpu", (world,))
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=given.rate, betas=(0.9, 0.95))

    def state(self, step: int) -> dict[str, Any]:
        """Return all that a restart needs."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": step}

    def resume(self) -> int:
        """Go on from the newest committed checkpoint; return the first step that is still to be done."""
        step = interlock.latest()
        if step is None:
            return 0
        if step >= self.given.steps:  # only the report was missing
            weights = {"model": self.model.state_dict()}
            interlock.load(weights, step=step)
            self.model.load_state_dict(weights["model"])
            return step
        state = self.state(0)
        interlock.load(state, step=step)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])
        self.say(f"resumes at step {step}")
        return step

    def step(self, text: torch.Tensor, n: int) -> None:
        """Do step `n` (from 1) and report it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.given.rate * min(1.0, n / 10) * (1.02 - n / self.given.steps)
        loss = loss_of(self.model, batch_of(text, n, self.rank, self.given.batch, self.given.context))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        mean = mean_over_ranks(loss, self.world)
        if self.rank == 0:
            interlock.step(n, loss_micro=int(mean * 1e6))
        if n % 10 == 0 or n == 1:
            self.say(f"step {n} loss {mean:.3f}")
        time.sleep(self.given.slow)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def main() -> None:
    given = options()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    train, held = split(read_text(given.text, int(given.megabytes * 1e6)))
    work = Training(given, rank, world)
    work.say(f"{len(train)} bytes to train on, {len(held)} held out, "
             f"{sum(p.numel() for p in work.model.parameters())} parameters, {world} rank(s)")
    first, began = work.resume(), time.monotonic()
    for n in range(first + 1, given.steps + 1):
        work.step(train, n)
        if n % given.save_every == 0 and n < given.steps:
            interlock.save(work.state(n), n)
            work.say(f"committed step {n}")
    took = time.monotonic() - began
    bits = held_out_bits(work.model, held, given.context)
    digest = ""
    if first < given.steps:
        digest = interlock.save({"model": work.model.state_dict()}, given.steps, assets=assets(work.config))
    work.say(json.dumps({"result": {
        "model_bits_per_byte": round(bits, 4), "unigram_bits_per_byte": round(unigram_bits(train, held), 4),
        "steps": given.steps, "resumed_from": first, "seconds": round(took, 1), "weights": digest}}))
    if world > 1:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
