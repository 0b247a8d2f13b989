"""A model for the evaluations."""

import pytest

from tests.interop import torch_bert


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  """(folder, PyTorch's model) of a random tiny BERT of 64 positions."""
  folder = tmp_path_factory.mktemp('model')
  theirs = torch_bert.make('BertForMaskedLM', folder, max_position_embeddings=64)
  return str(folder), theirs
