"""What is saved comes back bit-equal: every dtype and shape, values, a model with its optimizer, assets."""

import math
import warnings

import torch
from running import orders, refusal_of, same, step

import interlock
from interlock import dcp_save, layout, tensors


def _bits(dtype: torch.dtype, *size: int) -> torch.Tensor:
    """Return a tensor of random bits, whatever they mean as numbers (NaNs too)."""
    count = math.prod(size) * torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(size)


def _round(state: dict[str, object], into: dict[str, object]) -> dict[str, object]:
    at = step()
    digest = interlock.save(state, at)
    assert digest.startswith("sha256:"), digest
    assert interlock.load(into, step=at) == at
    return into


def case_every_dtype_and_shape() -> None:
    state: dict[str, object] = {}
    for name, dtype in tensors.DTYPES.items():
        state[name] = {"some": _bits(dtype, 3, 5), "none": _bits(dtype, 0, 4), "point": _bits(dtype, 1)[0]}
    assert len(state) >= 20
    blank = {n: {k: torch.zeros_like(t) for k, t in inside.items()} for n, inside in state.items()}
    back = _round(state, blank)
    assert all(same(state[n][k], back[n][k]) for n in state for k in ("some", "none", "point"))
    assert back["bfloat16"]["point"].dim() == 0


def case_not_contiguous_on_either_side() -> None:
    whole = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    kept = whole.clone()
    conj = torch.randn(4, dtype=torch.complex64).conj()
    state = {"turned": whole.t(), "every_second": whole[::2, 1::3], "conj": conj}
    into = {
        "turned": torch.zeros(6, 10).t(), "every_second": torch.zeros(6, 6)[::2, ::2],
        "conj": torch.zeros(4, dtype=torch.complex64),
    }
    back = _round(dict(state), dict(into))
    assert torch.equal(whole, kept)
    assert all(torch.equal(back[n], state[n]) for n in state)
    assert back["every_second"] is into["every_second"]


def case_values_keep_their_types() -> None:
    values = {
        "none": None, "yes": True, "n": -(2**70), "x": 0.1, "nan": math.nan, "inf": -math.inf, "zero": -0.0,
        "text": "a\ud800ü", "raw": b"\0\xff", "pair": (1, (2.5, None)), "list": [1, [2, "x"]], "empty": {}, "no": [],
        "map": ({1: "a", "1": "b"},),
    }
    back = _round({"deep": dict(values), "top": 3}, {"deep": dict.fromkeys(values), "top": None})
    deep = back["deep"]
    assert back["top"] == 3
    assert repr(deep) == repr(values), deep
    assert type(deep["pair"]) is tuple


def case_an_empty_state() -> None:
    assert _round({}, {}) == {}


