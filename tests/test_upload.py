import numpy as np
import pytest

from kernels.emulated.card import EmulatedCard
from kernels.upload import SHARE, Feeder


def pieces(feeder, data, unit):
    """Of a NumPy array that stands for a file."""
    raw = data.reshape(-1)
    return feeder.pieces(lambda start, into: np.copyto(into, raw[start:start + into.size]), raw.size, unit)


@pytest.mark.parametrize("n_units, unit, piece", [(1, 34, 64), (7, 34, 64), (1000, 34, 1000), (5, 3, 3),
                                                  (3 * SHARE // 16 + 5, 16, SHARE + 7)])
def test_pieces_are_whole_units_in_order(card, n_units, unit, piece):
    data = np.random.default_rng(n_units).integers(0, 256, (n_units, unit), np.uint8)
    got, feeder = card.alloc((n_units, unit), np.uint8), Feeder(card, piece)
    for _ in range(2):
        card.poison(got)
        for first, raw in pieces(feeder, data, unit):
            assert raw.size % unit == 0 and 0 < raw.size <= piece
            card.copy(got[first:first + raw.size // unit].reshape(-1), raw)
        np.testing.assert_array_equal(card.download(got), data)


def test_a_piece_is_complete_before_kernels_read_it_and_stays_until_they_did():
    """On a card that does everything as late as the queued order allows, with a slow link."""
    for card in EmulatedCard(late=True), EmulatedCard(link_gbs=0.001):
        data, feeder = np.arange(64, dtype=np.uint8).reshape(16, 4), Feeder(card, 8)
        got = card.zeros((16, 4), np.uint8)
        for first, raw in pieces(feeder, data, 4):
            card.copy(got[first:first + 2].reshape(-1), raw)
        np.testing.assert_array_equal(card.download(got), data)


def test_units_that_do_not_fit(card):
    for data, unit in ((np.zeros(100, np.uint8), 50), (np.zeros(33, np.uint8), 2)):
        with pytest.raises(ValueError, match="cannot be fed"):
            next(pieces(Feeder(card, 32), data, unit))


@pytest.mark.parametrize("n_bytes", [40, 3 * SHARE])
def test_what_reading_raises_is_heard(card, n_bytes):
    def fail(start, into):
        raise EOFError

    with pytest.raises(EOFError):
        list(Feeder(card, 2 * SHARE).pieces(fail, n_bytes, 4))


def test_the_buffers_go_with_the_feeder():
    card = EmulatedCard()
    feeder = Feeder(card, 1000)
    for _ in pieces(feeder, np.zeros(5000, np.uint8), 10):
        pass
    assert len(card.allocations) == 2
    del feeder, _
    card.synchronize()
    assert not card.allocations
