"""What a stop order achieved on this host: pending, confirmed or not confirmed, and the signed receipt.

CONFIRMED(order) = the order is durable AND every run under it is gone by proof. Nothing else may be shown
as stopped. An order that is not confirmed within the limit says so, with survivors, and stays open: the
ladder goes on, and a later proof makes a new receipt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from interlock.order import Result, StopOrder
from interlock.signed import RECEIPT, Signed, sign
from killswitch.ladder import LIMIT_MS
from killswitch.runs import Run, State


@dataclass
class Effect:
    """The effect of one stop order. `targets` names of attempts (``RUN.ATTEMPT``); times ms of BOOTTIME."""

    order: StopOrder
    started_ms: int
    durable: bool
    targets: set[str] = field(default_factory=set)
    result: Result | None = None
    at_ms: int = 0
    why: str = ""
    survivors: list[dict[str, Any]] = field(default_factory=list)
    acked: bool = False
    alarmed: bool = False

    def settle(self, runs: Mapping[str, Run], now_ms: int) -> bool:
        """Look at the runs again; return whether the result changed."""
        if self.result is Result.CONFIRMED:
            return False
        open_ = [runs[n] for n in sorted(self.targets) if n in runs and runs[n].state is not State.GONE]
        if not open_ and self.durable:
            return self._set(Result.CONFIRMED, "", now_ms)
        if now_ms - self.started_ms < LIMIT_MS and not any(r.lost for r in open_) and (open_ or self.durable):
            return False
        if self.result is Result.NOT_CONFIRMED:
            return False
        self.survivors = [s.as_json() for r in open_ for s in r.survivors][:64]
        reasons = sorted({r.missing for r in open_ if r.missing})
        return self._set(Result.NOT_CONFIRMED, ", ".join(reasons) or ("time" if open_ else "not durable"), now_ms)

    def _set(self, result: Result, why: str, now_ms: int) -> bool:
        self.result, self.why, self.at_ms, self.acked = result, why, now_ms, False
        if result is Result.CONFIRMED:
            self.survivors = []
        return True

    def as_json(self) -> dict[str, Any]:
        """Return what `receipts` answers and the command hook reads."""
        return {
            "order": self.order.id, "result": self.result.value if self.result else "pending", "why": self.why,
            "runs": [_attempt(n) for n in sorted(self.targets)], "survivors": self.survivors,
            "at_ms": self.at_ms, "latency_ms": max(0, self.at_ms - self.started_ms) if self.result else 0,
        }

    def receipt(self, key: Ed25519PrivateKey, node: str, boot_id: str, nonce: str) -> Signed:
        """Return the signed receipt (interlock/receipt/v1)."""
        body = {**self.as_json(), "node": node, "boot_id": boot_id, "nonce": nonce}
        return sign(RECEIPT, body, key)


def _attempt(name: str) -> dict[str, Any]:
    run, _, attempt = name.rpartition(".")
    return {"run": run, "attempt": int(attempt)} if attempt.isdigit() else {"run": name, "attempt": 0}
