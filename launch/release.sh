#!/usr/bin/env bash
# What is tried before a release: the tests on every Python that bert_jax runs on, each in an
# environment of its own (.venv-3.11, .venv-3.12, .venv-3.13): bash launch/release.sh [pytest arguments]
# shellcheck source=launch/help.sh
. "$(dirname "${BASH_SOURCE[0]}")/help.sh"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for version in 3.11 3.12 3.13; do
  echo "Python $version"
  VENV=".venv-$version" PYTHON="python$version" bash launch/test.sh "$@"
done
