# shellcheck shell=bash
# Sourced by the other scripts: makes .venv in the repository and installs a requirements file.
#   . launch/venv.sh requirements.txt
# PYTHON names the interpreter, VENV the folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${VENV:-.venv}"
if [ -z "${PYTHON:-}" ]; then
  for PYTHON in python3.12 python3.11 python3; do
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
  done
fi
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "bert_jax needs Python 3.11 or newer: set PYTHON=/path/to/python3" >&2
  exit 2
fi
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -r "$1"
