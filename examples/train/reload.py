"""Save five small sealed checkpoints, then load the newest again and again, and say each time how it went.

For whoever wants to see what a changed file does: a refusal is printed with its code, nothing of the file is used, and
the next load is offered the step before.
"""

import time

import torch

import interlock
from interlock.errors import Refusal

STEPS = 5


def state_at(step: int) -> dict[str, torch.Tensor]:
    return {"first": torch.arange(65_536, dtype=torch.float32) + step, "second": torch.full((65_536,), float(step))}


for step in range(1, STEPS + 1):
    interlock.save(state_at(step), step)
print(f"saved steps 1 to {STEPS}", flush=True)
last = ""
while True:
    interlock.step()
    target = {name: torch.zeros_like(value) for name, value in state_at(0).items()}
    try:
        found = interlock.load(target)
        same = all(torch.equal(target[name], value) for name, value in state_at(found).items())
        said = f"loads: ok, step {found}" if same else "loads: WRONG VALUES"
    except Refusal as refusal:
        clean = all(not value.any() for value in target.values())
        said = f"loads: refused [{refusal.code}] {refusal.message}" + ("" if clean else " BUT VALUES CAME OUT")
    if said != last:
        print(said, flush=True)
    last = said
    time.sleep(0.2)
