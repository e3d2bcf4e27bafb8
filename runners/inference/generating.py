"""Text: the continuous batching of transformers, called in this process (docs/decisions/0005-engine.md).

Calls of all connections grow in one batch, a token each step. Ours are: the choice of a token (each call has its
own temperature, top_p and seed; the library has one generator for all), the size of the cache (the library would
take what the machine has, not what the sandbox may use) and the end of a call. Blocks of the cache are never
shared between calls: how long an answer takes would tell what somebody else had asked.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)

from interlock.errors import Malformed, Unavailable
from runners.inference.dialing import Answer, TextOnly
from runners.inference.frames import CONNECTIONS, Complete

PAGE = 32
COLDEST = 1e-4


@dataclass(frozen=True)
class Room:
    """What the cache may take: `tokens` of all calls together, `batch` of one step, `bytes` of keys and values."""

    tokens: int
    batch: int
    bytes: int


CPU = Room(tokens=32_768, batch=256, bytes=256 << 20)


def room(device: torch.device) -> Room:
    """Return the room of a device: fixed on a CPU (the sandbox's limit cannot be seen from inside), else half of
    what is free."""
    if device.type != "cuda":
        return CPU
    free, _ = torch.cuda.mem_get_info(device)
    return Room(tokens=131_072, batch=2_048, bytes=free // 2)


@dataclass(eq=False)
class Draw:
    """How one call chooses its tokens."""

    temperature: float
    top_p: float
    source: Any

    @classmethod
    def of(cls, asked: Complete) -> "Draw":
        """Return the choice that a call asks for; without a seed it is another one each time."""
        source = torch.Generator("cpu")  # the same numbers on every device
        if asked.seed is None:
            source.seed()
        else:
            source.manual_seed(asked.seed)
        return cls(asked.temperature, asked.top_p, source)

    @property
    def greedy(self) -> bool:
        """Return whether the likeliest token is always taken."""
        return self.temperature < COLDEST

    def pick(self, scores: torch.Tensor) -> int:
        """Return a token by one row of scores."""
        row = scores.detach().to("cpu", torch.float32)
        if bool(row.isnan().any()):
            return 0  # weights without sense must not end the batch that others share
        chances, order = torch.softmax((row - row.max()) / self.temperature, -1).sort(descending=True)
        keep = chances.cumsum(0) - chances < self.top_p
        keep[0] = True
        place = torch.multinomial(chances * keep, 1, generator=self.source)
        return int(order[place])


class Picker(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Leaves exactly one token possible in each row that is not greedy; the library then takes the likeliest."""

    supported_kwargs: ClassVar[dict[str, type]] = {}
    ignored_kwargs: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.draws: dict[str, Draw] = {}
        self.drawn = 0
        self._rows: list[Draw | None] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Have nothing to fill in."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Remember whose rows come next, in their order."""
        self._rows = [self.draws.get(one.state.request_id) for one in requests_with_new_token]
        self.drawn += len(self._rows)
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - theirs
        """Return the scores with one possible token in each row that somebody draws for."""
        for row, draw in zip(scores, self._rows, strict=False):
            if draw is not None and not draw.greedy:
                token = draw.pick(row)
                row.fill_(float("-inf"))
                row[token] = 0.0
        return scores


class Batch:
    """The one batch of a model. Raises MemoryError or ValueError when the cache cannot be made."""

    def __init__(self, model: Any, ends: frozenset[int], space: Room) -> None:
        config = model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        each = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
        longest = int(config.max_position_embeddings)
        tokens = min(CONNECTIONS * longest, space.tokens, max(PAGE, space.bytes // each))
        self.context = min(longest, tokens)
        self._ends, self._picker, self._live = ends, Picker(), dict[str, Answer]()
        self._next, self._lock = 0, threading.Lock()
        self._library = model.init_continuous_batching(
            GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=sorted(ends) or -1),
            ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=tokens // PAGE + CONNECTIONS, max_batch_tokens=min(space.batch, tokens),
                max_requests_per_batch=CONNECTIONS, allow_block_sharing=False, use_async_batching=False,
                use_cuda_graph=False, auto_switch_to_flash=False,  # a graph would skip our choice of a token
            ),
        )
        pickers = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([self._picker]))
        pickers.tensors_required = 1
        self._library.logit_processor = pickers
        self._hand_on = threading.Thread(target=self._deliver, name="deliver", daemon=True)

    def start(self) -> None:
        """Begin to make tokens."""
        with torch.inference_mode():  # the library's thread takes over the mode of the one that starts it
            self._library.start()
        self._hand_on.start()

    @property
    def alive(self) -> bool:
        """Return whether tokens can be made; False for good when the library gave up."""
        return self._library.is_running() and self._library.background_thread_status.fatal_error is None

    @property
    def made(self) -> tuple[int, int]:
        """Return how many tokens were made so far, wanted or not, and in how many steps."""
        return self._picker.drawn, int(getattr(self._library, "current_batch", 0))

    def begin(self, prompt: list[int], asked: Complete, wake: int) -> Answer:
        """Add a call to the batch.

        Args: `wake` an event descriptor of the caller's. Raises Malformed (``malformed.context``) when the prompt
        leaves no room for an answer, Unavailable when no tokens can be made.
        """
        left = self.context - len(prompt)
        if not prompt or left < 1:
            raise Malformed("the prompt leaves no room for an answer", code="context",
                            next_step=f"send 1 to {self.context - 1} tokens", details={"context": self.context})
        if not self.alive:
            raise Unavailable("this engine makes no more tokens", code="engine")
        with self._lock:
            self._next += 1
            answer = Answer(f"call_{self._next}", len(prompt), self._ends, wake)
            self._live[answer.id] = answer
        self._picker.draws[answer.id] = Draw.of(asked)
        self._library.add_request(
            prompt, request_id=answer.id, max_new_tokens=min(asked.max_tokens, left), streaming=True,
            eos_token_id=sorted(self._ends) or -1,
        )
        return answer

    def end(self, answer: Answer) -> None:
        """Forget a call; one that is not over makes no token after the step that is under way."""
        self._live.pop(answer.id, None)
        self._picker.draws.pop(answer.id, None)
        if not answer.over:
            self._library.cancel_request(answer.id)

    def stop(self) -> None:
        """End every call and the threads."""
        self._library.stop(block=True, timeout=5, hard_stop=True)
        if self._hand_on.is_alive():
            self._hand_on.join(timeout=2)

    def _deliver(self) -> None:
        while self.alive:
            result = self._library.get_result(timeout=0.2)
            if result is None:
                continue
            answer, over = self._live.get(result.request_id), bool(result.is_finished())
            if answer is not None:
                answer.put(result.generated_tokens[answer.made:], over, result.error is not None)
            elif not over:
                # Calls and cancellations come by two queues: one that overtakes its call finds nothing and is lost.
                self._library.cancel_request(result.request_id)
        for answer in list(self._live.values()):
            answer.put((), over=True, failed=True)


