"""The engine's models behind its own line code, in one process of the guest environment with the tests' gateway.

Run by tests/guest/checkpoint_cases/running.py: each function `case_…` is one case. The first one saves the versions
that all others load, sealed, through the broker.
"""

import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical", "TOKENIZERS_PARALLELISM": "false"})
logging.disable()

import torch  # noqa: E402

import interlock  # noqa: E402
from interlock.errors import Conflict, Malformed, NotFound, Refusal  # noqa: E402
from interlock.terms import FULL, PROFILES, RESTRICTED  # noqa: E402
from runners.inference import engine, frames, weights  # noqa: E402
from runners.inference.dialing import Answer, Dialer  # noqa: E402
from runners.inference.frames import Complete, Embed, Hello  # noqa: E402
from tests.inference.engine_cases import models  # noqa: E402
from tests.inference.switchboard import Switchboard, answer, text  # noqa: E402

FOLDER = Path(os.environ["ENGINE_CASES_FOLDER"])
KEPT: dict[str, Any] = {}


def ask(**fields: Any) -> dict[str, Any]:
    """Return the frame of a call."""
    said = {**Complete("c", PROFILES[FULL], prompt="once", max_tokens=24, temperature=0).as_json(), **fields}
    if "messages" in fields:
        del said["prompt"]
    return said


@contextmanager
def serving(loaded: weights.Loaded) -> Iterator[Switchboard]:
    """Serve a model to a gateway of the tests."""
    path = tempfile.mktemp(dir=FOLDER)  # noqa: S306 - a socket is made there, not a file
    hello = Hello("run_guest", 1, "sha256:0", loaded.kind, loaded.model.context, "luna")
    loaded.model.start()
    engine.warm_up(loaded.kind, loaded.model)
    dialer = Dialer(path, hello, loaded.model)
    try:
        with Switchboard(path) as board:
            dialer.start()
            yield board
    finally:
        dialer.stop()
        loaded.model.stop()


def case_sealed_versions_become_models_bit_for_bit() -> None:
    model, plain = models.llama()
    sentences = models.encoder()
    digests = {
        "text": interlock.save(plain.state, 1, assets=plain.assets),
        "embedding": interlock.save(sentences.state, 2, assets=sentences.assets),
        "nested": interlock.save({"model": model}, 3, assets=plain.assets),
    }
    (FOLDER / "digests.json").write_text(json.dumps(digests))
    for name, expected in (("text", plain), ("nested", plain), ("embedding", sentences)):
        loaded = weights.load(weights.Sealed(digests[name]))
        KEPT[name] = loaded
        inner = loaded.model._model if loaded.kind == "embedding" else loaded.model._batch._library.model
        found = inner.state_dict()
        assert set(found) == set(expected.state)
        assert all(torch.equal(found[n], tensor) for n, tensor in expected.state.items())
        assert {t.device.type for t in inner.parameters()} <= {"cpu", "cuda"}
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, KEPT["text"].model._batch._library.model(ids).logits)
    KEPT["expected"] = model


def case_a_version_of_another_shape_is_refused() -> None:
    _, small = models.llama()
    config = {**json.loads(small.assets["config.json"]), "hidden_size": 32}
    spoilt = interlock.save(small.state, 4, assets={**small.assets, "config.json": json.dumps(config).encode()})
    assert code_of(Conflict, lambda: weights.load(weights.Sealed(spoilt))) == "conflict.layout"


def code_of(kind: type[Refusal], call: Callable[[], object]) -> str:
    """Return the code of the refusal that `call` raises, or an empty text."""
    try:
        call()
    except kind as refusal:
        return refusal.code
    return ""


def refused(plain: models.Plain, change: dict[str, Any], **assets: bytes | None) -> str:
    """Return the code by which a version is refused whose config or assets differ."""
    config = {**json.loads(plain.assets["config.json"]), **change}
    found = {**plain.assets, "config.json": json.dumps(config).encode(), **assets}
    kept = models.Plain(plain.state, {n: data for n, data in found.items() if data is not None})
    return code_of(Malformed, lambda: weights.load(kept))


def case_only_known_architectures_become_models() -> None:
    _, plain = models.llama()
    assert refused(plain, {}) == ""
    for names in (["EvilForCausalLM"], ["GPT2LMHeadModel"], [], None, "LlamaForCausalLM", ["LlamaForCausalLM"] * 2):
        assert refused(plain, {"architectures": names}) == "malformed.model", names
    assert refused(plain, {"dtype": "int8"}) == "malformed.model"
    assert refused(plain, {}, **{"tokenizer.json": None}) == "malformed.model"
    assert refused(plain, {}, **{"config.json": b"[]"}) == "malformed.model"


