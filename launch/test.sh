#!/usr/bin/env bash
# Runs the tests on a fresh machine: bash launch/test.sh [pytest arguments]
# Creates .venv, installs, lints, and runs the tests in two processes.
# shellcheck source=launch/help.sh
. "$(dirname "${BASH_SOURCE[0]}")/help.sh"
# shellcheck source=launch/venv.sh
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh" requirements-test.txt
"$VENV/bin/ruff" check .
exec "$VENV/bin/python" -m pytest -n 2 --dist worksteal "$@"
