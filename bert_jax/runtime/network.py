"""Checks at once whether a server answers: libraries retry for minutes first."""

import socket
import urllib.parse
import urllib.request

_ANSWERS = 15  # seconds within which a reachable server answers


def check(url: str):
  """Raises OSError, with the address, if no server answers at `url`."""
  # Behind a proxy a direct connection says nothing about the server.
  if urllib.request.getproxies():
    return
  parts = urllib.parse.urlsplit(url)
  address = parts.hostname, parts.port or (80 if parts.scheme == 'http' else 443)
  try:
    socket.create_connection(address, _ANSWERS).close()
  except OSError as e:
    raise OSError(f'{parts.hostname} does not answer ({e.strerror or e})') from e
