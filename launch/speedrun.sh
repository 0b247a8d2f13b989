#!/usr/bin/env bash
# Trains the best encoder in a given number of minutes:
#   bash launch/speedrun.sh --text='corpus/*.txt.gz' --held_out='held_out/*.txt' \
#     [--pairs='blimp/*.jsonl'] [--glue=GLUE] [--minutes=30] [--workdir=runs/speedrun]
# Creates .venv, installs, prepares the first 10M words of the text (a smaller text needs
# --words=N), trains configs/speedrun.py, prints a table of scores, and plots the loss and the pairs.
# Run it again to resume.
# shellcheck source=launch/help.sh
. "$(dirname "${BASH_SOURCE[0]}")/help.sh"
# shellcheck source=launch/venv.sh
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh" auto
exec "$VENV/bin/python" -m benchmarks.race --sides=speedrun --workdir=runs/speedrun "$@"
