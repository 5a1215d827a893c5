"""Turns about other things in conversations with a picture, for training alone: a model that sees pictures only in
conversations about them takes whatever is asked after a picture to be about it.
"""

from .. import facts, lists, people, reasoning
from ..words import Draw

# How often; first words are of the facts about the model that a conversation may begin with.
KINDS = {"facts": 5, "self": 4, "first words": 3, "people": 4, "reasoning": 3, "lists": 1}
FIRST_WORDS = ("self-hello", "self-who", "self-name", "self-can", "self-how", "self-thanks", "self-bye", "self-ok",
               "self-meet")
SEES = "self-pictures"      # a fact that one may ask for and mean the picture at hand
ASKED_FOR = 0.5             # of the turns ask for what the user told before, where he did


class Besides:
    """What is talked about in one conversation. fact: what was told last, to which "Why?" may come; None after a turn
    about the picture."""

    def __init__(self, draw: Draw, lang: str):
        self.draw, self.lang, self.fact, self._waiting = draw, lang, None, []

    def turn(self, spelled: set) -> tuple[str, str, dict]:
        """What the user says, the answer and what it is judged by. spelled: texts that answers have letter by letter,
        for they are read from the picture; none is said here."""
        if self._waiting and self.draw.rng.random() < ASKED_FOR:
            self.fact = None
            return self._waiting.pop()
        while True:
            turns, fact = self._turns()
            if not any(text in said for *both, _ in turns for said in both for text in spelled):
                break
        self.fact, (first, *later) = fact, turns
        self._waiting += later
        return first

    def _turns(self) -> tuple[list[tuple], facts.Fact | None]:
        """A turn and those that may come later on, and the fact that it tells."""
        rng, lang = self.draw.rng, self.lang
        # What was told is asked for before anything else is told: that could be about the same.
        kinds = [kind for kind in KINDS if kind != "people" or not self._waiting]
        kind, = rng.choices(kinds, [KINDS[kind] for kind in kinds])
        if kind == "people":
            return people.passing(self.draw, lang), None
        if kind in ("reasoning", "lists"):
            return [(reasoning if kind == "reasoning" else lists).turn(self.draw, lang)], None
        first = kind == "first words"
        while True:
            *turn, fact = facts.turn(rng, lang, "self" if first else kind, None if first else self.fact, wide=True)
            if fact.id in FIRST_WORDS if first else fact.id != SEES:
                return [tuple(turn)], fact
