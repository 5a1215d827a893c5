"""The house: which room imports which, that no imports go round in a circle, how large functions and the heart may be,
and that the heart reads in its stated order.

An arrow goes from a file to every file of the product that it imports. The arrows are drawn from the text of the files:
an import counts wherever it stands, inside a function and under TYPE_CHECKING as well, because a late import that only
dodges a circle is still part of that circle.
"""

import ast
import dis
import functools
import re
from collections import deque
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEART = "qengine"
ROOMS = "kernels", "engine", "api", "cli", "models", "benchmarks"

# The plan: the rooms right below each room. A room imports those, and what lies below them; the heart is a room of one
# file.
BELOW = {
    "benchmarks": {"cli", "models"},
    "models": {HEART},
    "cli": {"api", HEART},
    "api": {"engine"},
    HEART: {"engine"},
    "engine": {"kernels"},
    "kernels": set(),
}
# The one arrow upwards: what qengine.py imports where it is run as a program, to hand over to the command line.
HANDS_OVER_TO = {"cli"}



# ---- drawing -----------------------------------------------------------------------------------------------

def module_files(root):
    """{name of a module: its file} of the product that lies in the folder `root`."""
    files = [file for room in ROOMS for file in sorted((root / room).rglob("*.py"))]
    files += [file for file in [root / f"{HEART}.py"] if file.exists()]
    named = [(".".join(file.relative_to(root).with_suffix("").parts), file) for file in files]
    return {name.removesuffix(".__init__"): file for name, file in named}


@functools.cache
def parsed(text):
    return ast.parse(text)


def tree_of(file):
    """The syntax tree of a file, which nobody changes."""
    return parsed(file.read_text(encoding="utf-8"))


def arrows_of(root):
    """(arrows, handed over): {module: {imported module: line of the import}}, and the same of the one arrow upwards."""
    modules, arrows, handed_over = module_files(root), {}, {}
    for name, file in modules.items():
        tree = tree_of(file)
        if name == HEART:
            programs = [node for node in tree.body if is_main_block(node)]
            tree = ast.Module([node for node in tree.body if node not in programs], [])
            handed_over = imports_in(ast.Module(programs, []), name, file, modules)
        arrows[name] = imports_in(tree, name, file, modules)
    return arrows, handed_over


def is_main_block(node):
    """Whether a statement is `if __name__ == "__main__":`, without an else."""
    return isinstance(node, ast.If) and not node.orelse and ast.unparse(node.test) == "__name__ == '__main__'"


