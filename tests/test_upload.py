import numpy as np
import pytest

from kernels.emulated.card import EmulatedCard
from kernels.upload import SHARE, Feeder


@pytest.mark.parametrize("n_units, unit, piece", [(1, 34, 64), (7, 34, 64), (1000, 34, 1000), (5, 3, 3),
                                                  (3 * SHARE // 16 + 5, 16, SHARE + 7)])
def test_pieces_are_whole_units_in_order(card, n_units, unit, piece):
    data = np.random.default_rng(n_units).integers(0, 256, (n_units, unit), np.uint8)
    got, feeder = card.alloc((n_units, unit), np.uint8), Feeder(card, piece)
    for _ in range(2):
        card.poison(got)
        for first, raw in feeder.pieces(data, unit):
            assert raw.size % unit == 0 and 0 < raw.size <= piece
            card.copy(got[first:first + raw.size // unit].reshape(-1), raw)
        np.testing.assert_array_equal(card.download(got), data)


def test_a_piece_is_complete_before_kernels_read_it_and_stays_until_they_did():
    """Everything as late as the order that was asked for allows, and a slow link."""
    for card in EmulatedCard(late=True), EmulatedCard(link_gbs=0.001):
        data, feeder = np.arange(64, dtype=np.uint8).reshape(16, 4), Feeder(card, 8)
        got = card.zeros((16, 4), np.uint8)
        for first, raw in feeder.pieces(data, 4):
            card.copy(got[first:first + 2].reshape(-1), raw)
        np.testing.assert_array_equal(card.download(got), data)


def test_units_that_do_not_fit(card):
    for data, unit in ((np.zeros(100, np.uint8), 50), (np.zeros(33, np.uint8), 2)):
        with pytest.raises(ValueError, match="cannot be fed"):
            next(Feeder(card, 32).pieces(data, unit))


def test_the_buffers_go_with_the_feeder():
    card = EmulatedCard()
    feeder = Feeder(card, 1000)
    for _ in feeder.pieces(np.zeros(5000, np.uint8), 10):
        pass
    assert len(card.allocations) == 2
    del feeder, _
    card.synchronize()
    assert not card.allocations
