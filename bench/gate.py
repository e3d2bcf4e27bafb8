"""Cost of one question to the gate (stopped? → decide → record → permit) beside stock casbin, in one run.

Run: make bench NAME=gate. Writes bench/out/gate.json. The recorder is a null one, so this is the price of
deciding and permitting alone. Stock casbin gets the same rules and functions through its ordinary Enforcer.
Read the ratio, not the absolutes: cores are shared.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import casbin
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from interlock.call import Action, Call, Resource, Subject
from interlock.event import Written
from interlock.signed import key_id
from interlock.tier import Tier
from policy import bundle, rules
from policy.facts import Facts
from policy.gate import Gate
from policy.rbac import Engine

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "policy"
ROUNDS = 2_000


def engine_of(folder: Path) -> Engine:
    """Return the engine of a folder, signed by two fresh keys."""
    keys = [Ed25519PrivateKey.generate() for _ in range(2)]
    archive = bundle.pack(folder)
    for key in keys:
        archive = bundle.sign_archive(archive, key)
    return Engine(bundle.read(archive, {key_id(k.public_key()): k.public_key() for k in keys}, None))


def stock_of(folder: Path) -> casbin.Enforcer:
    """Return casbin's own enforcer over the same files, with the functions that the matcher names."""
    rows = folder / "policy.csv"
    found = casbin.Enforcer(str(folder / "model.conf"), str(rows))
    for name, function in (
        ("in_tenant", rules.in_tenant), ("is_object", rules.is_object), ("is_action", rules.is_one_of),
        ("in_tier", rules.is_one_of), ("when", lambda held, cond: cond == "-" or set(cond.split("+")) <= held),
    ):
        found.add_function(name, function)
    return found


def spread(work: Callable[[], object], rounds: int) -> dict[str, float]:
    """Return p50 and p99 of `work` in microseconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        work()
        times.append((time.perf_counter_ns() - start) / 1000)
    times.sort()
    return {"p50_us": round(statistics.median(times), 1), "p99_us": round(times[int(len(times) * 0.99)], 1)}


def larger(folder: Path, teams: int) -> Path:
    """Write the example with `teams` more rules, as a site of many teams has them."""
    folder.mkdir()
    (folder / "model.conf").write_bytes((EXAMPLE / "model.conf").read_bytes())
    actions = [a.value for a in Action if a not in (Action.STOP, Action.LAUNCH)]
    more = "".join(f"p, auditor, team{n}, pool/*, {actions[n % len(actions)]}, none, own, allow\n" for n in range(teams)
                   if actions[n % len(actions)] not in ("approve", "resume"))
    (folder / "policy.csv").write_text((EXAMPLE / "policy.csv").read_text() + more)
    return folder


def measure(folder: Path) -> dict[str, object]:
    """Measure one policy: the gate, the decision alone, stock casbin; all three must agree."""
    start = time.perf_counter()
    engine = engine_of(folder)
    load_ms = (time.perf_counter() - start) * 1000
    stock = stock_of(folder)
    call = Call(Action.LAUNCH, Subject("per_1", "demo"), Resource("pool", "default", "demo", Tier.NONE))
    facts = Facts(frozenset({"researcher"}), bundle_age_ms=0)
    gate = Gate(engine.decide, lambda _: None, lambda e: Written(e.id, "null", 0), lambda: 0)

    def by_stock() -> bool:
        return bool(stock.enforce("researcher", "demo", "demo", "pool/default", "launch", "none", facts.held("")))

    if not (engine.decide(call, facts).allowed and by_stock() and gate.ask(call, facts)):
        raise SystemExit("the engines disagree")
    gated, stocked = spread(lambda: gate.ask(call, facts), ROUNDS), spread(by_stock, ROUNDS // 10)
    return {
        "rules": len(engine.bundle.rules.rules), "load_ms": round(load_ms, 1), "gate": gated,
        "decide": spread(lambda: engine.decide(call, facts), ROUNDS), "stock_casbin": stocked,
        "stock_over_gate_p50": round(stocked["p50_us"] / gated["p50_us"], 2),
    }


def main() -> None:
    """Measure the example and a policy of about 1,000 rules."""
    with tempfile.TemporaryDirectory(prefix="ilk-bench-") as scratch:
        found = {"example": measure(EXAMPLE), "thousand": measure(larger(Path(scratch) / "p", 1_050))}
    out = ROOT / "bench" / "out"
    out.mkdir(exist_ok=True)
    (out / "gate.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


main()
