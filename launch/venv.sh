# shellcheck shell=bash
# Sourced by the other scripts. Creates .venv in the repository and installs a requirements file:
#   . launch/venv.sh requirements.txt
# `auto` installs the file for the accelerator of this machine.
# PYTHON names the interpreter (a path, or python3.12), VENV the folder. Without PYTHON it tries
# 3.13, 3.12, 3.11 and then python3, on the PATH or installed by pyenv. If none is new enough, or
# Debian has removed its venv module, uv installs one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${VENV:-.venv}"

usable() { # command; succeeds if it is a new enough Python with the venv module
  "$1" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null
}

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

refuse() { # message
  echo "$1" >&2
  exit 2
}

find_python() { # sets `python`; fails if no interpreter is usable
  local names=(python3.13 python3.12 python3.11 python3) name
  if [ -n "${PYTHON:-}" ]; then names=("$PYTHON"); fi
  for name in "${names[@]}"; do
    # pyenv keeps 3.13 in versions/3.13.0, which is not on the PATH.
    for python in "$name" "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/${name#python}".*/bin/python; do
      if usable "$python"; then return; fi
    done
  done
  return 1
}

# An environment that uv made has no pip.
if ! "$VENV/bin/python" -m pip --version > /dev/null 2>&1 &&
  ! "$VENV/bin/python" -m ensurepip > /dev/null 2>&1; then
  if find_python; then
    "$python" -m venv --clear "$VENV"
  elif [ -z "${PYTHON:-}" ] && python3 -m pip install --quiet --target="$VENV.uv" uv; then
    "$VENV.uv/bin/uv" venv --quiet --clear --seed --python=3.13 "$VENV"
  else
    refuse "bert_jax needs Python 3.11 or newer with its venv module: set PYTHON=/path/to/python3"
  fi
elif [ -n "${PYTHON:-}" ]; then
  find_python || refuse "PYTHON=$PYTHON: give Python 3.11 or newer with its venv module"
  has="$(version "$VENV/bin/python")"
  [ "$(version "$python")" = "$has" ] || refuse "$VENV has Python $has, not PYTHON=$PYTHON: \
delete it, leave PYTHON out, or set VENV to another folder"
fi
requirements="$1"
# The device files of bert_jax/runtime/host.py.
if [ "$requirements" = auto ]; then
  requirements='requirements.txt'
  if compgen -G '/dev/nvidia[0-9]*' > /dev/null; then requirements='requirements-gpu.txt'; fi
  if compgen -G '/dev/accel*' > /dev/null || compgen -G '/dev/vfio/[0-9]*' > /dev/null; then
    requirements='requirements-tpu.txt'
  fi
fi
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
