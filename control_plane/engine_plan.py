"""The plan of an engine, made from its version alone: the control plane builds it, and whoever gives a second factor
for it builds it again and compares the digests."""

from interlock.order import Plan
from interlock.tier import Tier

MEMORY_MB, WORK_MB, PIDS, RESTARTS = 3000, 512, 256, 3
LONGEST_S = 7 * 86_400  # the longest that a plan may start attempts
CPU_SECONDS = 30 * 86_400  # an engine works until it is stopped


def engine_plan(version: str, model: str, tier: Tier, tenant: str) -> Plan:
    """Return the plan that serves `version` (a manifest digest) as `model`."""
    argv = ("python", "-P", "-m", "runners.inference.engine", "--version", version, "--name", model)
    return Plan(
        argv, tier, tenant, model=model, restarts=RESTARTS, pids=PIDS, memory_mb=MEMORY_MB, cpu_seconds=CPU_SECONDS,
        work_mb=WORK_MB, guest=True, valid_s=LONGEST_S, environment="guest", weights=(version,), serve=True,
        resume=True)
