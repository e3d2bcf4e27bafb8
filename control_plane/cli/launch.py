"""`interlock run`: upload code, make the plan, pass the gate, show the output, return the command's status.

The plan is digested here, the second factor is bound to that digest, and the control plane digests the plan
that it stores: a byte that differs between the two makes the proof worthless.
"""

import base64
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from control_plane.cli import secret_input
from control_plane.cli.invocation import Invocation
from control_plane.cli.new_file import write_new
from control_plane.cli.people_api import PeopleApi, rows
from control_plane.cli.terminal import clean
from interlock.call import Action
from interlock.canon import digest, digest_bytes
from interlock.errors import (
    ApprovalRequired,
    Denied,
    Halted,
    Malformed,
    Refusal,
    StepUpRequired,
    Unavailable,
    Usage,
    from_json,
)
from interlock.order import Plan

EXIT_STOPPED = 75
_CODE_LIMIT = 1 << 20
_POLL_S = 20
_PATIENCE_S = 60.0


def upload_code(api: PeopleApi, files: list[Path]) -> list[dict[str, str]]:
    """Upload each file; return the plan's rows. The digest is ours: the server's must be the same."""
    found = []
    for path in files:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise Usage(f"cannot read {path}: {error.strerror}", code="code") from None
        if len(data) > _CODE_LIMIT:
            raise Usage(f"{path} is larger than 1 MiB", code="code", next_step="pass data with --data, not as code")
        stored = api.upload("/api/code", data).get("digest")
        if stored != digest_bytes(data):
            raise Malformed("the control plane stored other bytes than were sent", code="code")
        found.append({"name": path.name, "digest": digest_bytes(data)})
    return found


def datasets(pairs: list[str]) -> list[dict[str, str]]:
    """Parse ``NAME=PATH``; raises Usage (``usage.data``)."""
    found = []
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not equals or not name or not path.startswith("/"):
            raise Usage("--data wants NAME=/ABSOLUTE/PATH", code="data")
        found.append({"name": name, "path": path})
    return found


def full_plan(given: dict[str, Any]) -> dict[str, Any]:
    """Return the plan with every default, as it is digested; an unknown tier is left for the server to refuse."""
    known = {**given, "tier": given["tier"] if given["tier"] in ("none", "high", "critical") else "none"}
    return {**Plan.from_json(known).as_json(), "tier": given["tier"]}


@dataclass
class Admission:
    """Brings one plan through the gate: answers what is missing (factor, persons) and asks again.

    `step_up` is a proof that was given before: it is good for five minutes, for exactly this plan, in this
    session, and is used up when the run starts. Its id is told when approvals are missing and nobody waits.
    """

    here: Invocation
    api: PeopleApi
    plan: dict[str, Any]
    codes: Iterator[str]
    approval: str = ""
    step_up: str = ""
    waits: bool = True

    def run(self) -> dict[str, Any]:
        """Return the answer of `POST /api/runs`; raises the refusal that nobody here can lift."""
        for _ in range(6):
            given = {"approval": self.approval, "step_up": self.step_up}
            try:
                return self.api.post("/api/runs", {"plan": self.plan, **{k: v for k, v in given.items() if v}})
            except StepUpRequired as refusal:
                self.step_up = self._step_up(refusal)
            except ApprovalRequired as refusal:
                self.approval = self._approved(refusal)
        raise Denied("the control plane keeps asking for the same", code="loop")

    def _step_up(self, refusal: StepUpRequired) -> str:
        self.here.terminal.note(f"{refusal.message} (bound to {digest(self.plan)})")
        try:
            code = next(self.codes)
        except Usage:
            raise refusal from None
        return step_up(self.api, code, Action.LAUNCH, digest(self.plan))

    def _approved(self, refusal: ApprovalRequired) -> str:
        request = str(refusal.details.get("request", self.approval))
        if not self.waits or not request:
            refusal.details["step_up"] = self.step_up
            raise refusal
        needed = refusal.details.get("needed", "?")
        self.here.terminal.note(f"approval request {request}: {needed} other persons approve with: "
                                f"interlock approve {request}")
        with self.here.terminal.wait(f"waits for {needed} approvals of {request}"):
            wait_for_votes(self.api, request)
        return request


def step_up(api: PeopleApi, code: str, action: Action, bound: str) -> str:
    """Return the id of a fresh second-factor proof for `action`, bound to the digest `bound`."""
    return str(api.post("/api/step-up", {"code": code, "action": action.value, "bound": bound})["step_up"])