def imports_in(tree, name, file, modules):
    """{module of the product: line} that the text of module `name` imports, in the order of the lines."""
    found = {}
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[:len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and name_of(node.func) in ("import_module", "__import__"):
            targets = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        else:
            continue
        for target in targets:
            while target not in modules and "." in target:       # a name in a module is imported from that module
                target = target.rpartition(".")[0]
            if target in modules and target != name:
                found.setdefault(target, node.lineno)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def name_of(function):
    """The last name of what is called: "f" of f() and of a.f()."""
    return getattr(function, "attr", getattr(function, "id", ""))


def room_of(module):
    return module.partition(".")[0]


def arrows_of_rooms(arrows):
    """{room: {imported room: "module:line → module" of one such import}}."""
    rooms = {}
    for name, imported in arrows.items():
        for target, line in imported.items():
            if room_of(target) != room_of(name):
                rooms.setdefault(room_of(name), {}).setdefault(room_of(target), f"{name}:{line} → {target}")
    return rooms


def shortest_circle(arrows):
    """The nodes of a shortest circle, [a, b, ..., a]; None where there is no circle. arrows: {node: nodes}."""
    circles = []
    for start in arrows:
        came_from, queue = {}, deque([start])
        while queue and start not in came_from:
            node = queue.popleft()
            for target in arrows.get(node, ()):
                if target not in came_from:
                    came_from[target] = node
                    queue.append(target)
        if start in came_from:
            circle = [start]
            while len(circle) == 1 or circle[-1] != start:
                circle.append(came_from[circle[-1]])
            circles.append(circle[::-1])
    return min(circles, key=len, default=None)


def reachable(arrows, start):
    """Every module that importing `start` may import."""
    found, queue = set(), [start]
    while queue:
        for target in arrows.get(queue.pop(), ()):
            if target not in found:
                found.add(target)
                queue.append(target)
    return found


def forbidden(arrows):
    """The arrows that do not point downwards in the plan, as texts."""
    return [f"{name}:{line} → {target}" for name, imported in arrows.items() for target, line in imported.items()
            if room_of(target) not in {room_of(name)} | reachable(BELOW, room_of(name))]


# ---- the house ---------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def house():
    return arrows_of(ROOT)


def test_every_room_is_there():
    assert [room for room in ROOMS if not list((ROOT / room).rglob("*.py"))] == []


def test_no_circle_of_modules(house):
    arrows, _ = house
    circle = shortest_circle(arrows)
    assert circle is None, "imports in a circle: " + " → ".join(
        f"{name}:{arrows[name][target]}" for name, target in zip(circle, circle[1:])) + f" → {circle[-1]}"


def test_no_circle_of_rooms(house):
    rooms = arrows_of_rooms(house[0])
    circle = shortest_circle(rooms)
    assert circle is None, "rooms in a circle: " + ", ".join(
        rooms[name][target] for name, target in zip(circle, circle[1:]))


def test_arrows_point_downwards(house):
    assert forbidden(house[0]) == []


def test_the_heart_hands_over_to_the_command_line_alone(house):
    """Under `if __name__ == "__main__"`, before anything else is imported but modules of Python that this needs."""
    assert {room_of(target) for target in house[1]} == HANDS_OVER_TO
    body = tree_of(ROOT / f"{HEART}.py").body
    first = next(i for i, node in enumerate(body) if isinstance(node, ast.If))
    assert is_main_block(body[first]) and "cli.main" in ast.unparse(body[first])
    assert not any("cli" in ast.unparse(node) for i, node in enumerate(body)
                   if i != first and isinstance(node, ast.Import | ast.ImportFrom))
    assert [ast.unparse(node) for node in body[:first] if not isinstance(node, ast.Expr)] == [
        "import sys"]


def test_a_card_knows_no_operation(house):
    operations = {name for name, file in module_files(ROOT).items() if room_of(name) == "kernels"
                  and "cases" in (node.name for node in tree_of(file).body if hasattr(node, "name"))}
    assert len(operations) >= 20 and operations & reachable(house[0], "kernels.card") == set()


def test_an_emulated_card_needs_no_driver(house):
    arrows, _ = house
    assert "kernels.nvidia" in reachable(arrows, "kernels.open")
    assert [name for name in arrows if name.startswith("kernels.emulated") and
            "kernels.nvidia" in reachable(arrows, name)] == []


# ---- the drawing itself ------------------------------------------------------------------------------------

def drawn(folder, texts):
    """The arrows of a product in `folder` whose files (without .py) have these texts."""
    for name, text in texts.items():
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return arrows_of(folder)


LATE = "def f():\n    {}\n"
TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}\n"
MAIN = "if __name__ == '__main__':\n    {}\n"


@pytest.mark.parametrize("place", ["{}\n", LATE, TYPES, MAIN, "class A:\n    def f(self):\n        {}\n"])
@pytest.mark.parametrize("statement", ["import kernels.a", "import kernels.a as other", "from kernels import a, c",
                                       "from kernels.a import name", "from . import a", "from .a import name",
                                       "importlib.import_module('kernels.a')"])
def test_every_import_is_an_arrow(tmp_path, place, statement):
    texts = {"kernels/a": "import numpy\nfrom .c import name\n", "kernels/c": "from kernels import b\n"}
    arrows, _ = drawn(tmp_path, texts | {"kernels/b": place.format(statement)})
    assert "kernels.a" in arrows["kernels.b"] and set(arrows["kernels.b"]) <= {"kernels.a", "kernels.c"}
    assert shortest_circle(arrows) is not None
    assert shortest_circle(drawn(tmp_path, {"kernels/b": ""})[0]) is None


def test_a_circle_is_shown_as_it_goes():
    circle = shortest_circle({"a": ["b"], "b": ["c", "d"], "c": ["e"], "d": ["e"], "e": ["b", "f"], "f": []})
    assert circle in (["b", "c", "e", "b"], ["b", "d", "e", "b"])
    assert shortest_circle({"a": ["b", "c"], "b": ["c"], "c": []}) is None


def test_a_package_and_what_is_in_it_are_different_modules(tmp_path):
    arrows, _ = drawn(tmp_path, {
        "kernels/__init__": "", "kernels/card": "", "kernels/emulated/__init__": "from .. import card\n",
        "kernels/emulated/card": "from ..card import Card\nfrom . import ptx\n",
        "kernels/emulated/ptx": "import kernels.emulated.nothing\n"})
    assert {name: list(imported) for name, imported in arrows.items()} == {
        "kernels": [], "kernels.card": [], "kernels.emulated": ["kernels.card"],
        "kernels.emulated.card": ["kernels.card", "kernels.emulated.ptx"],
        "kernels.emulated.ptx": ["kernels.emulated"]}