def case_no_code_comes_with_a_version() -> None:
    """What names code elsewhere is not followed: the model is one of the list, the tokenizer that of its JSON."""
    _, plain = models.llama()
    mark = FOLDER / "code-ran"
    code = f"from pathlib import Path; Path({str(mark)!r}).touch()".encode()
    hook = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
            "attn_implementation": "evil/kernel", "_attn_implementation": "evil/kernel"}
    words = {**json.loads(plain.assets["tokenizer_config.json"]), "tokenizer_class": "EvilTokenizer",
             "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
    changed = {"evil.py": code, "tokenizer_config.json": json.dumps(words).encode()}
    assert refused(plain, hook, **changed) == ""
    assert not mark.exists()


def case_an_answer_streams_and_is_what_the_model_says() -> None:
    with serving(KEPT["nested"]) as board:
        with board.line() as line:
            frames.send(line, ask())
            found = list(answer(line))
        assert found[-1]["done"] == {"reason": "length", "prompt_tokens": 4, "completion_tokens": 24}
        assert len(found) > 8
        assert sum(f.get("tokens", 0) for f in found) == 24
        ids = torch.tensor([list(_bytes_of("once"))])
        expected = KEPT["expected"].generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, 4:]
        told = KEPT["nested"].model.decode(expected.tolist())
        assert text(found).rstrip("\ufffd") == told.rstrip("\ufffd"), (text(found), told)


def _bytes_of(said: str) -> list[int]:
    return list(KEPT["text"].model._tokens(Complete("c", PROFILES[FULL], prompt=said)))


def case_everything_else_of_a_call() -> None:
    """One served model for many short cases: starting the library's threads anew takes longer than they do."""
    _, plain = models.llama(positions=4096)
    model_of = weights.load(plain)
    with serving(model_of) as board:
        _terms(board)
        _stops(board)
        _seeds(board)
        _templates(board)
        _refusals(board)
        _together(board, model_of)
        _aborts(board, model_of)
    assert not model_of.model.alive


def _terms(board: Switchboard) -> None:
    less = PROFILES[RESTRICTED]
    found = board.call(ask(max_tokens=500, terms=less.as_json()))
    assert found[-1]["done"]["completion_tokens"] == less.max_tokens
    assert board.call(ask(max_tokens=50))[-1]["done"]["completion_tokens"] == 50
    without = ask()
    del without["terms"]
    assert board.call(without)[-1]["error"]["code"] == "malformed.terms"
    wider = {**less.as_json(), "max_tokens": 33}
    assert board.call(ask(terms=wider))[-1]["error"]["code"] == "denied.terms"


def _stops(board: Switchboard) -> None:
    whole = text(board.call(ask(max_tokens=60)))
    pairs = [(n, whole[n:n + 2]) for n in range(6, 50)]
    stop = next(pair for n, pair in pairs if "\ufffd" not in pair and whole.find(pair) == n)
    found = board.call(ask(max_tokens=60, stop=["never there", stop]))
    assert text(found) == whole[: whole.index(stop)]
    assert found[-1]["done"]["reason"] == "stop"
    assert found[-1]["done"]["completion_tokens"] < 60


def _seeds(board: Switchboard) -> None:
    def said(**fields: Any) -> str:
        return text(board.call(ask(temperature=1.0, **fields)))

    assert said(seed=5) == said(seed=5)
    assert said(seed=5) != said(seed=6)
    assert len({said() for _ in range(3)}) > 1
    assert said(seed=5, top_p=0.0) == text(board.call(ask()))


def _templates(board: Switchboard) -> None:
    messages = [{"role": "user", "content": "hello"}]
    bare = board.call(ask(messages=messages))[-1]["done"]["prompt_tokens"]
    assert bare == len("user=hello;")
    assert board.call(ask(messages=messages, tools=[{"type": "function"}]))[-1]["done"]["prompt_tokens"] == bare + 9
    less = PROFILES[RESTRICTED].as_json()
    found = board.call(ask(messages=messages, tools=[{"type": "function"}], terms=less))
    assert found[-1]["done"]["prompt_tokens"] == bare


def _refusals(board: Switchboard) -> None:
    assert board.call(ask(prompt="x" * 4096))[-1]["error"]["code"] == "malformed.context"
    assert board.call(ask(prompt="x" * 4090, max_tokens=99))[-1]["done"]["completion_tokens"] == 6
    assert board.call(ask(prompt=""))[-1]["error"]["code"] == "malformed.context"
    assert board.call(Embed("e", PROFILES[FULL], ("x",)).as_json())[-1]["error"]["code"] == "not_found.op"


