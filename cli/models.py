"""The models of a command line: what each is loaded with, and where it goes. named.py says how several models are
written. Those of --embedding-model and --reranking-model have the defaults of `qengine.load`."""

import collections
import contextlib
import copy
import dataclasses
import functools
import gc
from dataclasses import dataclass

import qengine
from engine.details import ModelDetails
from engine.hub import eyes_file
from engine.limits import SAMPLING
from engine.request import RequestError
from engine.served import Defaults, Facts, Models, Served
from engine.sight import limits_for
from engine.text_engine import wrong_kind
from kernels.card import OutOfMemory, PlannedCard

from .engines import Wishes, asked, check_eyes, memories
from .named import is_several

# ---- opened --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """A model that is to be served or planned.

    arguments: of `qengine.load`, without its cards. card: their name. is_side: whether it goes onto the first model's
    first card where there is no such name. n_models: how many share the memory; 0: this one takes what it likes.
    """

    model: "qengine.OpenModel"
    arguments: dict
    card: str | None
    aliases: tuple[str, ...] = ()
    idle: float | None = None
    defaults: Defaults = Defaults()
    is_side: bool = False
    n_models: int = 0

    @property
    def facts(self) -> Facts:
        """Of the model before it is loaded."""
        model, n_ctx = self.model, self.model.n_ctx(self.arguments.get("ctx"))
        eyes = eyes_file(self.arguments.get("mmproj"), model, qengine.note)
        limits = limits_for(self.arguments.get("image_tokens"), n_ctx) if eyes else None
        return Facts(model.name, model.kind, n_ctx, model.tokenizer, model.template, ModelDetails.of(model.weights),
                     limits)

    @property
    def shares(self) -> bool:
        """Whether others on its cards leave it a share of what it would take for checkpoints by default."""
        return self.n_models > 0 and self.arguments["checkpoint_memory"] is None

    def planner(self, cards: list):
        """The Planner for these cards. Where n models share a card, each takes an n-th of an eighth of it for
        checkpoints, unless it says otherwise, or fits only with fewer."""
        if self.shares:
            share = min(card.memory_bytes for card in cards) // (8 * self.n_models)
            planner = self._planner(cards, checkpoint_memory=share)
            if planner.plan.fits:
                return planner
        return self._planner(cards)

    def _planner(self, cards: list, **changes):
        return qengine.make_planner(self.model, cards, self.model.demand(**self.arguments | changes))

    def load(self, cards: list, progress: bool = True):
        planned = {"checkpoint_memory": self.planner(cards).asked.checkpoint_memory} if self.shares else {}
        return qengine.load(self.model, cards, progress=progress, **self.arguments | planned)


def sampling_of(options) -> dict:
    """Fields of Request that the command line sets."""
    sampling = {name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None}
    return sampling | {"repetition_guard": options.repetition_guard != "off"}


def open_models(options) -> list[Wanted]:
    """The models of a server, those of -m first. Raises ModelError, RequestError."""
    named = [open_named(own, len(options.each)) for own in options.each] if is_several(options) else [open_one(options)]
    found = [*named, *open_side(options)]
    names = collections.Counter(name for one in found for name in (one.model.name, *one.aliases))
    for name, n in names.items():
        if n > 1 and is_several(options):
            raise RequestError("model", f"-m: {n} models have the name {name}: -m NAME=FILE gives one another name")
    return found


def open_one(options) -> Wanted:
    """The model of -m, where it is the only one."""
    return opened(options, qengine.open_model(options.model).keeping(options.kv), options.card)


def open_named(options, n_models: int) -> Wanted:
    """One of several models. options: its own."""
    model, argument = qengine.open_model(options.model), options.argument
    if argument.name:
        model = dataclasses.replace(model, config=dataclasses.replace(model.config, name=argument.name))
    if model.kind == "text":        # the others keep halves
        model = model.keeping(options.kv)
    return opened(options, model, options.card, aliases=argument.aliases, idle=argument.idle, n_models=n_models)


def opened(options, model: "qengine.OpenModel", card: str | None, **more) -> Wanted:
    wishes = Wishes.of(options)
    if model.kind == "text" or not is_several(options):     # what is said for all of several is for those with chats
        wishes.check(model)
    check_eyes(options, model)
    return Wanted(model, asked(options), card, defaults=wishes.defaults(sampling_of(options)), **more)


def open_side(options) -> list[Wanted]:
    """The models of --embedding-model and --reranking-model. Raises ModelError; RequestError where a model is of
    another kind than its option says."""
    found = []
    for kind in "embedding", "reranking":
        if (path := getattr(options, f"{kind}_model")) is not None:
            model = qengine.open_model(path)
            if model.kind != kind:
                raise wrong_kind(model, kind)
            card = getattr(options, f"{kind}_card")
            arguments = {"products": options.products, "memory": memories(options)["memory"]}
            found.append(Wanted(model, arguments, card, is_side=True))
    return found


def in_order(wanted: list[Wanted]) -> list[Wanted]:
    """The models in the order of loading: those for embeddings and scores first, so that the plans of the others see
    what they leave; then those that are loaded at their first request."""
    return sorted(wanted, key=lambda one: (one.idle is not None, one.model.kind == "text"))


# ---- cards ---------------------------------------------------------------------------------------------------


class Deck:
    """The cards of all models. first: the model that names most of them, and says how much may be taken of each."""

    def __init__(self, first: Wanted, wrap=lambda card: card):
        self.named, self.memory, self.wrap = first.card, first.arguments["memory"], wrap
        cards = qengine.open_named(self.named)
        self.first = type(cards)(map(self._limited, cards))
        self.known = {card.name: card for card in self.first}       # by their own names

    def of(self, wanted: Wanted) -> list:
        """The cards of a model."""
        if wanted.is_side and wanted.card is None:
            return self.first[:1]
        if wanted.card == self.named:
            return self.first
        cards = qengine.open_named(wanted.card)
        return type(cards)(self.known.get(card.name) or self.known.setdefault(card.name, self._limited(card))
                           for card in cards)

    def _limited(self, card):
        if self.memory is not None:
            card.limit(self.memory)         # first: a card on paper begins with what is free
        return self.wrap(card)

    def planned(self) -> "Deck":
        """The same cards on paper, with what is free on them now."""
        other = copy.copy(self)
        other.wrap = PlannedCard
        other.known = {name: PlannedCard(card) for name, card in self.known.items()}
        other.first = type(self.first)(other.known[card.name] for card in self.first)
        return other


def twins(cards: list) -> list:
    return type(cards)(card.twin() for card in cards)


def set_aside(planner):
    for card, stage in zip(planner.cards, planner.plan.stages):
        card.set_aside(stage.total)


# ---- loaded, or planned -----------------------------------------------------------------------------------------


def load_models(wanted: list[Wanted], release) -> Models:
    """The models of a server. Loads those that are always loaded. release(engine): closes an engine and gives back its
    memory. Raises ModelError, RequestError, CardError; then none stays loaded."""
    deck, served, taken = Deck(wanted[0]), {}, set()
    empty = deck.planned()
    with contextlib.ExitStack() as stack:
        for one in in_order(wanted):
            cards = deck.of(one)
            if one.idle is None:
                is_alone = taken.isdisjoint(card.name for card in cards)
                with contextlib.nullcontext() if is_alone else naming_room(one, empty):
                    engine = one.load(cards if one is wanted[0] else twins(cards))
                stack.callback(engine.close)
                taken.update(card.name for card in engine.cards)
                served[id(one)] = Served(engine, one.aliases, one.defaults)
            else:
                with naming_room(one, empty):
                    one.planner(deck.planned().of(one)).check()     # better now than at the first request
                served[id(one)] = Served(None, one.aliases, one.defaults, facts=one.facts, idle=one.idle,
                                         load=functools.partial(load_again, one, twins(cards)))
        stack.pop_all()
    return Models([served[id(one)] for one in wanted], functools.partial(put_away, release))


def load_again(wanted: Wanted, cards: list):
    """An engine of a model, on a server that runs. The cards are the model's own, and keep its kernels."""
    engine = wanted.load(cards, progress=False)
    freeze()
    return engine


