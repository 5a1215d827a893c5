"""A card for tests that count what its memory holds."""

from kernels.emulated.card import EmulatedCard


def own_card(card):
    """An emulated card of the test's own in place of the one that all tests share, where arrays of former tests may go
    at any moment: when Python finds them, or when a thread ends. A real card is given back as it is."""
    return EmulatedCard() if card.kind == "emulated" else card