def wait_for_votes(api: PeopleApi, request: str, *, limit_s: float = 86_400.0) -> None:
    """Return when the request has its votes; raises Denied when it was refused or expired."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        found = api.get(f"/api/approvals/{quote(request)}")
        word = str(found.get("state", "open"))
        if word == "open" and found.get("missing") == 0:
            return
        if word != "open":
            raise Denied(f"the approval request {request} was {word}", code="approval")
        time.sleep(1.0)
    raise Unavailable("the approvals did not come in time", code="approval")


class Output:
    """Live output of a run. A terminal gets it without control characters unless `raw`; a pipe gets the bytes."""

    def __init__(self, to_stderr: bool, raw: bool) -> None:
        self._stream = sys.stderr.buffer if to_stderr else sys.stdout.buffer
        self._filter = not raw and (sys.stderr if to_stderr else sys.stdout).isatty()

    def write(self, data: bytes) -> None:
        """Write and flush."""
        if self._filter:
            data = clean(data.decode("utf-8", "replace"), keep="\n\t\r").encode()
        self._stream.write(data)
        self._stream.flush()


def follow(
    here: Invocation, api: PeopleApi, run: str, output: Output, *, after: int = 0, attempt: int = 0, wait: bool = True
) -> dict[str, Any]:
    """Write the output of `run` until it ended for good; return the last answer.

    An attempt that the control plane starts by itself is followed on to. A control plane that is away is waited for.
    Args: `after` offset in the output of `attempt` (0: the newest).
    """
    away: float | None = None
    while True:
        which = {"attempt": attempt} if attempt else {}
        try:
            answer = api.get(f"/api/runs/{quote(run)}/output", wait_s=_POLL_S, after=after,
                             wait=_POLL_S if wait else 0, **which)
        except Unavailable as refusal:
            away = away or time.monotonic()
            if not wait or time.monotonic() - away > _PATIENCE_S:
                raise
            here.terminal.note(f"[{refusal.code}] {refusal.message}; asks again")
            time.sleep(1.0)
            continue
        away = None
        data = base64.b64decode(answer.get("data") or "")
        output.write(data)
        after = int(answer.get("next", after + len(data)))
        newest = int(answer.get("attempt") or 0)
        if attempt and not data and newest > attempt:
            here.terminal.note(f"attempt {attempt} is over; the output goes on with attempt {newest}")
            after = 0
        attempt = attempt if attempt and data else newest
        if (answer.get("ended") and not data) or not wait:
            return {**answer, "next": after, "attempt": attempt or 1}


def status_of(answer: dict[str, Any]) -> int:
    """Return the command's own status (128+N for a signal).

    Raises Halted (``stopped.…``) for a stopped run, the node's own refusal for one that never started,
    Unavailable (``unavailable.run_lost``) for a lost one.
    """
    outcome = answer.get("outcome") or {}
    word, why = str(answer.get("state", "")), str(outcome.get("why", ""))
    if word == "refused":
        error = outcome.get("error") or answer.get("error")
        raise from_node(error)
    if word == "lost":
        raise Unavailable("the node was lost; the run ends with its lease", code="run_lost",
                          next_step="interlock nodes")
    if word == "stopped" or why.startswith("order:") or why in ("lease", "pipe", "start"):
        cause, _, order = why.partition(":")
        raise Halted("the run was stopped" + (f" by stop order {order}" if order else f" ({why})" if why else ""),
                     code=cause or "run", next_step="interlock why RUN", details={"outcome": outcome})
    signal = outcome.get("signal")
    if signal:
        return 128 + int(signal)
    return int(outcome.get("exit") or 0)


def from_node(error: object) -> Refusal:
    """Return the refusal that a node reported for a run."""
    if isinstance(error, dict) and error.get("code"):
        return from_json(error)
    return Unavailable("the node refused the run", code="node", next_step="interlock why RUN")


def save_files(api: PeopleApi, run: str, folder: Path) -> list[dict[str, Any]]:
    """Write the run's files into `folder`; names are plain, an existing file is never overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = []
    for row in rows(api.get(f"/api/runs/{quote(run)}/files"), "files"):
        name = str(row.get("name", ""))
        if not name or "/" in name or name.startswith("."):
            raise Malformed("a file of the run has no plain name", code="name")
        data = api.send("GET", f"/api/runs/{quote(run)}/files/{quote(name)}").content
        if row.get("digest") and row["digest"] != digest_bytes(data):
            raise Malformed(f"{clean(name)} does not match its recorded digest", code="digest")
        write_new(folder / name, data)
        saved.append({"name": name, "bytes": len(data), "digest": digest_bytes(data), "path": str(folder / name)})
    return saved


