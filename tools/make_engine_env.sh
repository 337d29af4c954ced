#!/usr/bin/env bash
# Make the environment that vLLM runs in: tools/make_engine_env.sh [FOLDER] [cpu|gpu]
#
# FOLDER is .venv-engine unless told; engine.python=FOLDER/bin/python uses it. `cpu` (the default) borrows torch from the
# environment whose Python makes it, .venv of this repository unless PYTHON names another; `gpu` brings its own.
# A complete folder is left as it is. Reads PIP_ARGS too, which the Makefile's head explains.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
if (($# > 2)) || [[ ! ${2:-cpu} =~ ^(cpu|gpu)$ ]]; then
    echo "make_engine_env: found the arguments '$*', expected [FOLDER] [cpu|gpu]" >&2
    exit 2
fi
command -v "$python" >/dev/null || {
    echo "make_engine_env: no Python at $python; run make install, or name one: PYTHON=/path/to/python3.11" >&2
    exit 1
}
exec "$python" "$root/tools/make_environment.py" "engine-${2:-cpu}" "${1:-$root/.venv-engine}"
