#!/usr/bin/env bash
# Tests a release on every supported Python, builds it in dist/ and checks the files:
#   bash launch/release.sh [pytest arguments]
# Each version has its own environment: .venv-3.11, .venv-3.12, .venv-3.13.
# shellcheck source=launch/help.sh
. "$(dirname "${BASH_SOURCE[0]}")/help.sh"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for version in 3.11 3.12 3.13; do
  echo "Python $version"
  VENV=".venv-$version" PYTHON="python$version" bash launch/test.sh "$@"
done
python=.venv-3.13/bin/python
"$python" -m pip install --quiet build twine check-wheel-contents
rm -rf dist
"$python" -m build --outdir dist .
"$python" -m twine check --strict dist/*
.venv-3.13/bin/check-wheel-contents dist/*.whl