def tenant_of(api: PeopleApi) -> str:
    """Return the tenant of whoever is signed in."""
    answer = api.get("/api/whoami")
    person = answer.get("person")
    return str(answer.get("tenant") or (person.get("tenant") if isinstance(person, dict) else "") or "lab")


def attend(here: Invocation, api: PeopleApi, run: str, *, raw: bool, save: Path | None, facts: dict[str, Any]) -> int:
    """Follow a placed run to its end and report it; return the exit status of the command."""
    here.terminal.note(f"run {run} is placed; stop it with: interlock stop run:{run}")
    try:
        last = follow(here, api, run, Output(here.terminal.as_json, raw))
    except KeyboardInterrupt:
        here.terminal.note(f"the run goes on: interlock logs --follow {run}; interlock stop run:{run}")
        return 130
    files = save_files(api, run, save) if save else []
    report = {"run": run, **facts, "state": last.get("state"), "outcome": last.get("outcome"), "files": files,
              "attempt": last.get("attempt", facts.get("attempt", 1))}
    refused = (last.get("outcome") or {}).get("not_restarted")
    if refused:
        here.terminal.note(f"it was not started again: {refused}; interlock why {run}")
    try:
        status = status_of(last)
    except Halted as refusal:
        refusal.details.update(report)
        here.terminal.refuse(refusal)
        return EXIT_STOPPED
    if here.terminal.as_json:
        here.terminal.result({**report, "exit": status})
    for row in files:
        here.terminal.note(f"saved {row['path']} ({row['bytes']} bytes, {row['digest']})")
    return status


def run(
    ctx: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="-- CMD…", help="The command inside the sandbox.")],
    tier: Annotated[str, typer.Option("--tier", help="none, high or critical.")] = "none",
    code: Annotated[list[Path] | None, typer.Option("--code", help="A file bound read-only at /code/NAME.")] = None,
    data: Annotated[list[str] | None, typer.Option("--data", help="NAME=PATH, read-only at /data/NAME.")] = None,
    guest: Annotated[bool, typer.Option("--guest", help="Give the run the broker's socket.")] = False,
    pids: Annotated[int, typer.Option("--pids", min=1, max=4096)] = 256,
    memory_mb: Annotated[int, typer.Option("--memory-mb", min=16)] = 1024,
    restarts: Annotated[int, typer.Option("--restarts", min=0, max=100, help="Restart budget of the plan.")] = 0,
    model: Annotated[str, typer.Option("--model", help="The model behind the run.")] = "",
    save: Annotated[Path | None, typer.Option("--save", help="Write the run's files into this folder.")] = None,
    approval: Annotated[str, typer.Option("--approval", help="An approval request with its votes.")] = "",
    step_up_proof: Annotated[str, typer.Option("--step-up", help="A proof that was given for exactly this plan.")] = "",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for approvals.")] = True,
    detach: Annotated[bool, typer.Option("--detach", help="Return when the run is placed.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Pass control characters of the output on.")] = False,
    code_otp: Annotated[str | None, typer.Option("--code-otp", help="Second-factor code (or INTERLOCK_CODE).")] = None,
) -> int:
    """Run a command under a lease, in a sandbox, with a record of everything. Returns the command's status."""
    here = Invocation.of(ctx)
    api = here.api()
    plan = full_plan({
        "argv": command, "tier": tier, "tenant": tenant_of(api), "code": upload_code(api, code or []),
        "datasets": datasets(data or []), "guest": guest, "pids": pids, "memory_mb": memory_mb, "restarts": restarts,
        "model": model,
    })
    codes = secret_input.codes(code_otp, here.environ)
    placed = Admission(here, api, plan, codes, approval, step_up_proof, wait).run()
    facts = {"tier": tier, "plan_digest": digest(plan)}
    if detach:
        here.terminal.result({**placed, **facts})
        return 0
    return attend(here, api, str(placed["run"]), raw=raw, save=save, facts=facts)


def restart(
    ctx: typer.Context,
    run_id: Annotated[str, typer.Argument(metavar="RUN")],
    detach: Annotated[bool, typer.Option("--detach", help="Return when the attempt is placed.")] = False,
    raw: Annotated[bool, typer.Option("--raw")] = False,
) -> int:
    """Start a new attempt of a run, inside its plan's restart budget. The gate is asked again."""
    here = Invocation.of(ctx)
    api = here.api()
    placed = api.post(f"/api/runs/{quote(run_id)}/restart")
    if detach:
        here.terminal.result({"run": run_id, **placed})
        return 0
    return attend(here, api, run_id, raw=raw, save=None, facts={"attempt": placed.get("attempt")})