def test_rooms_may_not_go_round_even_where_modules_do_not(tmp_path):
    arrows, _ = drawn(tmp_path, {"engine/a": "from kernels import b\n", "kernels/b": "", "engine/d": "",
                                 "kernels/c": "from engine import d\n"})
    assert shortest_circle(arrows) is None
    assert set(shortest_circle(arrows_of_rooms(arrows))) == {"engine", "kernels"}
    assert forbidden(arrows) == ["kernels.c:1 → engine.d"]


@pytest.mark.parametrize("room, wrong", [(room, wrong) for room in BELOW
                                         for wrong in sorted(BELOW.keys() - {room} - reachable(BELOW, room))])
def test_arrows_that_are_never_drawn(tmp_path, room, wrong):
    file, target = (name if name == HEART else f"{name}/a" for name in (room, wrong))
    texts = {file: LATE.format(f"import {target.replace('/', '.')}"), target: ""}
    assert len(forbidden(drawn(tmp_path, texts)[0])) == 1


def test_the_one_arrow_upwards(tmp_path):
    """It is no part of a circle, but only where qengine.py is run as a program, and only in that file."""
    cli = {"cli/main": "import qengine\n"}
    arrows, handed_over = drawn(tmp_path, cli | {HEART: MAIN.format("from cli.main import main")})
    assert handed_over == {"cli.main": 2} and shortest_circle(arrows) is None and forbidden(arrows) == []
    for text in LATE.format("import cli.main"), MAIN.format("pass") + "else:\n    import cli.main\n":
        arrows, handed_over = drawn(tmp_path, {HEART: text})
        assert not handed_over and shortest_circle(arrows) and forbidden(arrows)
    arrows, handed_over = drawn(tmp_path, {HEART: "", "engine/a": MAIN.format("import cli.main")})
    assert not handed_over and forbidden(arrows) == ["engine.a:2 → cli.main"]


# ---- sizes -------------------------------------------------------------------------------------------------

HEART_LINES, FUNCTION_LINES, POSITIONAL, LINE_LETTERS = 2500, 60, 8, 120


def too_large(tree, kernels=False):
    """["line name: what is too large"] of the functions in a tree. kernels: in the room of kernels, or in that which
    compares them with others, where a function that is compiled for the card, or in which such a function is defined,
    may be as large as it likes."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        n_lines = node.end_lineno - node.lineno + 1
        n_positional = sum(each.arg not in ("self", "cls") for each in node.args.posonlyargs + node.args.args)
        large = [f"{node.lineno} {node.name}: {n} {what}, {most} at most" for n, what, most in (
            (n_lines, "lines", FUNCTION_LINES), (n_positional, "positional parameters", POSITIONAL)) if n > most]
        if large and not (kernels and any(is_compiled(inner) for inner in ast.walk(node))):
            found += large
    return found


def is_compiled(node):
    """Whether a function is decorated with `cuda.jit`."""
    return isinstance(node, ast.FunctionDef) and any(
        re.match(r"cuda\.jit\b", ast.unparse(decorator)) for decorator in node.decorator_list)


def test_the_heart_is_read_in_an_evening():
    assert len((ROOT / f"{HEART}.py").read_text().splitlines()) <= HEART_LINES


def test_no_function_is_too_large():
    found = [f"{file.relative_to(ROOT)}:{what}" for name, file in module_files(ROOT).items()
             for what in too_large(tree_of(file), room_of(name) in ("kernels", "benchmarks"))]
    assert found == []


def test_no_line_is_too_long():
    """In letters, not in bytes: a Korean letter counts as one."""
    found = [f"{file.relative_to(ROOT)}:{number}: {len(line)} letters, {LINE_LETTERS} at most"
             for folder in (*ROOMS, "notebooks", "tests", ".") for file in files_in(ROOT / folder)
             for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
             if len(line) > LINE_LETTERS]
    assert found == []


def files_in(folder):
    """The Python files of a folder and of those in it; of the project's own folder, its files alone."""
    return sorted(folder.glob("*.py") if folder == ROOT else folder.rglob("*.py"))


def function(n_lines, arguments, before=""):
    return ast.parse(f"{before}def f({arguments}):" + "\n  x = 1" * (n_lines - 1))


