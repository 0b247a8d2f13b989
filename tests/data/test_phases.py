import pytest

from bert_jax.data.phases import Phases
from bert_jax.errors import UserError


def test_locate():
  phases = Phases.create(((900, 128, 256), (100, 512, 64)), 1000, 512, 256)
  assert phases.locate(0) == (0, (900, 128, 256), 0)
  assert phases.locate(899) == (0, (900, 128, 256), 899)
  assert phases.locate(900) == (1, (100, 512, 64), 0)
  assert phases.locate(999) == (1, (100, 512, 64), 99)


def test_none_is_one_phase():
  assert Phases.create((), 10, 128, 32) == ((10, 128, 32),)


@pytest.mark.parametrize('phases', [((5, 128, 8),), ((5, 128), (5, 128)), ((10, 0, 8),),
                                    ((10.0, 8, 8),)])
def test_wrong_phases(phases):
  with pytest.raises(UserError, match='phases='):
    Phases.create(phases, 10, 128, 8)