def case_a_model_with_its_optimizer_goes_on_as_if_nothing_happened() -> None:
    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rates: object, steps: range) -> None:
        for n in steps:
            torch.manual_seed(n)
            optimizer.zero_grad()
            model(torch.randn(4, 7)).pow(2).sum().backward()
            optimizer.step()
            rates.step()

    model, optimizer, rates = fresh()
    train(model, optimizer, rates, range(5))
    before = {n: p.clone() for n, p in model.state_dict().items()}
    at = step()
    interlock.save({"model": model, "optimizer": optimizer, "rates": rates, "random": torch.get_rng_state()}, at)
    assert all(same(before[n], p) for n, p in model.state_dict().items())
    train(model, optimizer, rates, range(5, 10))

    again, second, other = fresh()
    kept = second.param_groups[0]["lr"]
    into = {"model": again, "optimizer": second, "rates": other, "random": torch.get_rng_state()}
    assert interlock.load(into, step=at) == at
    assert all(same(before[n], p) for n, p in again.state_dict().items())
    assert second.param_groups[0]["lr"] != kept
    assert all(p.grad is None for p in again.parameters())
    train(again, second, other, range(5, 10))
    assert all(same(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def case_weights_are_cut_into_files_and_bring_their_assets() -> None:
    dcp_save.FILE = 100_000
    try:
        state = {"large": torch.randn(70_000), "small": torch.randn(11), "more": torch.randn(20_000)}
        at = step()
        digest = interlock.save(state, at, assets={"config.json": b"{}", "tokenizer.json": b"\0" * 50_000})
    finally:
        dcp_save.FILE = 96_000_000
    into = {n: torch.zeros_like(t) for n, t in state.items()}
    orders()
    assert interlock.load(into, version=digest) == at
    assert all(same(state[n], into[n]) for n in state)
    assert orders()["asked"].count("load_file") == 5  # metadata and four files, each once
    assert interlock.asset("config.json", version=digest) == b"{}"
    assert len(interlock.asset("tokenizer.json", version=digest)) == 50_000
    assert refusal_of(lambda: interlock.asset("weights.bin", version=digest)) == "not_found.asset"


def case_files_are_filled_to_the_last_byte_and_values_are_not_cut() -> None:
    with_values = {f"t{n}": torch.randn(25) for n in range(8)} | {f"v{n}": "x" * 60 for n in range(4)}
    into = {n: torch.zeros(25) if n[0] == "t" else None for n in with_values}
    dcp_save.FILE = 90
    try:
        at = step()
        orders()
        digest = interlock.save(with_values, at, assets={})
        assert orders()["asked"].count("save_file") == 14  # 800 bytes in 9 files, 4 values in one each, metadata
        assert refusal_of(lambda: interlock.save({"v": "x" * 90}, step(), assets={})) == "malformed.state"
    finally:
        dcp_save.FILE = 96_000_000
    assert interlock.load(into, version=digest) == at
    assert all(same(v, into[n]) if n[0] == "t" else v == into[n] for n, v in with_values.items())


def case_training_state_never_needs_too_many_files() -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    size = torch.Size([10 ** 11])  # 400 GB a rank
    data = TensorWriteData(ChunkStorageMetadata(torch.Size([0]), size), TensorProperties(torch.float32), size)
    plan = SavePlan([WriteItem(MetadataIndex("w", (0,)), WriteItemType.SHARD, tensor_data=data)])
    for ranks in (1, 2, 8, 40, 64):
        limit = dcp_save._file_limit([plan] * ranks)
        assert ranks * -(-4 * 10 ** 11 // limit) + 2 <= 128, ranks
    assert dcp_save._file_limit([SavePlan([])]) == dcp_save.STATE_FILE


def case_the_newest_is_the_default() -> None:
    first, second = step(), step()
    for at in (first, second):
        interlock.save({"x": torch.full((3,), float(at))}, at)
    into = {"x": torch.zeros(3)}
    assert interlock.latest() == second
    assert interlock.load(into) == second
    assert into["x"][0] == second
    assert interlock.load(into, step=first) == first
    assert into["x"][0] == first


def case_nothing_warns_and_the_log_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _round({"x": torch.ones(2)}, {"x": torch.zeros(2)})


def case_keys_on_their_way_are_waited_for() -> None:
    orders(late_keys=2)
    _round({"x": torch.ones(2)}, {"x": torch.zeros(2)})


def case_one_run_of_elements_is_found_where_there_is_one() -> None:
    from interlock.dcp_load import run_of_elements

    for sizes in ((4, 3), (2, 3, 4), (5,), (1, 4), ()):
        whole = torch.arange(math.prod(sizes)).reshape(sizes)
        boxes = [((), ())]
        for size in sizes:
            boxes = [((*b, f), (*n, c)) for b, n in boxes for f in range(size) for c in range(1, size - f + 1)]
        for box, lengths in boxes:
            piece = whole
            for dim, (first, length) in enumerate(zip(box, lengths, strict=True)):
                piece = piece.narrow(dim, first, length)
            flat = piece.reshape(-1).tolist()
            start = run_of_elements(sizes, box, lengths)
            assert (start is not None) == (flat == list(range(flat[0], flat[0] + len(flat)))), (sizes, box, lengths)
            assert start in (None, flat[0])


def case_the_layout_survives_its_own_encoding() -> None:
    part = layout.Part("r0-0.sealed", 0, 0, 8)
    found = layout.Layout({"w": layout.TensorRow("float32", (2,), (layout.Shard((0,), (2,), (part,)),))}, {})
    assert layout.decode(found.encode()) == found
