#!/usr/bin/env bash
# Debian/Ubuntu packages that the product and its tests use. As root it installs what is missing;
# otherwise it says what is missing and goes on: the product then names each layer that a host lacks.
set -euo pipefail
missing=()
need() { command -v "$1" >/dev/null 2>&1 || missing+=("$2"); }
need bwrap bubblewrap
need chromium chromium
need python3 python3
need softhsm2-util softhsm2
ldconfig -p 2>/dev/null | grep -F libatomic.so.1 >/dev/null || missing+=(libatomic1) # the browser tests' driver
[ -x /usr/lib/postgresql/15/bin/initdb ] || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing+=(postgresql)
python3 -c 'import venv, ensurepip' >/dev/null 2>&1 || missing+=(python3-venv)
fonts="$(fc-list 2>/dev/null || true)"
[[ "${fonts^^}" == *CJK* ]] || missing+=(fonts-noto-cjk)
[ "${#missing[@]}" -eq 0 ] && exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing Debian packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    for package in "${missing[@]}"; do
        apt-get install -y -qq --no-install-recommends "$package" >/dev/null && continue
        case "$package" in
            bubblewrap | python3 | python3-venv) echo "cannot install $package, which the product needs"; exit 1 ;;
            # Ubuntu has Chromium as a snap only: the demo does without, the tests that need it say so.
            *) echo "cannot install $package: the tests that need it are skipped, visibly" ;;
        esac
    done
else
    echo "missing system packages: ${missing[*]}"
    echo "next step: sudo apt-get install ${missing[*]}"
fi
