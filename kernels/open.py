"""Opens the cards that a text names: NVIDIA's, emulated ones, or whatever this machine has."""

import warnings

from kernels import compile as compiler
from kernels.card import CardError
from kernels.emulated.card import open_emulated_cards
from kernels.nvidia import open_nvidia_cards, unusable_card


def open_cards(which=None, cache_dir=compiler.CACHE_DIR, **settings):
    """The cards to use, as a list.

    which: None (all real cards, or one emulated card where there are none; with a warning if the machine has a card
    that its driver does not offer), "cuda" (all real cards), "cuda:1", "cuda:0,2", or "emulated" and, after a colon,
    what `open_emulated_cards` takes: "emulated:3" (three of them), "emulated:cmp-100-210,v100" (one of each type),
    "emulated:3@0.25" (links of 0.25 GB/s). settings: see EmulatedCard. Raises CardError.
    """
    kind, _, choice = (which or "").partition(":")
    if kind not in ("", "cuda", "emulated") or (kind == "" and choice):
        raise CardError(f"unknown card {which!r}: say cuda, cuda:0, emulated, emulated:3 or emulated:v100,t4")
    if kind != "emulated":
        try:
            numbers = [int(number) for number in choice.split(",")] if choice else None
        except ValueError:
            raise CardError(f"unknown card {which!r}: the numbers of cards follow the colon, cuda:0,2") from None
        cards = open_nvidia_cards(numbers, cache_dir, required=kind == "cuda")
        if cards:
            return cards
        if sentence := unusable_card():
            warnings.warn(f"{sentence}. The processor computes in its place, as an emulated card", stacklevel=2)
    return open_emulated_cards(choice or "1", cache_dir, **settings)
