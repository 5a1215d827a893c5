"""Chat templates, run: Jinja programs that come with model files, so from strangers.

engine/template.py calls these functions in a process of their own. Jinja's sandbox keeps a template from the file
system and from the interpreter, and the process keeps it from our time and memory. This file imports little, because
that process starts with it.
"""

import datetime
import functools
import json

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from engine.guard import ControlTokens

MAX_LETTERS = 1 << 24       # of what a template writes; far more than a context holds
UNHEARD_OF = "qengine-asks-for-what-no-template-has"


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks what to train on; here it only shows its content."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """`tojson` as chat templates expect it. Jinja's own sorts keys and escapes <, >, &, ' and all non-ASCII letters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def raise_exception(message):
    raise jinja2.TemplateError(message)


def check(template: list) -> list[str]:
    """The variables that a template asks for. Raises where it cannot be used. template: the arguments of `compiled`, as
    a list."""
    compiled(*template[:3], tuple(template[3]))
    return sorted(jinja2.meta.find_undeclared_variables(environment().parse(template[0])))


def taken(template: list, name: str, values: list[str]) -> list:
    """[those of some values of a variable that a template has, all texts in it if it ignores values that it does not
    know, else None].

    It has a value unless it refuses a short conversation with it. If it ignores others, it has only those that stand in
    it or that change the prompt.
    """
    def prompt(value):
        variables = {"messages": [{"role": "user", "content": "Hello"}], "tools": None, "add_generation_prompt": True,
                     "enable_thinking": True, name: value}
        try:
            return render(template, json.dumps(variables))
        except MemoryError:
            raise
        except Exception:       # whatever a stranger's template raises
            return None

    other, prompts = prompt(UNHEARD_OF), {value: prompt(value) for value in values}
    found = [value for value in values if prompts[value] is not None]
    if other is None or UNHEARD_OF in other.lower():
        return [found, None]
    texts = {node.value for node in environment().parse(template[0]).find_all(jinja2.nodes.Const)
             if isinstance(node.value, str)}
    return [[value for value in found if value in texts or prompts[value] != other], sorted(texts)]


def render(template: list, values: str) -> str:
    """The prompt. values: the template's variables, as a JSON object without marks."""
    ready, tokens = compiled(*template[:3], tuple(template[3]))
    pieces, n_letters = [], 0
    for piece in ready.generate(json.loads(values)):
        pieces.append(piece)
        n_letters += len(piece)
        if n_letters > MAX_LETTERS:
            raise jinja2.TemplateError(f"it writes more than {MAX_LETTERS} letters")
    return tokens.settle("".join(pieces))


@functools.lru_cache(maxsize=8)
def compiled(source: str, bos: str, eos: str, control: tuple[str, ...]) -> tuple[jinja2.Template, ControlTokens]:
    """A template whose own control tokens are marked. bos, eos: the texts of the tokens that begin and end a text.
    control: the names of all control tokens."""
    tokens, jinja = ControlTokens(control), environment()
    jinja.globals |= {"bos_token": tokens.mark(bos), "eos_token": tokens.mark(eos)}
    tree = jinja.parse(source)
    for node in tree.find_all(jinja2.nodes.TemplateData):
        node.data = tokens.mark(node.data)
    for node in tree.find_all(jinja2.nodes.Const):
        if isinstance(node.value, str):
            node.value = tokens.mark(node.value)
    return jinja.from_string(tree), tokens


def environment() -> jinja2.Environment:
    """What templates may use, but for their own tokens."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False, optimized=False,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag])
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": raise_exception,
                     "strftime_now": lambda format: datetime.datetime.now().strftime(format)}
    return made
