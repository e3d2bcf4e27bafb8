"""The walk through Interlock, as a user would do it: `make demo`.

It is a client: the `interlock` command, HTTP, and files that a user has. It imports nothing of the rooms and
opens no database (tests/demo/test_demo_imports.py reads its imports). Every number that it prints was read
back from the product. The parts: `stage.py` starts and ends commands, `walk.py` holds the steps of runs and stops,
`models.py` those of training, serving and calling.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from models import MODEL_STEPS, Studio  # noqa: E402
from stage import Stage, StepFailed, Walking  # noqa: E402 - the folder of this file comes first
from walk import FIRST_STEPS, LAST_STEPS, Cast  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Walk all steps; return 0 when each one held."""
    leaves = os.environ.get("DEMO_EXIT") == "1"
    stage = Stage(ROOT, Path(os.environ.get("DEMO_STATE") or ROOT / ".demo").absolute())
    try:
        stage.replace_previous()
    except (Walking, StepFailed) as failure:
        stage.say(str(failure))
        return 1
    code = 1
    try:
        cast = Cast(stage)
        studio = Studio(cast)
        for title, step in FIRST_STEPS:
            stage.step(title, lambda step=step: step(cast))
        for title, step in MODEL_STEPS:
            stage.step(title, lambda step=step: step(studio))
        for title, step in LAST_STEPS:
            stage.step(title, lambda step=step: step(cast))
        code = 0
    except StepFailed as failure:
        stage.say(str(failure))
    except KeyboardInterrupt:
        stage.say("interrupted")
    finally:
        stage.table([title for title, _ in (*FIRST_STEPS, *MODEL_STEPS, *LAST_STEPS)])
        if leaves:
            stage.take_down()
        else:
            stage.farewell()
    return code


if __name__ == "__main__":
    sys.exit(main())
