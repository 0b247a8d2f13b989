"""An emulated bucket: python -m tests.bucket PORT serves it, `variables(PORT)` select it.

tensorstore compares generations to notice that another process wrote an object in between.
gcp-storage-emulator has no generations: this module adds them.
"""

from http import HTTPStatus
import sys

from gcp_storage_emulator import exceptions, server
from gcp_storage_emulator.handlers import objects

NAME = 'house'


def variables(port: int) -> dict[str, str]:
  """The environment variables of a process whose gs:// is this bucket."""
  address = f'http://127.0.0.1:{port}'
  return {'STORAGE_EMULATOR_HOST': address, 'TENSORSTORE_GCS_HTTP_URL': address,
          'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'none',
          'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false'}


def _generation(request, storage) -> str:
  """The generation of the object that a request names; '0' without one."""
  bucket, name = request.params['bucket_name'], request.params.get('object_id')
  try:
    return storage.get_file_obj(bucket, name or request.query['name'][0])['generation']
  except (exceptions.NotFound, KeyError):
    return '0'


def _with_generations(handler):
  def handle(request, response, storage, *args, **kwargs):
    current = _generation(request, storage)
    if request.query.get('ifGenerationMatch', [current]) != [current]:
      response.status = HTTPStatus.PRECONDITION_FAILED
    elif request.query.get('ifGenerationNotMatch') == [current]:
      response.status = HTTPStatus.NOT_MODIFIED
    else:
      handler(request, response, storage, *args, **kwargs)
    if current != '0':
      response['x-goog-generation'] = current
  return handle


def main(port: int):
  """Serves until it is killed."""
  for _, handlers in server.HANDLERS:
    for method, handler in handlers.items():
      if handler in (objects.get, objects.download, objects.insert, objects.delete):
        handlers[method] = _with_generations(handler)
  bucket = server.create_server('127.0.0.1', port, in_memory=True, default_bucket=NAME)
  bucket.start()
  print('ready', flush=True)


if __name__ == '__main__':
  main(int(sys.argv[1]))
