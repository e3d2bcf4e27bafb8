"""Runs inside the sandbox: counts and hashes the documentation below /data/docs, writes /work/out/result.json."""

import hashlib
import json
import os
import sys
from pathlib import Path

ROOT, OUT = Path("/data/docs"), Path("/work/out")
NAMES = ("METADATA", "README", "LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "AUTHORS", "CHANGE")
ENDINGS = (".rst", ".md", ".txt")


def wanted(name: str) -> bool:
    """Return whether a file is documentation by its name."""
    return name.upper().startswith(NAMES) or name.lower().endswith(ENDINGS)


def main() -> int:
    """Count files, bytes, lines and words; hash all of it in one fixed order."""
    files = sorted(Path(folder) / name for folder, _, names in os.walk(ROOT) for name in names if wanted(name))
    found = {"files": 0, "bytes": 0, "lines": 0, "words": 0}
    everything = hashlib.sha256()
    for path in files:
        if path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        everything.update(hashlib.sha256(str(path.relative_to(ROOT)).encode() + b"\0" + data).digest())
        found["files"] += 1
        found["bytes"] += len(data)
        found["lines"] += data.count(b"\n")
        found["words"] += len(data.split())
    result = {**found, "sha256": everything.hexdigest(), "host_can_be_written": os.access(ROOT, os.W_OK)}
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "result.json").write_text(json.dumps(result) + "\n")
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
