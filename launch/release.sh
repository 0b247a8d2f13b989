#!/usr/bin/env bash
# Tests a release on every supported Python: bash launch/release.sh [pytest arguments]
# Each version has its own environment: .venv-3.11, .venv-3.12, .venv-3.13.
# shellcheck source=launch/help.sh
. "$(dirname "${BASH_SOURCE[0]}")/help.sh"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for version in 3.11 3.12 3.13; do
  echo "Python $version"
  VENV=".venv-$version" PYTHON="python$version" bash launch/test.sh "$@"
done
