"""Vectors: the mean of the last layer over the tokens of a text, scaled to unit length."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from runners.inference.dialing import Vectors, VectorsOnly

LONGEST = 256
TOGETHER = 32
DIGITS = 8


class VectorModel(VectorsOnly):
    """An encoder and its tokenizer. One batch at a time: calls of several connections take turns."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._turn = threading.Lock()
        self.context = min(LONGEST, int(model.config.max_position_embeddings))

    def start(self) -> None:
        """Have nothing to begin."""

    def stop(self) -> None:
        """Have nothing to end."""

    @property
    def alive(self) -> bool:
        """Return True: nothing runs between two calls."""
        return True

    def embed(self, texts: Sequence[str], gone: Callable[[], bool]) -> Vectors:
        """Return a vector of unit length for each text, and the tokens read; stops early when `gone`."""
        rows: list[list[float]] = []
        read = 0
        for start in range(0, len(texts), TOGETHER):
            if gone():
                break
            with self._turn:
                found, count = self._some(list(texts[start:start + TOGETHER]))
            rows += found
            read += count
        return rows, read

    def _some(self, texts: list[str]) -> tuple[list[list[float]], int]:
        given = self._tokenizer(texts, padding=True, truncation=True, max_length=self.context, return_tensors="pt")
        given = given.to(self._model.device)
        mask = given["attention_mask"]
        with torch.inference_mode():
            last = self._model(**given).last_hidden_state.float()
        weight = mask.unsqueeze(-1).to(last.dtype)
        mean = (last * weight).sum(1) / weight.sum(1).clamp(min=1.0)
        unit = torch.nn.functional.normalize(mean, dim=1).cpu().tolist()
        return [[round(x, DIGITS) for x in row] for row in unit], int(mask.sum())
