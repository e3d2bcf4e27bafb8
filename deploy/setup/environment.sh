#!/usr/bin/env bash
# The one environment: .venv at the root, every package pinned by hash, both distributions editable.
set -euo pipefail
# Programs that give up root read this code under users of their own, whatever the umask of this shell is.
umask 022
packages=(audit control_plane interlock killswitch kms migrations policy runners sandbox)
chmod -R go+rX "${packages[@]}"
[ ! -d .venv ] || chmod -R go+rX .venv
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python 3.11 or newer is needed; found $("$python" --version)"
    exit 1
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e ./interlock -e .
.venv/bin/python -m pip check >/dev/null
