"""`interlock train`: a training script on one node, sealed checkpoints, restarts by itself.

The plan is that of `interlock run` with what training needs: an environment with torch, the broker's socket, sealed
checkpoints, a restart budget. Several ranks are started by torchrun inside the sandbox, which never restarts one by
itself: the control plane does, asks the gate again, and the script goes on from its last committed step.
"""

import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from control_plane.cli import secret_input
from control_plane.cli.invocation import Invocation
from control_plane.cli.launch import Admission, attend, datasets, full_plan, tenant_of, upload_code
from control_plane.cli.people_api import PeopleApi, rows
from interlock.canon import digest
from interlock.errors import NotFound, Usage
from interlock.order import Plan
from sandbox.profile import refuse_ranks, shape_for

CPU_SECONDS = 7 * 86_400
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TORCHRUN = ("python", "-m", "torch.distributed.run", "--standalone", "--nnodes=1")


def command(script: Path, ranks: int, arguments: list[str]) -> list[str]:
    """Return the command inside the sandbox: the script itself, or torchrun with `ranks` processes of it."""
    inside = [f"/code/{script.name}", *arguments]
    if ranks == 1:
        return ["python", *inside]
    return [*_TORCHRUN, f"--nproc-per-node={ranks}", "--max-restarts=0", *inside]


def versions(api: PeopleApi, named: list[str]) -> list[str]:
    """Return the digests of ``MODEL``, ``MODEL@N`` or digests; without a number the newest that is not retired.

    Raises NotFound (``not_found.version``) and what the control plane refuses.
    """
    return [word if _DIGEST.fullmatch(word) else _version(api, word) for word in named]


def _version(api: PeopleApi, word: str) -> str:
    model, _, number = word.partition("@")
    if number and not (number.isascii() and number.isdigit()):
        raise Usage("--weights wants MODEL, MODEL@N or a digest", code="weights", next_step="interlock model list")
    answer = api.get(f"/api/models/{quote(model, safe='')}")
    found = rows(answer.get("model", answer) if isinstance(answer.get("model"), dict) else answer, "versions")
    fitting = [v for v in found if (int(number) == v.get("number") if number else v.get("state") != "retired")]
    if not fitting:
        raise NotFound(f"there is no such version: {word}", code="version",
                       next_step=f"interlock model show {model}")
    return str(max(fitting, key=lambda v: int(v.get("number", 0)))["version"])


def training_plan(given: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return the full plan; raises Denied (``denied.profile``) for ranks that the tier's sandbox keeps apart."""
    plan = full_plan({**given, "ranks": ranks, "guest": True, "checkpoints": True, "resume": given["restarts"] > 0,
                      "cpu_seconds": CPU_SECONDS})
    if plan["tier"] in ("none", "high", "critical"):  # another is the server's to refuse
        made = Plan.from_json(plan)
        refuse_ranks(made, shape_for(made.tier))
    return plan


def train(
    ctx: typer.Context,
    words: Annotated[list[str], typer.Argument(metavar="-- SCRIPT ARGS…", help="The training script and its words.")],
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=64, help="Processes, started by torchrun.")] = 1,
    environment: Annotated[str, typer.Option("--environment", help="Python environment of the node.")] = "guest",
    tier: Annotated[str, typer.Option("--tier", help="none, high or critical.")] = "none",
    data: Annotated[list[str] | None, typer.Option("--data", help="NAME=PATH, read-only at /data/NAME.")] = None,
    code: Annotated[list[Path] | None, typer.Option("--code", help="A further file beside the script.")] = None,
    weights: Annotated[list[str] | None, typer.Option("--weights", help="MODEL[@N] or digest to start from.")] = None,
    model: Annotated[str, typer.Option("--model", help="The model that this trains.")] = "",
    memory_mb: Annotated[int, typer.Option("--memory-mb", min=16)] = 4096,
    work_mb: Annotated[int, typer.Option("--work-mb", min=1, help="Size of /work, /tmp and /dev/shm together.")] = 512,
    pids: Annotated[int, typer.Option("--pids", min=1, max=4096)] = 512,
    restarts: Annotated[int, typer.Option("--restarts", min=0, max=100, help="How often it may start again.")] = 3,
    save: Annotated[Path | None, typer.Option("--save", help="Write the run's files into this folder.")] = None,
    approval: Annotated[str, typer.Option("--approval", help="An approval request with its votes.")] = "",
    step_up_proof: Annotated[str, typer.Option("--step-up", help="A proof that was given for exactly this plan.")] = "",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for approvals.")] = True,
    detach: Annotated[bool, typer.Option("--detach", help="Return when the run is placed.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Pass control characters of the output on.")] = False,
    code_otp: Annotated[str | None, typer.Option("--code-otp", help="Second-factor code (or INTERLOCK_CODE).")] = None,
) -> int:
    """Train under a lease with sealed checkpoints; a failed run starts again from its last one, within the budget."""
    here = Invocation.of(ctx)
    script = Path(words[0])
    if script.suffix != ".py":
        raise Usage("the first word behind -- is the training script, a Python file", code="script",
                    next_step="interlock train -- train.py ARGS…")
    api = here.api()
    given = {
        "argv": command(script, ranks, words[1:]), "tier": tier, "tenant": tenant_of(api),
        "code": upload_code(api, [script, *(code or [])]), "datasets": datasets(data or []), "pids": pids,
        "memory_mb": memory_mb, "work_mb": work_mb, "restarts": restarts, "model": model, "environment": environment,
        "weights": versions(api, weights or []),
    }
    plan = training_plan(given, ranks)
    codes = secret_input.codes(code_otp, here.environ)
    placed = Admission(here, api, plan, codes, approval, step_up_proof, wait).run()
    facts = {"tier": tier, "plan_digest": digest(plan), "ranks": ranks}
    if detach:
        here.terminal.result({**placed, **facts})
        return 0
    return attend(here, api, str(placed["run"]), raw=raw, save=save, facts=facts)
