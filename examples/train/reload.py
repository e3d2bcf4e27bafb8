"""Save one small sealed checkpoint, then load it again and again, and say each time how it went.

For whoever wants to see what a changed file does: a refusal is printed with its code, and nothing of it is used.
"""

import time

import torch

import interlock
from interlock.errors import Refusal

state = {"first": torch.arange(65_536, dtype=torch.float32), "second": torch.ones(65_536)}
interlock.save(state, 1)
print("saved", flush=True)
last = ""
while True:
    interlock.step()
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    try:
        interlock.load(target)
        same = all(torch.equal(target[name], state[name]) for name in state)
        said = "loads: ok" if same else "loads: WRONG VALUES"
    except Refusal as refusal:
        clean = all(not value.any() for value in target.values())
        said = f"loads: refused [{refusal.code}] {refusal.message}" + ("" if clean else " BUT VALUES CAME OUT")
    if said != last:
        print(said, flush=True)
    last = said
    time.sleep(0.2)
