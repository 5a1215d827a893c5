"""How several models are written on a command line.

    -m chat=model.gguf,ctx=16384,aliases=gpt-4o,default -m helper=small.gguf,idle=10m

A part without "=" belongs to the value before it, so lists are written as everywhere else: card=cuda:0,1. A model has
the options of the command line where it says nothing else.
"""

import argparse
import copy
import math
import os
import re
from typing import NamedTuple

from engine.durations import read_seconds
from engine.limits import SAMPLING

# What a model may say for itself, as the command line says it for all of them.
OF_A_MODEL = {"card", "ctx", "slots", "kv", "kv-tokens", "checkpoint-memory", "checkpoint-host-memory", "split",
              "draft", "expert-memory", "products", "sparse", "mmproj", "image-tokens", "replicas", "thinking",
              "chat-template-kwargs", "repetition-guard", *(name.replace("_", "-") for name in SAMPLING)}
NEVER = "never"


class ModelArgument(NamedTuple):
    """What one -m says. name: None is that of the file. idle: seconds without a request after which the model is put
    away; None: it is always loaded. settings: arguments of the command line for this model alone."""

    source: str
    name: str | None = None
    aliases: tuple[str, ...] = ()
    idle: float | None = None
    settings: tuple[str, ...] = ()


def model_argument(text: str) -> ModelArgument:
    """An argparse type: "FILE" or "NAME=FILE,option=value,...". If the whole text is the path of a file, it names this
    file."""
    named = re.fullmatch(r"([\w.:@-]+)=([^,]+)(?:,(.*))?", text, re.DOTALL)
    if named is None or os.path.exists(text):
        return ModelArgument(text)
    name, source, rest = named.groups()
    values = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        if equals and re.fullmatch("[a-z-]+", key):
            if key in values:
                raise argparse.ArgumentTypeError(f"{name}: {key} is there twice")
            values[key] = value
        elif values:
            values[key := list(values)[-1]] += f",{part}"
        else:
            raise argparse.ArgumentTypeError(f"{name}: behind the file stands option=value, not {part!r}")
    aliases = tuple(filter(None, values.pop("aliases", "").split(",")))
    idle = values.pop("idle", None)
    if unknown := sorted(values.keys() - OF_A_MODEL):
        raise argparse.ArgumentTypeError(f"{name}: {unknown[0]!r} is no option of a model: aliases, idle, "
                                         f"{', '.join(sorted(OF_A_MODEL))}")
    try:
        seconds = None if idle is None else math.inf if idle == NEVER else read_seconds(idle)
        if seconds is not None and seconds <= 0:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{name}: idle is a time such as 30s, 10m or 2h, or {NEVER}, not "
                                         f"{idle!r}") from None
    return ModelArgument(source, name, aliases, seconds, tuple(f"--{key}={value}" for key, value in values.items()))


class AddModel(argparse.Action):
    """-m, which may be there several times. `model` is the source of the first."""

    def __call__(self, parser, namespace, value, option_string=None):
        namespace.models = [*namespace.models, value]
        namespace.model = namespace.models[0].source


def is_several(options) -> bool:
    """Whether the command line names several models, or one with a name."""
    return len(options.models) > 1 or any(one.name for one in options.models)


def check_models(parser, options):
    """Leaves with a sentence where what is said of several models does not go together. Otherwise options.each holds
    the options as they are for each of the models."""
    if not is_several(options):
        return
    for name in "trace", "go_on":
        if getattr(options, name):
            parser.error(f"--{name.replace('_', '-')} is for one model, and -m names several or gives one a name")
    if options.serve is None and not options.plan:
        parser.error("several models, and models with names, are for --serve and --plan: name one file with -m")
    taken = set()
    for each in options.models:
        for name in filter(None, (each.name, *each.aliases)):
            if name in taken:
                parser.error(f"-m: two models have the name {name}")
            taken.add(name)
        if options.ray and each.idle is not None:
            parser.error(f"-m {each.name}: idle is not for --ray, where replicas come and go by load: replicas=N,MAX")
    options.each = [own_options(parser, options, one) for one in options.models]
    for own in options.each:
        if own.replicas == (0, 0) != options.replicas:
            parser.error(f"-m {own.argument.name}: replicas=0 is not for one model: --replicas 0 ends those of all")


def own_options(parser, options, argument: ModelArgument):
    """The options of the command line as they are for one model. Leaves with a sentence where a value is wrong."""
    own = copy.copy(options)
    parser.error_of = f"-m {argument.name}: "
    try:
        parser.parse_args(argument.settings, own)
    finally:
        parser.error_of = ""
    own.model, own.argument = argument.source, argument
    return own
