#!/usr/bin/env bash
# The guest environment: .venv-guest, what training runs and engines import. torch is installed once, through pip only,
# at one version; everything else is pinned by hash. The control plane's environment (.venv) has no torch.
set -euo pipefail
umask 022 # runs read it under uids of their own
torch="torch==2.13.0"
python="${PYTHON:-python3}"
guest=.venv-guest
quiet=(--quiet --disable-pip-version-check)
[ -x "$guest/bin/python" ] || "$python" -m venv "$guest"
"$guest/bin/python" -m pip install "${quiet[@]}" --no-deps --require-hashes -r requirements-guest.lock
"$guest/bin/python" -m pip install "${quiet[@]}" --no-deps --require-hashes -r requirements-models.lock
"$guest/bin/python" -c "import importlib.metadata as m; assert m.version('torch').split('+')[0] == '2.13.0'" 2>/dev/null ||
    "$guest/bin/python" -m pip install "${quiet[@]}" --no-deps "$torch"
"$guest/bin/python" -c 'import torch, transformers' >/dev/null
# bytecode is compiled now: runs see this folder read-only and would compile it anew at each start
"$guest/bin/python" -m compileall -q -j 0 "$guest/lib" >/dev/null 2>&1 || true
chmod -R go+rX "$guest"