def put_away(release, engine):
    gc.unfreeze()
    release(engine)
    del engine
    freeze()


def freeze():
    """From now on, Python's search for circles of objects that nobody needs leaves out the objects of this moment. They
    live as long as the engine, and a search through all of them stops every answer for up to 0.1 s."""
    gc.collect()
    gc.freeze()


ROOM = "kv-tokens= and checkpoint-memory= of the others make room"


def crowded(one: Wanted, empty: Deck, planner) -> str:
    """For people, the end of a model's plan: that experts leave its cards only because others take memory there.
    empty: the cards on paper, before any model."""
    if not planner.moves_experts:
        return ""
    alone = one.planner(empty.of(one))
    return f"\nalone all its experts would fit: {ROOM}" * (alone.plan.fits and not alone.moves_experts)


@contextlib.contextmanager
def naming_room(one: Wanted, empty: Deck):
    """Where the `with` body finds that a model does not fit, the error also says whether it would fit alone. empty: the
    cards on paper, before any model."""
    try:
        yield
    except OutOfMemory as error:
        if not one.planner(empty.of(one)).plan.fits:
            raise
        raise OutOfMemory(f"{error}\nalone it would fit: {ROOM}") from None


def plans(wanted: list[Wanted]):
    """Texts that say where the models go and what that takes, one for each. Raises OutOfMemory."""
    if len(wanted) == 1 and wanted[0].idle is None:
        planner = wanted[0].planner(qengine.open_named(wanted[0].card))
        planner.check()
        yield planner.report()
        return
    always = Deck(wanted[0], PlannedCard)
    empty = always.planned()
    for one in in_order(wanted):
        if one.idle is not None:
            break
        planner = one.planner(always.of(one))
        with naming_room(one, empty):
            planner.check()
        yield f"{one.model.name}, {one.model.kind}:\n{planner.report()}{crowded(one, empty, planner)}"
        set_aside(planner)
    together = always.planned()
    for one in in_order(wanted):
        if one.idle is None:
            continue
        planner, note = one.planner(together.of(one)), "loaded at its first request"
        if not (beside := planner.plan.fits):
            planner = one.planner(always.planned().of(one))
            with naming_room(one, empty):
                planner.check()
            note += ", for which others that nobody asks have to go"
        yield f"{one.model.name}, {one.model.kind}, {note}:\n{planner.report()}{crowded(one, empty, planner)}"
        if beside:      # after the report, which counts on what the model takes itself
            set_aside(planner)
