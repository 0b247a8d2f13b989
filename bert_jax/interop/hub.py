"""Uploads converted models to the Hugging Face hub.

The converted checkpoint becomes the branch main. Each checkpoint in `checkpoints/` of a
workdir also becomes a branch step-N, for studies of the training over time.
"""

from collections.abc import Callable
import tempfile

from etils import epath

from bert_jax.errors import Failed, UserError
from bert_jax.interop import huggingface, load, native
from bert_jax.interop.pretrained import Pretrained
from bert_jax.runtime.console import print_summary
from bert_jax.training import checkpoint, integrity

CARD = 'README.md'


def push(source: str, folder: epath.Path, repo: str,
         write: Callable[[Pretrained, epath.Path], None]):
  """Uploads a converted model, then each checkpoint of its workdir to its own branch.

  Args:
    source: the model that was converted; if not a workdir, only `folder` is uploaded.
    folder: the converted model.
    repo: ORGANIZATION/NAME. It is created if it does not exist.
    write: converts a model into a new folder.

  Raises:
    UserError: the user is not logged in, or may not write to `repo`.
    Failed: the hub or the network fails; the same call uploads the rest.
  """
  _upload(folder, repo, 'main')
  workdir = epath.Path(source)
  if not (workdir / native.WORKDIR_FILE).exists():
    return
  checkpoints = checkpoint.absolute(workdir) / 'checkpoints'
  for step in integrity.steps(checkpoints):
    with tempfile.TemporaryDirectory() as temporary:
      of_step = epath.Path(temporary) / 'model'
      try:
        model = load.load(source, step)
      except UserError as e:
        # A run that is still training deletes old checkpoints while we read them.
        if (checkpoints / str(step)).exists():
          print_summary([('left out', str(e))])
        continue
      write(model, of_step)
      _upload(of_step, repo, f'step-{step}')


def _upload(folder: epath.Path, repo: str, branch: str):
  import huggingface_hub  # only here: everything else works without it

  # The card shows how to load the model, which differs between branches.
  name = f"'{repo}'" + ('' if branch == 'main' else f", revision='{branch}'")
  card = (folder / CARD).read_text().replace(f"'{huggingface.PLACEHOLDER}'", name)
  api = huggingface_hub.HfApi()
  try:
    api.create_repo(repo, exist_ok=True)
    if branch != 'main':
      api.create_branch(repo, branch=branch, exist_ok=True)
    api.upload_folder(repo_id=repo, folder_path=str(folder), revision=branch,
                      ignore_patterns=CARD, commit_message='Upload by bert_jax')
    api.upload_file(repo_id=repo, path_or_fileobj=card.encode(), path_in_repo=CARD,
                    revision=branch, commit_message='Upload by bert_jax')
  # The network libraries below the hub's package raise errors of their own classes.
  except Exception as e:
    missing_token = isinstance(e, huggingface_hub.errors.LocalTokenNotFoundError)
    status = getattr(getattr(e, 'response', None), 'status_code', 0)
    if missing_token or status in (401, 403):
      raise UserError(f'--push={repo}: you may not write there: log in with `hf auth '
                      'login`, or set HF_TOKEN to a token that may write') from e
    raise Failed(f'--push={repo}: {e}: run the same command to upload the rest') from e
  print_summary([('pushed', f'{repo}, branch {branch}')])
