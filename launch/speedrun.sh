#!/usr/bin/env bash
# The best encoder for given minutes:
#   bash launch/speedrun.sh --text='corpus/*.txt.gz' --held_out='held_out/*.txt' \
#     [--pairs='blimp/*.jsonl'] [--glue=GLUE] [--minutes=30] [--workdir=runs/speedrun]
# Makes .venv, installs, prepares the first 10M words of the text (a smaller one needs --words=N),
# trains configs/speedrun.py, and ends in a table of scores and a picture of loss over minutes. Run
# again, it goes on where it was.
# shellcheck source=launch/help.sh
. "$(dirname "${BASH_SOURCE[0]}")/help.sh"
# shellcheck source=launch/venv.sh
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh" requirements.txt
exec "$VENV/bin/python" -m benchmarks.race --sides=speedrun --workdir=runs/speedrun "$@"
