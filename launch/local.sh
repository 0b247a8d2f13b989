#!/usr/bin/env bash
# From a fresh machine to a BERT that fills masks: bash launch/local.sh [WORKDIR [FLAGS OF main]]
# Makes .venv, installs, pretrains configs/tiny.py on the built-in corpus, fills some masks.
# Run again, it goes on where it was; delete the workdir to start over.
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh" requirements.txt
workdir="${1:-runs/tiny}"

"$VENV/bin/python" -m bert_jax.main --config=configs/tiny.py --workdir="$workdir" "${@:2}"

"$VENV/bin/python" - "$workdir" <<'PYTHON'
import sys
import bert_jax

bert = bert_jax.from_pretrained(sys.argv[1])
print('\nFilled masks:')
for text in ('Returns a new [MASK] with the given shape.',
             'If the file does not [MASK], an error is raised.',
             'The function returns [MASK] if the two strings are equal, false otherwise.'):
  print(f'  {text}')
  for mask in bert.fill_mask(text):
    print('    ' + ', '.join(f"{c['token']} {c['probability']:.1%}" for c in mask['candidates']))
print(f'\nLoss and accuracy over the run: {sys.argv[1]}/curves.png')
PYTHON
