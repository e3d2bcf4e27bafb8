"""The ranks of bench/sealed_save.py: the training of examples/train saves its state, plain and sealed in turn.

Started by torchrun with the folder for plain saves, width and layers of the model, and the number of pairs. The plain
side is torch's FileSystemWriter as it comes (one file a rank, fsync). Rank 0 prints one JSON line a pair: seconds from
a barrier until every rank has saved, CPU seconds of all ranks and, named by BROKER_PID, of the broker.
"""

import argparse
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import interlock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "train"))
from train_bytes import Training


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Return seconds until every rank is done, and CPU seconds of all ranks and the broker."""
    dist.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    broker = _broker_cpu()
    work()
    spent = torch.tensor(time.process_time() - cpu)
    dist.all_reduce(spent)
    return {"s": time.perf_counter() - start, "cpu_s": float(spent) + _broker_cpu() - broker}


def _broker_cpu() -> float:
    """Return the CPU seconds of the process that holds the broker."""
    ticks = Path(f"/proc/{os.environ['BROKER_PID']}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Train one step, then save in pairs; the first pair is not counted."""
    folder, width, layers, pairs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    given = argparse.Namespace(width=width, layers=layers, rate=1e-3, steps=100, batch=1, context=16, slow=0.0)
    training = Training(given, rank, world)
    training.step(torch.randint(0, 256, (1000,), dtype=torch.uint8), 1)
    state = training.state(1)
    for n in range(pairs + 1):
        plain, found = folder / f"plain{n}", {}
        works = [("plain", lambda plain=plain: dcp.save(state, storage_writer=FileSystemWriter(plain))),
                 ("sealed", lambda n=n: interlock.save(state, n))]
        for name, work in works if n % 2 else works[::-1]:
            found.update({f"{name}_{unit}": value for unit, value in timed(work).items()})
        if rank == 0:
            shutil.rmtree(plain)
            if n:
                print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
