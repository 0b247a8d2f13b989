"""The figures of launch/local.sh: all places that state them agree."""

import shutil

from benchmarks import local

FILES = ('README.md', 'docs/results.md', 'configs/tiny.py', local.PICTURE)


def test_all_files_state_the_same_figures():
  assert not local.disagreeing(local.ROOT)


def test_a_new_run_updates_the_figures_in_all_files(tmp_path):
  for name in FILES:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    shutil.copy(local.ROOT / name, tmp_path / name)
  figures = local.read(tmp_path)
  other = figures._replace(
      cores=4, minutes=12, answers='Filled masks:\n  \\1 [MASK]\n    a 1.0%',
      held_out='step 9  held out:  mlm_loss 4.123  nsp_accuracy 0.654  unigram_entropy 6.5')
  local.write(other, tmp_path / local.PICTURE, tmp_path)
  assert local.read(tmp_path) == other and not local.disagreeing(tmp_path)
  readme, results, tiny = ((tmp_path / name).read_text() for name in FILES[:3])
  assert '| 12 min, install included | 4.12 | 6.50 | 0.65 |' in results
  assert 'MLM loss 4.12 (the token frequencies alone give 6.50), NSP accuracy 0.65.' in ' '.join(
      tiny.split())
  # No other line changes, and every wrong place is reported.
  assert len(readme.splitlines()) == len((local.ROOT / 'README.md').read_text().splitlines()) - (
      len(figures.answers.splitlines()) - 3)
  (tmp_path / 'configs/tiny.py').write_text(tiny.replace('0.65', '0.66'))
  (tmp_path / 'docs/results.md').write_text(results.replace('| 4.12 |', '| 4.13 |'))
  shutil.copy(local.ROOT / local.PICTURE, tmp_path / local.PICTURE)
  assert [place.partition(':')[0] for place in local.disagreeing(tmp_path)] == [
      'docs/results.md', 'configs/tiny.py', local.PICTURE]