class TextModel(TextOnly):
    """A causal model, its tokenizer and its batch."""

    def __init__(self, model: Any, tokenizer: Any, ends: frozenset[int], space: Room) -> None:
        self._tokenizer, self._encoding = tokenizer, threading.Lock()
        self._batch = Batch(model, ends, space)
        self.context = self._batch.context

    def start(self) -> None:
        """Begin to make tokens."""
        self._batch.start()

    def stop(self) -> None:
        """End every answer."""
        self._batch.stop()

    @property
    def alive(self) -> bool:
        """Return whether tokens can be made."""
        return self._batch.alive

    @property
    def made(self) -> tuple[int, int]:
        """Return how many tokens were made so far, and in how many steps of the batch."""
        return self._batch.made

    def begin(self, asked: Complete, wake: int) -> Answer:
        """Begin an answer; raises Malformed (``malformed.context``, ``malformed.template``), Unavailable."""
        return self._batch.begin(self._tokens(asked), asked, wake)

    def end(self, answer: Answer) -> None:
        """Forget an answer; one that is not over makes no further token."""
        self._batch.end(answer)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _tokens(self, asked: Complete) -> list[int]:
        templated = asked.prompt is None and bool(self._tokenizer.chat_template)
        text = self._templated(asked) if templated else _plain(asked)
        with self._encoding:  # a tokenizer is not to be used by two threads at once
            return list(self._tokenizer(text, add_special_tokens=not templated)["input_ids"])

    def _templated(self, asked: Complete) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(
                list(asked.messages), tools=list(asked.tools) or None, tokenize=False, add_generation_prompt=True,
            ))
        except Exception:  # a template may raise what it likes, with the call's text in it
            raise Malformed("the model's chat template refuses these messages", code="template") from None


def _plain(asked: Complete) -> str:
    if asked.prompt is not None:
        return asked.prompt
    return "".join(f"{one['role']}: {one['content']}\n" for one in asked.messages) + "assistant:"