def test_functions_that_are_too_large():
    eight = "a, b, c, d, e, f, g, h=0"
    assert too_large(function(60, eight)) == too_large(function(60, f"self, {eight}, *i, j, k")) == []
    assert too_large(function(61, f"cls, {eight}")) == ["1 f: 61 lines, 60 at most"]
    assert too_large(function(60, f"i, /, {eight}")) == ["1 f: 9 positional parameters, 8 at most"]
    assert too_large(function(61, "", "async ")) == ["1 f: 61 lines, 60 at most"]
    for made in "@cuda.jit(device=True)\n", "@cuda.jit\n":
        compiled = function(61, f"i, {eight}", made)
        assert too_large(compiled, kernels=True) == [] and len(too_large(compiled)) == 2
    maker = ast.parse("def make():\n  @cuda.jit\n  def kernel(): pass" + "\n  x = 1" * 60)
    assert too_large(maker, kernels=True) == [] and len(too_large(maker)) == 1
    assert len(too_large(function(61, eight, "@cache\n"), kernels=True)) == 1


# ---- the order of the heart --------------------------------------------------------------------------------

# Names of the heart that a section before their own may use, and why.
AHEAD = {}


def sections(text):
    """[(line of the title, title)] of the banners in a text: section n's is "n  Its title" between two rules."""
    lines = text.splitlines()
    titles = [(at, re.fullmatch(r"# (\d+)  (\S.*)", line)) for at, line in enumerate(lines, 1)
              if 1 < at < len(lines) and lines[at - 2] == lines[at] and re.fullmatch("# =+", lines[at])]
    assert [int(title[1]) for _, title in titles] == list(range(1, len(titles) + 1))
    return [(at, title[2]) for at, title in titles]


def used_ahead(text):
    """["line name: what section uses what of which"] where a section uses a name that a later one defines. What stands
    before the first section is section 0. Annotations that are strings use nothing."""
    starts = [at for at, _ in sections(text)]

    def section(line):
        return sum(at <= line for at in starts)

    tree = ast.parse(text)
    defined = {}
    for node in tree.body:
        names = [node.name] if hasattr(node, "name") else [
            inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)]
        for name in names:
            defined.setdefault(name, node.lineno)
    return [f"{line} {name}: section {section(line)} uses what section {section(defined[name])} defines"
            for line, name in sorted(set(globals_of(compile(tree, "heart", "exec"))))
            if name in defined and name not in AHEAD and section(defined[name]) > section(line)]


def globals_of(code, is_class=False):
    """(line, name) of each use of a name of the module in a code object of it, and in those within."""
    instructions = list(dis.get_instructions(code))
    own = {each.argval for each in instructions if is_class and each.opname == "STORE_NAME"}
    for each in instructions:
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and each.argval not in own:
            yield each.positions.lineno, each.argval
    for inner in code.co_consts:
        if hasattr(inner, "co_code"):
            yield from globals_of(inner, is_class="__module__" in inner.co_names)


def test_the_table_of_contents_lists_the_sections():
    text = (ROOT / f"{HEART}.py").read_text()
    titles = [title for _, title in sections(text)]
    listed = re.findall(r"^    (\d+)  (.+?)   ", text.partition('"""\n\n')[0], re.M)
    assert listed == [(str(n), title) for n, title in enumerate(titles, 1)]


def test_the_heart_uses_nothing_before_its_section_says_so():
    text = (ROOT / f"{HEART}.py").read_text()
    assert used_ahead(text) == []
    assert all(re.search(rf"^(class |def )?{name}\b", text, re.M) and why for name, why in AHEAD.items())


RULE = "# " + "=" * 20


@pytest.mark.parametrize("use, is_ahead", [
    ("x = Later", True), ("def f(): return [Later for _ in []]", True), ("def f(a: Later): pass", True),
    ("class A(Later): pass", True), ("class A:\n  def f(self): return lambda: Later.x", True),
    ("@Later\ndef f(): pass", True), ("def f(a=Later): pass", True), ("def f():\n  def g(): return Later", True),
    ("def f(a: 'Later'): pass", False), ("def f(Later): return Later", False), ("def f(a): return a.Later", False),
    ("class A:\n  Later = 1\n  x = Later", False), ("x = Earlier", False)])
def test_names_that_are_used_ahead(use, is_ahead):
    parts = "Earlier = 1", f"{RULE}\n# 1  One\n{RULE}\nsame = 1", use, f"{RULE}\n# 2  Two\n{RULE}\nLater = Earlier"
    found = used_ahead("\n".join(parts))
    assert [what.partition(" ")[2] for what in found] == ["Later: section 1 uses what section 2 defines"] * is_ahead
