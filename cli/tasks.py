"""What the options ask for, done."""

import dataclasses

import qengine
from engine.limits import SAMPLING
from engine.text_engine import wrong_kind
from kernels import probe
from kernels.card import PlannedCard
from kernels.open import open_cards
from kernels.products import Products, measure_products

from .bench import run_bench
from .chat import run_chat, run_prompt
from .engines import Wishes, asked, check_eyes, open_side, side_cards, write_json
from .perplexity import run_perplexity


def run_probe(options) -> int:
    """Measures the chosen cards; returns the exit code."""
    cards = open_cards(options.card)
    reports = probe.probe_cards(cards)
    for card in cards:
        card.replace(probe.saved_replacements(card))
        measure_products(card, anew=True)
        if said := Products.of(card).describe():
            print(f"products of prompts on {card.name}: {said}")
    if options.json:
        write_json(options.json, [report.to_dict() for report in reports])
    return 0


def print_config(options) -> int:
    """Prints what the model file and the command line say; returns the exit code."""
    model = qengine.open_model(options.model)
    said = {"ctx": model.n_ctx(options.ctx), "slots": options.slots,
            "card": options.card or "the first if the model fits there, or else all"}
    for name, value in (dataclasses.asdict(model.config) | said).items():
        print(f"{name} = {value}")
    return 0


def run_plan(model: qengine.OpenModel, options) -> int:
    """Prints where the models go and what that takes, those beside the main one first; returns the exit code. Raises
    OutOfMemory."""
    cards, side = qengine.open_named(options.card), open_side(options)
    if side:
        cards = type(cards)(map(PlannedCard, cards))
    known = {card.name: card for card in cards}
    for beside, name in side:
        demand = beside.demand(products=options.products)
        planner = qengine.make_planner(beside, side_cards(known, cards, name, PlannedCard), demand)
        planner.check()
        print(f"{beside.name}, {beside.kind}:\n{planner.report()}\n")
        for card, stage in zip(planner.cards, planner.plan.stages):
            card.set_aside(stage.total)
    planner = qengine.make_planner(model, cards, model.demand(**asked(options)))
    planner.check()
    print(f"{model.name}, {model.kind}:\n{planner.report()}" if side else planner.report())
    return 0


def run(options) -> int:
    """Does what the parsed command line asks; returns the exit code."""
    sampling = {name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None}
    sampling["repetition_guard"] = options.repetition_guard != "off"
    template_kwargs = dict(options.chat_template_kwargs or {})
    said = template_kwargs.pop("enable_thinking", None)
    wishes = Wishes({None: said, "on": True, "off": False}[options.thinking], template_kwargs)
    if options.trace:
        write_json(options.trace, {})       # now, so that a recording is not lost because of a mistyped folder
    if options.print_config:
        return print_config(options)
    if options.serve is not None:
        from .serve import run_server  # here: a tenth of a second of imports that nothing else needs
        return run_server(options, sampling, wishes)
    if options.probe:
        return run_probe(options)
    model = qengine.open_model(options.model)
    check_eyes(options, model)
    if options.plan:
        return run_plan(model, options)
    if model.kind != "text":
        raise wrong_kind(model, "text")
    if options.bench:
        return run_bench(model, options)
    if options.perplexity is not None:
        return run_perplexity(model, options)
    if options.chat:
        return run_chat(model, options, sampling, wishes)
    return run_prompt(model, options, sampling, wishes)
