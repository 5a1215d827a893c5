"""What the options ask for, done."""

import dataclasses

import qengine
from engine.hub import HeadersOf
from engine.text_engine import wrong_kind
from kernels import probe
from kernels.open import open_cards
from kernels.products import Products, measure_products

from .bench import run_bench
from .chat import run_chat, run_prompt
from .engines import Wishes, check_eyes, check_files, write_json
from .models import open_models, plans, sampling_of
from .named import is_several
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
    model = qengine.open_model(options.model).keeping(options.kv)
    said = {"ctx": model.n_ctx(options.ctx), "slots": options.slots,
            "card": options.card or "the first if the model fits there, or else all"}
    for name, value in (dataclasses.asdict(model.config) | said).items():
        print(f"{name} = {value}")
    return 0


def run_plan(options) -> int:
    """Prints where the models go and what that takes, those beside the main one first; returns the exit code. Raises
    OutOfMemory."""
    for n, text in enumerate(plans(open_models(options))):
        print(f"\n{text}" if n else text)
    return 0


def want_headers(options):
    """Files of the Hub are not downloaded for these options: the headers of models are enough."""
    for own in (options, *(options.each if is_several(options) else ())):
        for name in "model", "mmproj", "embedding_model", "reranking_model":
            setattr(own, name, HeadersOf.named(getattr(own, name)))


def run(options) -> int:
    """Does what the parsed command line asks; returns the exit code."""
    sampling, wishes = sampling_of(options), Wishes.of(options)
    check_files(options)
    if options.plan or options.print_config:
        want_headers(options)
    if options.print_config:
        return print_config(options)
    if options.serve is not None:
        from .serve import run_server  # here: a tenth of a second of imports that nothing else needs
        return run_server(options)
    if options.probe:
        return run_probe(options)
    if options.plan:
        return run_plan(options)
    model = qengine.open_model(options.model).keeping(options.kv)
    check_eyes(options, model)
    if model.kind != "text":
        raise wrong_kind(model, "text")
    if options.bench:
        return run_bench(model, options)
    if options.perplexity is not None:
        return run_perplexity(model, options)
    if options.chat:
        return run_chat(model, options, sampling, wishes)
    return run_prompt(model, options, sampling, wishes)
