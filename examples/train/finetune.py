"""Go on from a registered version for a few steps, on one rank: fits the strict sandbox of the upper tiers.

    interlock train --tier high --weights bytes --model frontier --data text=/usr/share/doc -- \
        examples/train/finetune.py --steps 10

The parent is the version in the plan (`INTERLOCK_WEIGHTS`, or `--parent DIGEST`). Its config and tokenizer are taken
over, its tensors loaded through the broker, and what comes out is saved as weights whose lineage names it.
"""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import interlock
from interlock.errors import NotFound

ASSETS = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def options() -> argparse.Namespace:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--parent", default=os.environ.get("INTERLOCK_WEIGHTS", "").partition(",")[0])
    words.add_argument("--text", type=Path, default=Path("/data/text"))
    words.add_argument("--steps", type=int, default=10)
    words.add_argument("--context", type=int, default=128)
    words.add_argument("--rate", type=float, default=5e-4)
    given = words.parse_args()
    if not given.parent:
        words.error("name the parent: --weights MODEL at interlock train, or --parent DIGEST")
    return given


def assets_of(parent: str) -> dict[str, bytes]:
    """Return the parent's files; what it does not have is left out."""
    found = {}
    for name in ASSETS:
        try:
            found[name] = interlock.asset(name, version=parent)
        except NotFound:
            continue
    return found


def first_bytes(folder: Path, size: int = 1_000_000) -> torch.Tensor:
    """Return text of the folder, as byte numbers; without a folder, text of this very file."""
    parts, have = [], 0
    for path in sorted(folder.rglob("*")) if folder.is_dir() else [Path(__file__)]:
        if path.is_file() and not path.is_symlink() and (path.suffix in (".txt", ".md", ".rst", ".py")
                                                         or path.name in ("copyright", "METADATA")):
            parts.append(path.read_bytes())
            have += len(parts[-1])
        if have > size:
            break
    return torch.frombuffer(bytearray(b"".join(parts)[:size]), dtype=torch.uint8)


def main() -> None:
    given = options()
    assets = assets_of(given.parent)
    model = LlamaForCausalLM(LlamaConfig.from_dict(json.loads(assets["config.json"])))
    weights = {"model": model.state_dict()}
    interlock.load(weights, version=given.parent)
    model.load_state_dict(weights["model"])
    print(f"goes on from {given.parent[:23]}", flush=True)
    text, optimizer = first_bytes(given.text), torch.optim.AdamW(model.parameters(), lr=given.rate)
    draw = torch.Generator().manual_seed(7)
    first = last = 0.0
    for n in range(1, given.steps + 1):
        starts = torch.randint(0, max(1, len(text) - given.context), (8,), generator=draw)
        tokens = torch.stack([text[s:s + given.context] for s in starts]).long()
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        last = float(loss.detach())
        first = first or last
        interlock.step(n, loss_micro=int(last * 1e6))
    digest = interlock.save({"model": model.state_dict()}, given.steps, assets=assets)
    print(json.dumps({"result": {"weights": digest, "parent": given.parent, "loss_first": round(first, 4),
                                 "loss_last": round(last, 4)}}), flush=True)


if __name__ == "__main__":
    main()