def _together(board: Switchboard, loaded: weights.Loaded) -> None:
    alone = text(board.call(ask(max_tokens=60)))
    found: dict[int, list[dict[str, Any]]] = {}
    before = loaded.model.made

    def one(n: int) -> None:
        found[n] = board.call(ask(id=str(n), max_tokens=60))

    threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    tokens, steps = (b - a for a, b in zip(before, loaded.model.made, strict=True))
    assert {text(f) for f in found.values()} == {alone}
    assert len(found) == 8
    assert tokens == 480
    assert steps < 240, steps  # one call after the other takes 480


def _aborts(board: Switchboard, loaded: weights.Loaded) -> None:
    for pause in (0.0, 0.05):
        with board.line() as line:
            frames.send(line, ask(max_tokens=4000))
            next(answer(line))
            time.sleep(pause)
            line.close()
        time.sleep(0.25)
        made = loaded.model.made
        time.sleep(0.3)
        assert loaded.model.made == made, "tokens are still made for a call that was aborted"
    assert board.call(ask())[-1]["done"]["completion_tokens"] == 24


class Library:
    """What the batch talks to, with one result for a call that nobody waits for."""

    def __init__(self, finished: bool) -> None:
        self.cancelled: list[str] = []
        self._finished, self._left = finished, 1

    def is_running(self) -> bool:
        return self._left > 0

    @property
    def background_thread_status(self) -> SimpleNamespace:
        return SimpleNamespace(fatal_error=None)

    def cancel_request(self, call: str) -> None:
        self.cancelled.append(call)

    def get_result(self, timeout: float) -> SimpleNamespace:
        self._left -= 1
        done = self._finished
        return SimpleNamespace(request_id="call_lost", is_finished=lambda: done, generated_tokens=[1], error=None)


def case_what_nobody_waits_for_is_cancelled() -> None:
    _, plain = models.llama()
    batch = weights.load(plain).model._batch
    for finished, expected in ((False, ["call_lost"]), (True, [])):
        batch._library = Library(finished)
        batch._deliver()
        assert batch._library.cancelled == expected
    under_way, over = (Answer(f"call_{n}", 1, frozenset(), os.eventfd(0)) for n in range(2))
    over.put((), over=True)
    batch.end(under_way)
    batch.end(over)
    assert batch._library.cancelled == ["call_0"]


def case_a_model_without_a_template_gets_plain_lines() -> None:
    _, plain = models.llama(template=None)
    loaded = weights.load(plain)
    ids = loaded.model._tokens(Complete("c", PROFILES[FULL], messages=({"role": "user", "content": "hi"},)))
    assert loaded.model.decode(ids) == "user: hi\nassistant:"


def case_an_end_token_ends_an_answer() -> None:
    _, plain = models.llama(ends=True)
    with torch.no_grad():
        plain.state["model.embed_tokens.weight"][models.END] *= 40  # as good as certain, somewhere
    with serving(weights.load(models.Plain(plain.state, plain.assets))) as board:
        found = board.call(ask(max_tokens=300))
    assert found[-1]["done"]["reason"] == "stop", found[-1]
    assert found[-1]["done"]["completion_tokens"] < 300
    assert "<end>" not in text(found)


def case_like_sentences_are_nearer_than_unlike_ones() -> None:
    loaded = KEPT["embedding"]
    with serving(loaded) as board:
        texts = ("A cat sits on the mat.", "A kitten rests on the rug.", "Stock markets fell sharply.", "x " * 5000)
        found = board.call(Embed("e", PROFILES[FULL], texts).as_json())
        assert board.call(ask())[-1]["error"]["code"] == "not_found.op"
        many = board.call(Embed("e", PROFILES[FULL], texts[:1] * 70).as_json())[0]["vectors"]
    rows = found[0]["vectors"]
    cat, kitten, stocks, long = rows
    assert {len(row) for row in rows} == {384}
    assert all(abs(_product(row, row) - 1) < 1e-5 for row in rows)
    assert _product(cat, kitten) > 0.5 > 0.2 > _product(cat, stocks)
    assert found[0]["prompt_tokens"] == 256 + sum(len(_words(loaded, one)) for one in texts[:3])
    assert len(many) == 70
    assert all(abs(a - b) < 1e-4 for row in many for a, b in zip(row, cat, strict=True))
    assert len(long) == 384


def _product(one: list[float], two: list[float]) -> float:
    return sum(a * b for a, b in zip(one, two, strict=True))


def _words(loaded: weights.Loaded, said: str) -> list[int]:
    return list(loaded.model._tokenizer(said)["input_ids"])


def case_an_asset_that_is_not_there_is_none() -> None:
    digest = json.loads((FOLDER / "digests.json").read_text())["text"]
    assert weights.Sealed(digest).asset("vocab.txt") is None
    assert weights.Sealed(digest).asset("config.json")
    assert code_of(NotFound, lambda: weights.Sealed("sha256:" + "0" * 64).fill({})) == "not_found.checkpoint"
