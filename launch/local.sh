#!/usr/bin/env bash
# From a fresh machine to a BERT that fills masks: bash launch/local.sh [WORKDIR [FLAGS OF main]]
# Creates .venv, installs, pretrains configs/tiny.py on the built-in corpus, and fills some masks.
# Run it again to resume. Delete the workdir to start over.
# shellcheck source=launch/help.sh
. "$(dirname "${BASH_SOURCE[0]}")/help.sh"
# shellcheck source=launch/venv.sh
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh" auto
workdir="${1:-runs/tiny}"

"$VENV/bin/python" -m bert_jax.main --config=configs/tiny.py --workdir="$workdir" "${@:2}"

"$VENV/bin/python" - "$workdir" <<'PYTHON'
import sys
import bert_jax

bert = bert_jax.from_pretrained(sys.argv[1])
print('\nFilled masks:')
for text in ('Return the [MASK] of the array along the given axis.',
             'The default [MASK] is None.',
             'The [MASK] value is returned if the key is not found.'):
  print(f'  {text}')
  for mask in bert.fill_mask(text):
    print('    ' + ', '.join(f"{c['token']} {c['probability']:.1%}" for c in mask['candidates']))
print('\nDoes the second sentence follow the first?')
pairs = [('The file is opened for reading.', 'If the file does not exist, an error is raised.'),
         ('The file is opened for reading.', 'The eigenvalues of the matrix are sorted.')]
for (first, second), probability in zip(pairs, bert.next_sentence(pairs)):
  print(f'  {probability:6.1%}  {first} {second}')
print(f'\nLoss and accuracy over the run: {sys.argv[1]}/curves.png')
PYTHON
