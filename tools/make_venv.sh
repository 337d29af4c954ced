#!/usr/bin/env bash
# Make or refresh the project's virtual environment: tools/make_venv.sh FOLDER CONSTRAINTS
# Reads PYTHON, PIP_ARGS and TORCH_INDEX_URL, which the Makefile's head explains.
set -euo pipefail
venv=$1
constraints=$2

fail() {
    printf 'make install: %s\n' "$@" >&2
    exit 1
}

fits() { # a Python of a version that the project supports
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

makes_venvs() { # Debian ships venv apart from Python
    "$1" -c 'import venv, ensurepip' >/dev/null 2>&1
}

find_python() {
    local candidate fallback=
    # 3.11 first: the pinned environment is one of 3.11.
    for candidate in python3.11 python3 python3.12 python3.10; do
        if fits "$candidate"; then
            if makes_venvs "$candidate"; then
                echo "$candidate"
                return
            fi
            fallback=${fallback:-$candidate}
        fi
    done
    if [[ -n $fallback ]]; then
        echo "$fallback"
        return
    fi
    fail "no Python 3.10, 3.11 or 3.12 found; python3 is $(python3 --version 2>&1 || true)" \
        "install one (Debian: apt-get install python3.11 python3.11-venv; pyenv: pyenv install 3.11)" \
        "or name it: make install PYTHON=/path/to/python3.11"
}

if [[ -x $venv/bin/python ]] && ! fits "$venv/bin/python"; then
    fail "$venv has $("$venv/bin/python" --version 2>&1 || true), expected 3.10 to 3.12; remove it with: make clean"
fi
if [[ ! -x $venv/bin/python || ! -x $venv/bin/pip ]]; then
    if [[ -n ${PYTHON:-} ]]; then
        fits "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1 || true), expected Python 3.10 to 3.12"
        python=$PYTHON
    else
        python=$(find_python)
    fi
    if ! makes_venvs "$python"; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        fail "$python cannot make virtual environments: its venv or ensurepip module is missing" \
            "on Debian and Ubuntu: apt-get install python$version-venv"
    fi
    echo "Making $venv with $python ($("$python" --version 2>&1))"
    "$python" -m venv "$venv"
fi

read -ra pip_args <<<"${PIP_ARGS:-}"
pip() {
    "$venv/bin/python" -m pip install --no-input ${pip_args[@]+"${pip_args[@]}"} "$@"
}

if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    pins=(-c "$constraints")
else
    pins=()
    echo "Python 3.10: some pins of $constraints need 3.11, so pip searches for itself. This takes longer."
fi

if [[ -n ${TORCH_INDEX_URL:-} ]]; then
    # torch alone comes from there: an extra index for everything could also answer for other packages.
    pip --progress-bar off --no-deps --index-url "$TORCH_INDEX_URL" ${pins[@]+"${pins[@]}"} torch
fi
echo "Installing the project and what it needs (one to three minutes with a fast network)"
pip ${pins[@]+"${pins[@]}"} --progress-bar off -e '.[dev]'
"$venv/bin/python" -m pip check
