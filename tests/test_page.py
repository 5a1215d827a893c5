"""The chat page in a headless Chromium, over a scripted engine: elements are found as screen readers name them."""

import base64
import contextlib
import hashlib
import io
import json
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Error, expect, sync_playwright

from api.page import FOLDER
from api.service import create_app
from engine.images import Limits
from engine.request import EngineStopped
from engine.served import Defaults, Models, Served
from tests.clients import app_of, serving
from tests.paced import PacedEngine
from tests.pictures import file_of, scene
from tests.until import PATIENCE, wait_until

MARKDOWN = """\
# Title

A **bold** word, an *italic* one and `code_of_it`, 2 * 3 * 4.

- one
- two, which
  goes on

3. three

```python
print("<b>not bold</b>", "%s")
```
""" % ("long " * 40)
EVIL = """<img src=x onerror="window.hacked=1"> <script>window.hacked=1</script> **<b>bold</b>**
```
<img src=x onerror="window.hacked=1">
```
[link](javascript:window.hacked=1)"""
CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nSeoul\n</parameter>\n</function>\n</tool_call>"
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]
LONG = "".join(f"word word word word {i} " for i in range(5000))      # nobody waits for its end
RICH = r"""## A table

| name | value | note |
|:--|--:|:-:|
| dp4a | 133 | **fast** |
| half2 | 131 | `ok` |

1. first
   - nested
     - deeper
2. second

> quoted [a link](https://example.org/a_b) and https://example.org/bare

- [x] done, ~~not done~~ ![a picture](https://example.org/x.png)

```python
def f(x):  # a comment
    return "text" + str(12)
```

It costs $5 or $6, but $a^2 + b^2 = c^2$ and \(x \le \pi\).

$$
\int_0^1 x^2\,dx = \frac{1}{3}
- 1 + 1
$$

\[ \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} \]

$\nonsense{$
"""
ANSWERS = {"markdown": MARKDOWN, "evil": EVIL, "long": LONG, "weather": CALL, "rich": RICH}
WELL = {"status": "ok", "model": "m", "kind": "text"}        # what /health says
KEPT = """Object.keys(localStorage).filter(key => key.startsWith("qengine/chat/"))
    .map(key => JSON.parse(localStorage.getItem(key)))"""        # the conversations that the browser keeps


def script(prompt):
    """What the scripted engine answers: ANSWERS by the last word of the conversation, else an echo."""
    said = prompt.rsplit("<|im_end|>\n<|im_start|>assistant", 1)[0].rsplit("\n", 1)[-1]
    if "</tool_response>" in prompt.rsplit("<|im_start|>user", 1)[-1]:
        return "It is raining."
    if said == "broken":
        raise EngineStopped("the card fell off the bus")
    thoughts = "The reader wants something.\n</think>\n\n" if prompt.rstrip().endswith("<think>") else ""
    return thoughts + ANSWERS.get(said, f"You said {said}.")


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome") or playwright.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("no Chromium is installed: the README says how, under Tests")
        expect.set_options(timeout=1000 * PATIENCE)
        with playwright.chromium.launch(executable_path=path) as browser:
            yield browser


@pytest.fixture
def engine():
    return PacedEngine(script, pace=0.002)


@pytest.fixture
def open_page(browser, engine):
    """Opens the page of a server of its own: open_page(width, app=None, **options of the browser)."""
    with contextlib.ExitStack() as stack:
        def open(width=1000, app=None, **options):
            port, _ = stack.enter_context(serving(app or app_of(engine)))
            context = stack.enter_context(browser.new_context(viewport={"width": width, "height": 800}, **options))
            context.set_default_timeout(1000 * PATIENCE)
            page = context.new_page()
            page.mistakes = []
            page.on("pageerror", lambda error: page.mistakes.append(str(error)))
            page.on("console", lambda said: "Content Security" in said.text and page.mistakes.append(said.text))
            page.goto(f"http://127.0.0.1:{port}/")
            opened.append(page)
            return page

        opened = []
        yield open
        for page in opened:
            assert page.mistakes == []


@pytest.fixture
def page(open_page):
    return open_page()


def button(page, name):
    return page.get_by_role("button", name=name, exact=True)


def answers(page):
    return page.get_by_role("article", name="Answer")


def say(page, text, wait=True):
    """Sends a message; waits for the end of its answer."""
    page.get_by_label("Message").fill(text)
    button(page, "Send").click()
    if wait:
        expect(button(page, "Send")).to_be_visible()


def change_settings(page, **values):
    """Fills in fields of the settings, by their labels."""
    button(page, "Settings").click()
    for label, value in values.items():
        field = page.get_by_role("dialog").get_by_label(label.replace("_", " "))
        field.select_option(value) if label == "Thinking" else field.fill(value)
    button(page, "Done").click()


def hold(engine):
    """From now on answers begin when this event is set."""
    may_begin = threading.Event()
    engine.script = lambda prompt: may_begin.wait(PATIENCE) and script(prompt)
    return may_begin


def prompts(engine):
    return [engine.tokenizer.decode(request.prompt_ids, special=True) for request in engine.requests]


# ---- a conversation ----------------------------------------------------------------------------------------


def test_an_answer_streams(page, engine):
    engine.pace = 0.02
    say(page, "long", wait=False)
    expect(answers(page)).to_contain_text("word word word word")
    assert not engine.generations[0].finish_reason          # it is shown while it is written
    expect(button(page, "Send")).not_to_be_visible()
    button(page, "Stop").click()


def test_what_is_told_of_an_answer(page, engine):
    engine.checks = (2, 2), (2, 1)
    page.get_by_label("Message").fill("hello " * 60)
    page.get_by_label("Message").press("Enter")
    expect(answers(page)).to_contain_text(re.compile("You said .* tokens(/s)? · drafts accepted 75 % · first after"))
    generation = engine.generations[0]
    for figure in (f"{generation.n_generated} tokens", f"prompt {generation.n_prompt}, {generation.n_cached} cached"):
        expect(answers(page)).to_contain_text(figure)
    assert generation.n_cached > 0
    expect(page.get_by_label("Message")).to_have_value("")
    expect(page.get_by_label("Message")).to_be_focused()


def answer_with(page, **end):
    """From now on the server answers at once: 20 words, and a last event with these fields."""
    events = [{"choices": [{"delta": {"content": f"word {i} "}}]} for i in range(20)]
    events.append({"choices": [], "usage": {"prompt_tokens": 1205, "completion_tokens": 20}} | end)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        content_type="text/event-stream",
        body="".join(f"data: {json.dumps(event)}\n\n" for event in [*events, "DONE"]).replace('"DONE"', "[DONE]")))


@pytest.mark.parametrize("speed, cached, said", [
    (12.3456, 1000, "20 tokens · 12.3 tokens/s · first after 0.75 s · prompt 1,205, 1,000 cached, 410 tokens/s"),
    (None, 1141, "20 tokens · first after 0.75 s · prompt 1,205, 1,141 cached, 410 tokens/s"),
    (None, 1142, "20 tokens · first after 0.75 s · prompt 1,205, 1,142 cached")])
def test_the_server_says_how_fast_an_answer_was(page, speed, cached, said):
    """However its pieces arrive: these come all at once. A few computed tokens of a prompt have no speed."""
    answer_with(page, timings={"cache_n": cached, "prompt_ms": 500, "prompt_per_second": 410,
                               "predicted_per_second": speed, "wait_ms": 250})
    say(page, "hello")
    expect(answers(page).get_by_text(said, exact=True)).to_be_visible()


def test_an_answer_without_times_ends(page):
    """A gateway between page and server may drop fields that it does not know."""
    answer_with(page)
    say(page, "hello")
    expect(answers(page).get_by_text("20 tokens · prompt 1,205", exact=True)).to_be_visible()
    say(page, "and again")
    expect(answers(page)).to_have_count(2)


def test_stop_keeps_what_was_written_and_ends_the_generation(page, engine):
    say(page, "long", wait=False)
    expect(answers(page)).to_contain_text("word word")
    button(page, "Stop").click()
    expect(answers(page)).to_contain_text("stopped")
    wait_until(lambda: engine.generations[0]._done.is_set())
    assert engine.generations[0].finish_reason is None
    say(page, "and on")
    assert "word word" in prompts(engine)[-1]
    expect(answers(page).last).to_contain_text("You said and on.")


def test_escape_stops(page, engine):
    say(page, "long", wait=False)
    expect(answers(page)).to_contain_text("word")
    page.keyboard.press("Escape")
    expect(answers(page)).to_contain_text("stopped")


def test_regenerate_asks_the_same_again(page, engine):
    say(page, "one")
    say(page, "two")
    expect(button(page, "Regenerate")).to_have_count(1)         # only of the last answer
    button(page, "Regenerate").click()
    wait_until(lambda: len(engine.requests) == 3)
    expect(button(page, "Regenerate")).to_be_visible()
    assert prompts(engine)[2] == prompts(engine)[1]
    expect(answers(page)).to_have_count(2)
    expect(answers(page).last).to_contain_text("2 of 2")        # the former answer is a version of this one


def test_any_message_can_be_changed_and_its_versions_are_kept(page, engine):
    for text in "one", "two", "three":
        say(page, text)
    asked = page.get_by_role("article", name="You")
    button(asked.nth(1), "Edit").click()
    field = page.get_by_label("Message")
    expect(field).to_have_value("two")
    page.keyboard.press("Escape")                               # thought better of it
    expect(field).to_have_value("")
    button(asked.nth(1), "Edit").click()
    field.fill("four")
    field.press("Enter")
    expect(answers(page).last).to_contain_text("You said four.")
    expect(asked).to_have_count(2)
    assert "one" in prompts(engine)[-1] and "two" not in prompts(engine)[-1] and "three" not in prompts(engine)[-1]
    expect(asked.last).to_contain_text("2 of 2")
    button(page, "Version before").click()
    expect(asked).to_have_text([re.compile(text) for text in ("one", "two", "three")])
    page.reload()                                               # which keeps what was shown
    expect(asked).to_have_count(3)
    button(page, "Version after").click()
    expect(answers(page).last).to_contain_text("You said four.")


def test_an_answer_can_be_changed(page, engine):
    say(page, "one")
    button(answers(page), "Edit").click()
    page.get_by_label("Message").fill("I say **this**.")
    button(page, "Save").click()
    expect(answers(page)).to_contain_text("I say this.")
    expect(button(page, "Send")).to_be_visible()
    expect(answers(page)).to_contain_text("written by you")
    expect(answers(page)).to_contain_text("2 of 2")
    assert len(engine.requests) == 1                            # the model was not asked
    say(page, "two")
    assert "I say **this**." in prompts(engine)[-1] and "You said one" not in prompts(engine)[-1]


def test_what_was_typed_is_not_thrown_away_by_an_edit(page):
    """Neither the draft before it, nor, without a question, the changes."""
    say(page, "one")
    field, asked = page.get_by_label("Message"), []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept() if is_agreed else dialog.dismiss()))
    field.fill("a long draft of mine")
    button(answers(page), "Edit").click()
    expect(field).to_have_value("You said one.")
    button(page, "Cancel").click()
    expect(field).to_have_value("a long draft of mine")
    assert not asked                                            # nothing was changed
    is_agreed = False
    button(answers(page), "Edit").click()
    field.fill("a better answer")
    leave = [lambda: button(page, "Cancel").click(), lambda: page.keyboard.press("Escape"),
             lambda: button(page, "New chat").click(), lambda: chats(page).first.click(),
             lambda: button(page.get_by_role("article", name="You"), "Edit").click()]
    for n, way in enumerate(leave, start=1):
        way()
        expect(field).to_have_value("a better answer")
        assert asked == ["Give up your changes?"] * n
    is_agreed = True
    button(page, "New chat").click()
    expect(field).to_have_value("a long draft of mine")
    expect(page.get_by_text("Ask something.")).to_be_visible()


def test_a_reload_keeps_the_conversation_and_new_chat_begins_another(page):
    change_settings(page, Temperature="0.5")
    say(page, "remember me")
    page.reload()
    expect(answers(page)).to_contain_text("You said remember me.")
    expect(answers(page)).to_contain_text("6 tokens")
    button(page, "Settings").click()
    expect(page.get_by_label("Temperature")).to_have_value("0.5")
    button(page, "Done").click()
    button(page, "New chat").click()
    expect(answers(page)).to_have_count(0)
    page.reload()
    expect(page.get_by_text("Ask something.")).to_be_visible()
    assert len(page.evaluate(KEPT)) == 1


def test_leaving_in_the_middle_keeps_what_had_arrived(page):
    say(page, "long", wait=False)
    expect(answers(page)).to_contain_text("word word")
    page.reload()
    expect(answers(page)).to_contain_text("word word")
    expect(button(page, "Regenerate")).to_be_visible()


def test_enter_within_a_syllable_sends_nothing(page, engine):
    """While Hangul is composed, Enter belongs to the input method; with shift it makes a line."""
    field = page.get_by_label("Message")
    field.fill("안녕")
    field.evaluate("""field => field.dispatchEvent(
        new KeyboardEvent("keydown", {key: "Enter", isComposing: true, bubbles: true, cancelable: true}))""")
    field.press("Shift+Enter")
    expect(field).to_have_value("안녕\n")
    assert engine.requests == []
    field.press("Enter")
    expect(answers(page)).to_contain_text("You said 안녕.")


# ---- how answers look --------------------------------------------------------------------------------------


def test_markdown(page):
    say(page, "markdown")
    answer = answers(page)
    expect(answer.get_by_role("heading", name="Title")).to_be_visible()
    assert answer.locator("strong").all_inner_texts() == ["bold"]
    assert answer.locator("em").all_inner_texts() == ["italic"]
    assert answer.locator("p").first.inner_text() == "A bold word, an italic one and code_of_it, 2 * 3 * 4."
    assert answer.locator("ul li").all_inner_texts() == ["one", "two, which\ngoes on"]
    assert answer.locator("ol").get_attribute("start") == "3"
    assert answer.locator("pre").inner_text() == f'print("<b>not bold</b>", "{"long " * 40}")'


def test_text_of_a_model_stays_text(page):
    say(page, "evil")
    say(page, '<img src=x onerror="window.hacked=1">')
    page.reload()
    expect(answers(page).first.locator("p").first).to_contain_text('<img src=x onerror="window.hacked=1"> <script>')
    expect(answers(page).first.locator("strong")).to_have_text("<b>bold</b>")
    assert page.locator("img, article script, article b, article a").count() == 0
    assert page.evaluate("window.hacked") is None


def test_not_even_markup_that_slipped_in_would_run(page):
    with pytest.raises(Error, match="requires 'TrustedHTML'"):
        page.evaluate("""document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.hacked=1'>")""")
    with pytest.raises(Error, match="requires 'TrustedScript'"):
        page.evaluate("document.body.setAttribute('onclick', 'window.hacked=1')")
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.append("window.hacked=1");
        document.body.append(script);
    }""")
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None
    page.mistakes.clear()           # the browser may have told of what it stopped


def test_tables_lists_quotes_and_links(page):
    say(page, "rich")
    answer = answers(page)
    assert [row.inner_text().split() for row in answer.get_by_role("row").all()] == [
        ["name", "value", "note"], ["dp4a", "133", "fast"], ["half2", "131", "ok"]]
    heads = answer.get_by_role("columnheader").all()
    assert [head.evaluate("e => getComputedStyle(e).textAlign") for head in heads] == ["left", "right", "center"]
    assert answer.locator("ol > li > ul > li > ul > li").inner_text() == "deeper"
    assert answer.locator("ol > li").last.inner_text() == "second"
    links = answer.get_by_role("link")
    assert [link.get_attribute("href") for link in links.all()] == [
        "https://example.org/a_b", "https://example.org/bare", "https://example.org/x.png"]
    assert {link.get_attribute("rel") for link in links.all()} == {"noopener noreferrer"}
    expect(answer.locator("blockquote")).to_have_text("quoted a link and https://example.org/bare")
    assert answer.locator("s").inner_text() == "not done" and answer.locator("img").count() == 0


SHOW = "text => showText(document.getElementById('turns').appendChild(el('div', {class: 'text'})), text, true)"


def test_tasks(page):
    page.evaluate(SHOW, "- [x] done\n- [ ] **to** do\n\n  [x] more\n- [y] no task\n\n[x] nor this\n\n1. [X] first")
    shown = page.locator("#turns")
    assert shown.locator("li").all_inner_texts() == ["☑ done", "☐ to do\n\n[x] more", "[y] no task", "☑ first"]
    assert shown.locator("li").evaluate_all("all => all.map(li => getComputedStyle(li).listStyleType)") == [
        "none", "none", "disc", "none"]
    expect(shown).to_contain_text("[x] nor this")


def test_long_cells_of_narrow_tables_scroll(open_page):
    page = open_page(width=390)
    page.evaluate(SHOW, "|a|b|c|\n|-|-|-|\n|abcdefghijklmn|opqrstuvwxyzab|" + "a word " * 20 + "|")
    *short, long = (cell.bounding_box()["width"] for cell in page.get_by_role("cell").all())
    assert max(short) < 192 <= long
    assert page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.parametrize("width", [390, 1280])
def test_formulas_are_not_cut(open_page, width):
    page = open_page(width=width)
    tex = r"$$\nabla_\theta \mathcal{L} = \mathbb{E}\left[\sum_{t=0}^{T} \nabla_\theta \log \pi(a_t)\right]$$"
    page.evaluate(SHOW, tex)
    box = page.locator("div.math")
    assert box.evaluate("box => box.scrollHeight <= box.clientHeight")
    assert box.evaluate("box => box.querySelector('munderover, msubsup').getBoundingClientRect().top "
                        ">= box.getBoundingClientRect().top")


EDGES = "all => all.map(e => e.getBoundingClientRect()).map(box => [box.left, box.right])"


def test_formulas_are_aligned(page):
    page.evaluate(SHOW, r"""$$\begin{aligned} f(x) &= b+c \\ y &= d \end{aligned}$$
$$|x| = \begin{cases} x & \text{if} \\ -x+1 & \text{otherwise} \end{cases}$$
$$\cancel{x+y}$$""")
    aligned, cases, struck = page.locator("math").all()
    left, right = zip(*aligned.locator("mo:text('=')").evaluate_all(EDGES))
    assert left[0] == pytest.approx(left[1], abs=0.1)
    ends = aligned.locator("mtd:first-child > *").evaluate_all(EDGES)          # of f(x) and y
    assert ends[0][1] == pytest.approx(ends[1][1], abs=0.1) and ends[0][0] < ends[1][0] - 5
    for column in "mtd:first-child > *", "mtd:last-child > *":
        left, _ = zip(*cases.locator(column).evaluate_all(EDGES))
        assert left[0] == pytest.approx(left[1], abs=0.1)
    [stroke], [box] = (struck.locator(name).evaluate_all(EDGES) for name in (".tml-cancel", "menclose"))
    assert stroke == pytest.approx(box, abs=0.1) and stroke[1] > stroke[0]


def test_code_has_its_language_colours_and_a_copy_button(page):
    say(page, "rich")
    code = answers(page).get_by_role("figure")
    expect(code).to_contain_text("python")
    expect(code.locator(".hl-keyword")).to_have_text(["def", "return"])
    expect(code.locator(".hl-comment")).to_have_text("# a comment")
    expect(code.locator("pre")).to_have_text('def f(x):  # a comment\n    return "text" + str(12)')


IN_EVERY_LANGUAGE = """code => {
    const names = hljs.listLanguages().flatMap(name => [name, ...hljs.getLanguage(name).aliases ?? []]);
    return names.map(name => {
        const box = document.createElement("div");
        showText(box, "```" + name + "\\n" + code + "\\n```", true);
        return [name, box.querySelector("pre").textContent, hljs.highlight(code, {language: name}).errorRaised];
    });
}"""        # of each language that is coloured: its name, what is shown of the code, and what went wrong


@pytest.mark.parametrize("code", ["<a href='x'>text</a>", "<!-- a comment -->\n<p class=\"b\">x &amp; y</p>"])
def test_code_of_every_language_is_shown_whole(page, code):
    shown = page.evaluate(IN_EVERY_LANGUAGE, code)
    assert len(shown) > 60 and {"html", "svg", "md", "php-template"} <= {name for name, *_ in shown}
    assert [row for row in shown if row[1:] != [code, None]] == []


def test_code_that_cannot_be_coloured_is_shown_as_it_is(page):
    page.evaluate("hljs.highlight = () => ({_emitter: {root: {children: ['def']}}})")
    say(page, "rich")
    expect(answers(page).locator("pre")).to_have_text('def f(x):  # a comment\n    return "text" + str(12)')


def test_formulas(page):
    say(page, "rich")
    answer = answers(page)
    expect(answer).to_contain_text("It costs $5 or $6, but")
    expect(answer.locator("p math")).to_have_count(2)
    expect(answer.locator(".math > math[display=block]")).to_have_count(2)
    expect(answer.locator("mtable mtr")).to_have_count(2)
    expect(answer.locator(".math code")).to_have_text(r"\nonsense{")         # what is no formula stays as it was


MONEY = ["It costs $5 or $6.", "From $1,000 to $2,000.", "between $5-$10", "US$5 (CA$7)", "It is $5/month or $60/year.",
         "A price of 5$ and 6$.", "cost: 5$, or 6$ each", "JPY or US$, A$, C$", "A$5 and B$6", "~$5 vs ~$6",
         "I have $20, he has 10$.", "pay $5 (5$) now", "save $100 (10% of $1,000)", "$5k–$10k", "$HOME/$USER",
         "echo $PATH:$HOME"]
FORMULAS = ["$x$", "$x$-axis", "($x$)", "if $n$=5", "$3 x + 2$ is one", "$2(x + 1)$, $[0, 1)$", "H$_2$O", "two $k$s",
            "90$^\\circ$C", "5 $\\mu$m", "the $n$th", "_$x$_ is emphasised", "$x$는 수이다", "costs $5, where $n = 3$",
            "$20 \\text{ of the } n$"]
SHOWN = """text => {
    const box = document.createElement("div");
    showText(box, text, true);
    return [box.querySelectorAll("math").length, box.textContent];
}"""        # how many formulas a text has, and its letters


def test_money_and_shells_are_no_formulas(page):
    assert [page.evaluate(SHOWN, text) for text in MONEY] == [[0, text] for text in MONEY]


def test_formulas_within_a_line(page):
    shown = [page.evaluate(SHOWN, text)[0] for text in FORMULAS]
    assert shown == [2 if text.startswith("$2(") else 1 for text in FORMULAS]


@pytest.mark.parametrize("secure", [True, False])
def test_copying_works_without_a_secure_context_too(open_page, secure):
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    if not secure:                  # as over http from another machine
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    say(page, "markdown")
    button(answers(page).get_by_role("figure"), "Copy").click()
    expect(button(page, "Copied")).to_be_visible()
    field = page.get_by_label("Message")
    field.focus()
    page.keyboard.press("Control+V")
    expect(field).to_have_value(f'print("<b>not bold</b>", "{"long " * 40}")')


GROWING = MARKDOWN + RICH + "p\n#all\n\nLast\n-\n\n|a|\n|--x|\n"
BY_PIECES = """([text, n]) => {
    const grown = document.createElement("div"), whole = document.createElement("div");
    for (let end = 0; end < text.length; end += n) showText(grown, text.slice(0, end), false);
    showText(grown, text, false);
    showText(whole, text, true);
    return [grown.outerHTML, whole.outerHTML];
}"""        # a text that grows by n letters at a time, and the same text at once


@pytest.mark.parametrize("n", [1, 7, 100])
def test_a_growing_text_looks_like_the_whole_one(page, n):
    grown, whole = page.evaluate(BY_PIECES, [GROWING, n])
    assert grown == whole and "<table>" in whole and "<math" in whole


HUGE = {"backticks": "`" * 10**6, "a table": "|a|b|c|\n|-|-|-|\n" + "|x|y|z|\n" * 8_000, "brackets": "[" * 100_000,
        "quotes": ">" * 300_000, "a formula": "$$" + "x^{" * 100_000, "half formulas": r"\(" * 30_000,
        "doubling": r"$\def\a{xx}\def\b{\a\a}\def\c{\b\b}\def\d{\c\c}\def\e{\d\d}\def\f{\e\e}\f\f\f\f\f\f$ " * 50,
        "code": "```python\n" + "def f(x): return '" * 20_000, "entities": "&" * 300_000, "one line": "word " * 100_000}
HANGS = """text => setTimeout(() => {
    const box = document.body.appendChild(document.createElement("div"));
    for (const share of [.02, .5, .99, 1]) showText(box, text.slice(0, share * text.length), share === 1);
    if (box.offsetHeight) document.title = "shown";
    box.remove();
})"""        # a text in four steps, without waiting for them


@pytest.mark.parametrize("kind", HUGE)
def test_huge_answers_do_not_hang_the_tab(page, kind):
    page.evaluate(HANGS, HUGE[kind])
    expect(page).to_have_title("shown")


def test_a_megabyte_in_one_piece_is_answered(page):
    chunk = {"choices": [{"index": 0, "delta": {"content": "`" * 10**6}, "finish_reason": "stop"}]}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream"))
    say(page, "hello")
    expect(button(page, "Regenerate")).to_be_visible()


def test_thoughts_are_folded(page, engine):
    change_settings(page, Thinking="on")
    say(page, "deep")
    fold = answers(page).get_by_text("Thought for")
    thoughts = answers(page).get_by_text("The reader wants something.")
    expect(fold).to_be_visible()
    expect(thoughts).not_to_be_visible()
    fold.click()
    expect(thoughts).to_be_visible()
    change_settings(page, Thinking="off")
    say(page, "shallow")
    assert "wants something" not in prompts(engine)[-1]         # thoughts are not told to the model again
    expect(answers(page).last.get_by_text("Thought for")).not_to_be_visible()


def test_a_tool_call_is_shown_and_answered(page, engine):
    change_settings(page, Tools=json.dumps(TOOLS))
    say(page, "weather")
    call = answers(page).get_by_role("region", name="Call of get_weather")
    expect(call).to_contain_text('"city": "Seoul"')
    page.get_by_label("Result of get_weather").fill("rain, 12 degrees")
    button(page, "Send result").click()
    expect(answers(page).last).to_contain_text("It is raining.")
    assert "rain, 12 degrees" in prompts(engine)[-1] and "<parameter=city>\nSeoul" in prompts(engine)[-1]
    expect(call).to_contain_text("rain, 12 degrees")
    button(page, "Regenerate").click()
    wait_until(lambda: len(engine.requests) == 3)
    assert prompts(engine)[2] == prompts(engine)[1]             # the result was kept


def test_settings_are_sent(page, engine):
    say(page, "plain")
    plain = engine.requests[-1]
    assert plain.seed is None and (plain.temperature, plain.top_p, plain.top_k, plain.min_p) == (1, 1, 0, 0)
    change_settings(page, System_prompt="Be brief.", Temperature="0.3", Top_p="0.9", Top_k="40", Min_p="0.05",
                    Longest_answer="7", Seed="11")
    say(page, "with all of it")
    request = engine.requests[-1]
    assert (request.temperature, request.top_p, request.top_k, request.min_p) == (0.3, 0.9, 40, 0.05)
    assert (request.max_tokens, request.seed) == (7, 11)
    assert prompts(engine)[-1].startswith("<|im_start|>system\nBe brief.")
    expect(answers(page).last).to_contain_text("cut at its limit")


def test_settings_that_cannot_be_are_not_sent(page, engine):
    button(page, "Settings").click()
    for label, value in (("Temperature", "3"), ("Top k", "1.5"), ("Tools", "{"), ("Tools", '{"a": 1}')):
        page.get_by_label(label).fill(value)
        expect(page.get_by_label(label)).to_have_attribute("aria-invalid", "true")
        expect(page.get_by_role("dialog").get_by_role("status")).to_have_text(        # at once, not only with Done
            "Value must be less than or equal to 2." if label == "Temperature" else re.compile("."))
        assert page.get_by_label(label).evaluate("e => getComputedStyle(e).borderColor") == \
            page.get_by_role("dialog").get_by_role("status").evaluate("e => getComputedStyle(e).color")
        expect(page.get_by_label(label)).to_be_focused()
        if label != "Tools":
            page.get_by_label(label).fill("1")
            expect(page.get_by_role("dialog").get_by_role("status")).to_have_text("")
    page.keyboard.press("Escape")
    say(page, "hello")
    expect(answers(page)).to_contain_text("You said hello.")
    assert engine.requests[-1].temperature == 1


def test_the_settings_show_what_the_server_chooses(open_page, engine):
    page = open_page(app=app_of(engine, sampling={"temperature": 0.6, "top_k": 20}))
    button(page, "Settings").click()
    shown = {"Temperature": "0.6", "Top k": "20", "Longest answer": "no limit", "Seed": "by chance"}
    for label, value in shown.items():
        expect(page.get_by_label(label)).to_have_attribute("placeholder", value)


@pytest.mark.parametrize("end, shown", [("<think>\n\n</think>\n\n", "default (off)"), ("<think>\n", "default (on)"),
                                        (None, "default")])
def test_the_settings_show_whether_a_model_thinks(page, end, shown):
    if end != "<think>\n\n</think>\n\n":                        # which is what the model of these tests does
        page.route("**/apply-template", lambda route: route.fulfill(
            **{"json": {"prompt": f"hi<|im_end|>\n{end}"}} if end else {"status": 404}))
    button(page, "Settings").click()
    expect(page.get_by_label("Thinking").locator("option").first).to_have_text(shown)
    expect(page.get_by_label("Thinking")).to_have_value("")


# ---- conversations -----------------------------------------------------------------------------------------


def chats(page):
    """The buttons of the list of conversations, which is opened."""
    if not page.get_by_role("navigation", name="Chats").is_visible():
        button(page, "Chats").click()
    return page.get_by_role("navigation", name="Chats").get_by_role("listitem").locator(".title")


def test_each_conversation_is_kept_by_itself(page, engine):
    say(page, "first")
    button(page, "New chat").click()
    say(page, "second")
    assert "first" not in prompts(engine)[-1]
    expect(chats(page)).to_have_text(["second", "first"])
    chats(page).last.click()
    expect(answers(page)).to_have_text([re.compile("You said first.")])
    page.reload()
    expect(answers(page)).to_have_text([re.compile("You said first.")])
    page.on("dialog", lambda dialog: dialog.accept())
    chats(page)
    button(page, "Delete “first”").click()
    expect(chats(page)).to_have_text(["second"])
    expect(page.get_by_text("Ask something.")).to_be_visible()
    assert [len(chat["messages"]) for chat in page.evaluate(KEPT)] == [2]


def test_an_answer_that_grows_moves_no_conversation(page):
    """Several answers at once would move the list under the reader's pointer; a new message does lead to the top."""
    for text in "first", "second":
        say(page, text)
        button(page, "New chat").click()
    page.evaluate("""first => {
        const one = [...chats.values()].find(chat => titleOf(chat) === first);
        touch(one, thread(one).at(-1)), showChats();
    }""", "first")
    expect(chats(page)).to_have_text(["second", "first"])
    chats(page).last.click()
    say(page, "more")
    expect(chats(page)).to_have_text(["first", "second"])


def test_back_leads_to_the_conversation_before(page):
    for text in "first", "second":
        say(page, text)
        button(page, "New chat").click()
    for said in "second", "first":
        page.go_back()
        expect(answers(page)).to_have_text([re.compile(f"You said {said}.")])
    page.go_forward()
    expect(answers(page)).to_have_text([re.compile("You said second.")])
    button(answers(page), "Edit").click()
    page.get_by_label("Message").fill("a better answer")
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.go_back()
    expect(page.get_by_label("Message")).to_have_value("a better answer")
    expect(answers(page)).to_have_text([re.compile("You said second.")])


def test_a_proxy_may_leave_out_the_slash_behind_its_prefix(page, engine):
    """The page is at /llm then, and its server below /llm/."""
    root = page.url.rstrip("/")

    def forward(route):
        prefix, _, path = route.request.url.partition("/llm")
        route.fulfill(response=route.fetch(url=f"{root}{path or '/'}")) if prefix == root else route.fulfill(status=404)

    page.route("**", forward)
    page.goto(f"{root}/llm")
    expect(page.get_by_role("heading", name="qengine")).to_contain_text(engine.name)
    say(page, "hello")
    expect(answers(page)).to_contain_text("You said hello.")


def second_tab(page):
    other = page.context.new_page()
    other.goto(page.url)
    return other


def test_two_tabs_lose_nothing(page, engine):
    """Each writes six turns, of the same conversation, and both are closed in the end."""
    say(page, "begin")
    other = second_tab(page)
    for i in range(3):
        say(page, f"here {i}", wait=False)
        say(other, f"there {i}", wait=False)
        for tab in page, other:
            expect(button(tab, "Send")).to_be_visible()
    for tab in page, other:
        tab.evaluate("dispatchEvent(new Event('pagehide'))")
    other.close()
    page.reload()
    chat, = page.evaluate(KEPT)
    said = {message["content"] for message in chat["messages"].values()}
    assert {f"{where} {i}" for where in ("here", "there") for i in range(3)} <= said
    assert {f"You said {where} {i}." for where in ("here", "there") for i in range(3)} <= said


def test_what_one_tab_says_the_other_shows(page):
    say(page, "begin")
    other = second_tab(page)
    say(other, "go on")
    expect(answers(page).last).to_contain_text("You said go on.")
    other.on("dialog", lambda dialog: dialog.accept())
    chats(other)
    button(other, "Delete “begin”").click()
    expect(page.get_by_text("Ask something.")).to_be_visible()
    assert page.evaluate(KEPT) == []


def test_what_one_tab_writes_the_other_does_not_regenerate(page, engine):
    """Until it is whole, or until the tab that wrote it has long been silent."""
    may_begin = hold(engine)
    other = second_tab(page)
    say(page, "hello", wait=False)
    chats(other).first.click()
    expect(other.get_by_text("Being written in another tab.")).to_be_visible()
    expect(button(other, "Regenerate")).to_have_count(0)
    may_begin.set()
    expect(button(page, "Send")).to_be_visible()
    expect(answers(other)).to_contain_text("You said hello.")
    expect(other.get_by_text("Being written")).not_to_be_visible()
    expect(button(other, "Regenerate")).to_be_visible()
    other.evaluate("Object.values(chat.messages).at(-1).writing = Date.now() - 60_000; showAll()")
    expect(button(other, "Regenerate")).to_have_count(0)
    other.evaluate("Object.values(chat.messages).at(-1).writing = Date.now() - 100_000; showAll()")
    expect(button(other, "Regenerate")).to_be_visible()


def test_an_older_copy_does_not_overwrite_a_newer_one(page):
    say(page, "begin")
    page.evaluate("""() => {
        const key = "qengine/chat/" + chat.id, there = JSON.parse(localStorage.getItem(key));
        there.messages.zzz = {id: "zzz", after: chat.head, revision: 1, role: "user", content: "from elsewhere"};
        localStorage.setItem(key, JSON.stringify(there));           // as another tab does, before this one hears of it
    }""")
    say(page, "go on")
    said = [message["content"] for message in page.evaluate(KEPT)[0]["messages"].values()]
    assert "from elsewhere" in said and "go on" in said


def test_each_conversation_has_an_answer_of_its_own(page, engine):
    """Stop and Escape belong to the conversation that is shown; the answers of others go on."""
    engine.pace = 0.05
    say(page, "long", wait=False)
    expect(answers(page)).to_contain_text("word")
    button(page, "New chat").click()
    expect(answers(page)).to_have_count(0)
    expect(button(page, "Stop")).to_be_hidden()
    page.get_by_role("group", name="Suggested questions").get_by_role("button").first.click()
    expect(answers(page)).to_contain_text("You said")
    writing = page.locator("#chat-list li.busy")
    expect(writing).to_have_count(2)
    button(page, "Stop").click()
    expect(answers(page)).to_contain_text("stopped")
    expect(writing).to_have_count(1)
    page.keyboard.press("Escape")                               # nothing is written here any more
    wait_until(lambda: [generation.cancelled for generation in engine.generations] == [False, True])
    chats(page).filter(has_text="long").click()
    n_words = len(answers(page).inner_text().split())
    wait_until(lambda: len(answers(page).inner_text().split()) > n_words)
    button(page, "Stop").click()
    expect(answers(page)).to_contain_text("stopped")


def test_a_conversation_waits_where_many_others_are_answered(page, engine):
    """A browser opens six connections to a server, and streams keep theirs."""
    engine.delay = PATIENCE
    for n in range(4):
        say(page, f"question {n}", wait=False)
        expect(button(page, "Stop")).to_be_visible()
        button(page, "New chat").click()
    say(page, "one more", wait=False)
    expect(page.get_by_role("alert")).to_have_text(
        "4 answers are being written, here or in other tabs: ask when one is whole.")
    expect(page.get_by_label("Message")).to_have_value("one more")
    chats(page).first.click()
    button(page, "Stop").click()
    say(page, "one more", wait=False)
    wait_until(lambda: len(engine.requests) == 5)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_the_answers_of_all_tabs_leave_connections_free(page, engine):
    """The browser's six connections belong to all tabs. A tab that has died holds none of them."""
    engine.delay = PATIENCE
    other, third = second_tab(page), second_tab(page)
    for n, tab in enumerate((page, other, page, other)):
        tab.bring_to_front()
        say(tab, f"question {n}", wait=False)
        expect(button(tab, "Stop")).to_be_visible()
        button(tab, "New chat").click()
    third.bring_to_front()
    expect(chats(third)).to_have_count(4)
    say(third, "one more", wait=False)
    expect(third.get_by_role("alert")).to_contain_text("4 answers are being written, here or in other tabs")
    expect(third.get_by_label("Message")).to_have_value("one more")
    assert third.evaluate("fetch('health', {signal: AbortSignal.timeout(60_000)}).then(response => response.ok)")
    other.bring_to_front()
    other.go_back()
    button(other, "Stop").click()
    expect(answers(other)).to_contain_text("stopped")
    third.bring_to_front()
    wait_until(lambda: third.evaluate("[...chats.values()].flatMap(each => Object.values(each.messages))"
                                      ".filter(isBeingWritten).length") == 3)       # a tab hears of others a bit later
    button(third, "Send").click()
    wait_until(lambda: len(engine.requests) == 5)
    expect(third.get_by_role("alert")).to_be_hidden()
    button(third, "New chat").click()
    say(third, "and one", wait=False)
    expect(third.get_by_role("alert")).to_be_visible()
    third.evaluate("Object.values([...chats.values()][0].messages).at(-1).writing = Date.now() - 100_000")
    button(third, "Send").click()
    wait_until(lambda: len(engine.requests) == 6)


def test_the_one_conversation_of_former_versions_is_taken_over(page, engine):
    call = {"role": "assistant", "content": "", "thoughts": "", "calls": [{"id": "a", "name": "f", "arguments": "{}"}]}
    former = {"messages": [{"role": "user", "content": "of old"}, call, {"role": "tool", "content": "wet", "id": "a"},
                           {"role": "assistant", "content": "It rains.", "thoughts": "", "calls": []}],
              "settings": {"temperature": 0.5}, "key": "secret"}
    page.evaluate("former => localStorage.setItem('qengine', JSON.stringify(former))", former)
    page.reload()
    chats(page).click()
    expect(answers(page).last).to_contain_text("It rains.")
    expect(page.get_by_role("region", name="Call of f")).to_contain_text("wet")
    say(page, "go on")
    assert "of old" in prompts(engine)[-1] and "wet" in prompts(engine)[-1] and engine.requests[-1].temperature == 0.5
    assert page.evaluate("[localStorage.getItem('qengine'), apiKey]") == [None, "secret"]


def test_a_full_browser_is_told_of_and_loses_nothing_that_it_has(page):
    say(page, "begin")
    page.evaluate("for (let n = 2 ** 22; n > 8; n /= 2) put('fill' + n, 'x'.repeat(n))")
    say(page, "markdown")
    expect(page.get_by_role("alert")).to_contain_text("This browser has no room left")
    assert len(page.evaluate(KEPT)[0]["messages"]) == 2
    page.evaluate("Object.keys(localStorage).filter(key => key.startsWith('fill')).forEach(drop)")
    say(page, "go on")
    expect(page.get_by_role("alert")).to_have_count(0)
    assert len(page.evaluate(KEPT)[0]["messages"]) == 6


def test_export(page):
    say(page, "hello")
    chats(page)
    with page.expect_download() as download:
        button(page, "Export this chat").click()
    assert download.value.suggested_filename == "hello.md"
    text = Path(download.value.path()).read_text(encoding="utf-8")
    assert text == "# hello\n\n## You\n\nhello\n\n## Answer\n\nYou said hello.\n"
    expect(button(page, "Export all")).to_have_attribute("title", re.compile("cannot read it back"))
    with page.expect_download() as download:
        button(page, "Export all").click()
    exported = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert exported["chats"] == page.evaluate(KEPT)


def test_suggested_questions(page, engine):
    suggested = page.get_by_role("group", name="Suggested questions").get_by_role("button")
    expect(suggested).to_have_count(4)
    question = suggested.first.inner_text()
    suggested.first.click()
    expect(answers(page)).to_contain_text(f"You said {question}.")


def test_suggested_questions_are_there_after_a_reload_within_a_conversation(page):
    say(page, "hello")
    page.reload()
    expect(page.get_by_role("heading", name="qengine")).to_contain_text("scripted")
    button(page, "New chat").click()
    expect(page.get_by_role("group", name="Suggested questions").get_by_role("button")).to_have_count(4)


def test_the_place_in_the_queue_is_shown(open_page):
    """The engine answers two requests at a time; two others are before this one, so one has to end first."""
    engine = PacedEngine(script, pace=0.002, delay=PATIENCE)
    app = app_of(engine)
    page = open_page(app=app)
    others = [second_tab(page) for _ in range(2)]
    for other in others:
        say(other, "hello", wait=False)
    wait_until(lambda: len(engine.requests) == 2)
    say(page, "hello", wait=False)
    page.bring_to_front()
    expect(answers(page)).to_contain_text("1 request has to end first.")
    button(others[0], "Stop").click()
    expect(page.get_by_text("to end first")).not_to_be_visible()
    button(page, "Stop").click()
    client = app.test_client()
    assert client.get("/waiting?request=nobody").status_code == client.get("/waiting").status_code == 204


# ---- the files of the page ---------------------------------------------------------------------------------


def test_libraries_are_those_that_the_table_names():
    table = (FOLDER / "vendor/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+\.js) \|.*\| (\w{64}) \|$", table, re.MULTILINE)
    assert dict(rows) == {file.name: hashlib.sha256(file.read_bytes()).hexdigest()
                          for file in (FOLDER / "vendor").glob("*.js")}


def test_a_browser_that_has_the_page_is_told_that_it_is_the_same(engine):
    client = app_of(engine).test_client()
    said = client.get("/")
    assert client.get("/", headers={"If-None-Match": said.headers["ETag"]}).status_code == 304
    assert "unsafe" not in said.headers["Content-Security-Policy"]


# ---- pictures ----------------------------------------------------------------------------------------------

PHOTO = {"name": "photo.png", "mimeType": "image/png", "buffer": file_of(scene(320, 224, seed=1), "PNG")}
OTHER = {"name": "other.jpg", "mimeType": "image/jpeg", "buffer": file_of(scene(256, 256, seed=2), "JPEG")}
GIVE = """([kind, text, types]) => {
    const data = new DataTransfer(), bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
    data.items.add(new File([bytes], "given.png", {type: "image/png"}));
    for (const type of types) data.setData(type, "cells");
    const event = kind === "paste" ? new ClipboardEvent(kind, {clipboardData: data, bubbles: true, cancelable: true})
        : new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true});
    document.getElementById("text").dispatchEvent(event);
    return event.defaultPrevented;
}"""        # what a paste or a drop does, of a file and of texts of these types


@pytest.fixture
def seeing(open_page):
    """(engine, page) of a model with eyes"""
    engine = PacedEngine(script, pace=0.002, sees=True)
    page = open_page(app=app_of(engine))
    expect(page.get_by_role("heading", name="qengine")).to_contain_text(engine.name)       # it knows what the model is
    yield engine, page
    engine.eyes.close()


def chosen(page):
    return page.get_by_role("group", name="Chosen pictures").get_by_role("img")


def add(page, *files):
    page.locator("#files").set_input_files(list(files))


def told(engine) -> list:
    """How many tokens each picture of the last request has."""
    return [picture.n_tokens for picture in engine.requests[-1].pictures]


def test_pictures_are_chosen_removed_and_sent(seeing):
    engine, page = seeing
    with page.expect_file_chooser():
        button(page, "Add pictures").click()
    add(page, PHOTO, OTHER, PHOTO)
    expect(chosen(page)).to_have_count(3)
    button(page, "Remove picture 1").click()
    expect(chosen(page)).to_have_count(2)
    say(page, "What is it?")
    assert told(engine) == [64, 70] and "<|vision_end|>What is it?" in prompts(engine)[-1]
    expect(chosen(page)).to_have_count(0)
    shown = page.get_by_role("article", name="You").get_by_role("img")
    expect(shown).to_have_count(2)
    assert shown.last.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [320, 224]
    say(page, "And now?")                                       # the conversation keeps them
    assert told(engine) == [64, 70]
    page.reload()
    expect(shown).to_have_count(2)
    button(page, "Regenerate").click()
    wait_until(lambda: len(engine.requests) == 3)
    assert told(engine) == [64, 70] and prompts(engine)[2] == prompts(engine)[1]


def test_a_picture_to_try(seeing):
    engine, page = seeing
    suggested = page.get_by_role("group", name="Suggested questions").get_by_role("button")
    expect(suggested).to_have_count(5)
    expect(suggested.last).to_contain_text("circles")       # small models take what follows to be about the picture
    suggested.last.click()
    expect(page.get_by_role("article", name="You").get_by_role("img")).to_have_count(1)
    wait_until(lambda: engine.requests)
    assert told(engine) == [64] and re.search(r"How many (red|green|blue) circles are there\?", prompts(engine)[-1])


def test_white_pictures_have_an_edge_and_chips_of_one_line_are_equal(seeing):
    _, page = seeing
    assert page.locator("#suggested img").evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    chips = page.get_by_role("group", name="Suggested questions").get_by_role("button").all()
    assert len({chip.bounding_box()["height"] for chip in chips[:-1]}) == 1       # the last one has a picture
    add(page, PHOTO)
    assert chosen(page).evaluate("e => getComputedStyle(e).outlineStyle") == "solid"


def test_pictures_that_take_long_are_told_of(seeing):
    engine, page = seeing
    may_begin = hold(engine)
    add(page, PHOTO, OTHER)
    expect(chosen(page)).to_have_count(2)
    say(page, "What are they?", wait=False)
    expect(answers(page).get_by_role("status")).to_have_text("Reading the pictures …")
    may_begin.set()
    expect(answers(page)).to_contain_text("You said")
    expect(answers(page)).not_to_contain_text("Reading")
    may_begin.clear()
    say(page, "And now?", wait=False)                           # no picture of its own
    wait_until(lambda: len(engine.requests) == 2)
    page.wait_for_timeout(1800)
    expect(answers(page).last).not_to_contain_text("Reading")
    may_begin.set()


def test_a_picture_alone_is_a_message(seeing):
    engine, page = seeing
    button(page, "Send").click()
    assert not engine.requests
    add(page, PHOTO)
    expect(chosen(page)).to_have_count(1)
    button(page, "Send").click()
    wait_until(lambda: engine.requests)
    assert told(engine) == [70]


@pytest.mark.parametrize("kind", ["paste", "drop"])
def test_pictures_are_pasted_and_dropped(seeing, kind):
    engine, page = seeing
    given = base64.b64encode(PHOTO["buffer"]).decode()
    assert page.evaluate(GIVE, [kind, given, []])
    expect(chosen(page)).to_have_count(1)
    if kind == "paste":
        assert not page.evaluate(GIVE, [kind, given, ["text/plain"]])       # cells of a table stay text
    say(page, "This")
    assert told(engine) == [70]


def test_a_message_that_is_changed_keeps_its_pictures(seeing):
    engine, page = seeing
    add(page, PHOTO)
    expect(chosen(page)).to_have_count(1)
    say(page, "one")
    button(page.get_by_role("article", name="You"), "Edit").click()
    expect(chosen(page)).to_have_count(1)
    add(page, OTHER)
    expect(chosen(page)).to_have_count(2)
    say(page, "two")
    assert told(engine) == [70, 64] and "one" not in prompts(engine)[-1]


SLOW_BITMAPS = """() => {
    const make = createImageBitmap;
    createImageBitmap = async file => { await new Promise(go => window.goOn = go); return make(file); };
}"""        # pictures are read when goOn() is called


def test_pictures_are_not_thrown_away_by_an_edit(seeing):
    """Neither those that were added nor those that were removed nor, while they are read, those to come."""
    _, page = seeing
    asked, is_agreed = [], False
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept() if is_agreed else dialog.dismiss()))
    add(page, PHOTO)
    expect(chosen(page)).to_have_count(1)
    say(page, "one")
    change = button(page.get_by_role("article", name="You"), "Edit")
    change.click()
    button(page, "Cancel").click()
    expect(chosen(page)).to_have_count(0)
    assert not asked                                            # nothing was changed
    change.click()
    add(page, OTHER)
    expect(chosen(page)).to_have_count(2)
    button(page, "Cancel").click()
    expect(chosen(page)).to_have_count(2)
    assert len(asked) == 1
    button(page, "Remove picture 2").click()
    button(page, "Cancel").click()
    assert len(asked) == 1                                      # the same again
    change.click()
    button(page, "Remove picture 1").click()
    button(page, "Cancel").click()
    assert len(asked) == 2
    page.evaluate(SLOW_BITMAPS)
    add(page, OTHER)
    button(page, "Cancel").click()
    expect(page.get_by_text("You are changing")).to_be_visible()
    assert asked == ["Give up your changes?"] * 3
    is_agreed = True
    button(page, "Cancel").click()
    page.evaluate("goOn()")
    wait_until(lambda: not page.evaluate("reading"))
    expect(chosen(page)).to_have_count(0)                       # it was given up


def test_a_picture_of_the_draft_that_is_read_during_an_edit_stays_with_the_draft(seeing):
    _, page = seeing
    say(page, "one")
    page.evaluate(SLOW_BITMAPS)
    add(page, PHOTO)
    button(page.get_by_role("article", name="You"), "Edit").click()
    page.evaluate("goOn()")
    wait_until(lambda: not page.evaluate("reading"))
    expect(chosen(page)).to_have_count(0)
    button(page, "Cancel").click()
    expect(chosen(page)).to_have_count(1)


@pytest.mark.parametrize("width, height", [(1500, 1000), (300, 2000), (500, 400)])
def test_large_photos_are_made_smaller_before_they_are_sent(seeing, width, height):
    """As large as the model sees them, and still in the same proportions. Small files are sent as they are."""
    engine, page = seeing
    engine.eyes.limits = Limits(64, 400)
    page.evaluate("sees.pixels = 400 * 1024")
    photo = PHOTO | {"buffer": file_of(scene(width, height), "PNG")}
    sent = []
    page.on("request", lambda request: request.url.endswith("completions") and sent.append(request.post_data_json))
    add(page, photo)
    expect(chosen(page)).to_have_count(1)
    say(page, "Look")
    url = sent[0]["messages"][0]["content"][0]["image_url"]["url"]
    file = base64.b64decode(url.partition(",")[2])
    with Image.open(io.BytesIO(file)) as image:
        assert 0.98 * min(width * height, 400 * 1024) < image.width * image.height < 1.01 * 400 * 1024
        assert image.width / image.height == pytest.approx(width / height, rel=0.01)
    assert (file == photo["buffer"]) == (width == 500)
    whole = engine.eyes.of_image(Image.open(io.BytesIO(photo["buffer"])))
    assert (whole.rows, whole.columns) == (engine.requests[0].pictures[0].rows, engine.requests[0].pictures[0].columns)


def test_files_that_are_no_pictures(seeing):
    _, page = seeing
    add(page, PHOTO, {"name": "song.mp3", "mimeType": "audio/mpeg", "buffer": b"la la"})
    expect(page.get_by_role("alert")).to_have_text("song.mp3 is no picture that this browser can read.")
    expect(chosen(page)).to_have_count(1)
    page.evaluate("sees.pictures = 2")
    add(page, OTHER, OTHER)
    expect(page.get_by_role("alert")).to_have_text("A request may have 2 pictures.")
    expect(chosen(page)).to_have_count(2)


def test_a_model_without_eyes(page, engine):
    """The page says so at once, and nothing is sent."""
    expect(page.get_by_role("heading", name="qengine")).to_contain_text(engine.name)
    for give in (lambda: button(page, "Add pictures").click(), lambda: add(page, PHOTO),
                 lambda: page.evaluate(GIVE, ["drop", base64.b64encode(PHOTO["buffer"]).decode(), []])):
        page.evaluate("note('')")
        give()
        expect(page.get_by_role("alert")).to_have_text("This model has no eyes: it reads text alone.")
        expect(chosen(page)).to_have_count(0)
    say(page, "hello")
    assert engine.requests[-1].pictures == ()


def test_a_model_that_has_lost_its_eyes(seeing, engine):
    """The server was started again without them, and the conversation still has a picture."""
    _, page = seeing
    add(page, PHOTO)
    expect(chosen(page)).to_have_count(1)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        status=400, json={"error": {"message": "the model has no eyes: it was loaded without an mmproj file"}}))
    button(page, "Send").click()
    expect(page.get_by_role("alert")).to_contain_text("The server says: the model has no eyes")


def test_a_conversation_with_too_many_pictures(seeing):
    """The reader is told what to do, and not which path of the request is at fault."""
    engine, page = seeing
    engine.eyes.limits = Limits(64, 400, most_tokens=150)
    add(page, PHOTO, OTHER)
    expect(chosen(page)).to_have_count(2)
    say(page, "one")
    add(page, PHOTO)
    expect(chosen(page)).to_have_count(1)
    say(page, "two")
    expect(page.get_by_role("alert")).to_contain_text(
        "The server says: the pictures of a request may have 150 tokens together, and 3 of them have 204; "
        "send fewer, begin a new chat, or give the model a longer context (--ctx).")


def test_large_files_survive_a_reload(seeing):
    """Noise, which no format makes small: as PNG it has more letters than the browser keeps of all pictures."""
    engine, page = seeing
    large = PHOTO | {"buffer": file_of(np.random.default_rng(1).integers(0, 256, (800, 800, 3), np.uint8), "PNG")}
    add(page, large)
    expect(chosen(page)).to_have_count(1)
    say(page, "Look")
    assert told(engine) == [625] and len(large["buffer"]) * 4 / 3 > page.evaluate("MOST_KEPT")
    page.reload()
    expect(page.get_by_role("article", name="You").get_by_role("img")).to_have_count(1)
    say(page, "And now?")
    assert told(engine) == [625]


def test_pictures_that_the_browser_has_not_kept(seeing):
    """They stay until the page is left, and then it says so."""
    engine, page = seeing
    add(page, PHOTO)
    expect(chosen(page)).to_have_count(1)
    say(page, "Look")
    page.evaluate("keysOf(PICTURE).forEach(drop)")              # as those of newer conversations drive it out
    page.reload()
    expect(page.get_by_role("article", name="You").first).to_contain_text("1 picture of this message did not survive")
    say(page, "And now?")
    assert told(engine) == []
    page.reload()
    expect(page.get_by_role("article", name="You").first).to_contain_text("1 picture of this message did not survive")


def test_a_phone_has_a_camera_button(open_page):
    engine = PacedEngine(script, pace=0.002, sees=True)
    page = open_page(width=390, is_mobile=True, has_touch=True, app=app_of(engine))
    expect(page.get_by_role("heading", name="qengine")).to_contain_text(engine.name)       # it knows what the model is
    with page.expect_file_chooser() as chooser:
        button(page, "Take a picture").click()
    chooser.value.set_files([PHOTO])
    add(page, *[PHOTO] * 5)
    expect(chosen(page)).to_have_count(6)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    say(page, "What are these?")
    assert page.evaluate("document.documentElement.scrollWidth") == 390 and told(engine) == [70] * 6
    assert page.locator("main").evaluate("main => main.scrollWidth <= main.clientWidth")
    engine.eyes.close()


# ---- what goes wrong ---------------------------------------------------------------------------------------


def test_a_busy_server(open_page, engine):
    app = app_of(engine, max_requests=0)
    page = open_page(app=app)
    say(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text(re.compile(r"The server is busy .* Try again in 1 s\."))
    app.extensions["qengine"].max_requests = 9
    button(page, "Try again").click()
    expect(answers(page)).to_contain_text("You said hello.")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_model_that_is_still_loading(open_page, engine):
    app = app_of()
    page = open_page(app=app)
    expect(page.get_by_text("loading the model")).to_be_visible()
    say(page, "early", wait=False)
    expect(page.get_by_text("Waiting until the model is loaded.")).to_be_visible()
    button(page, "Stop").click()
    expect(answers(page)).to_contain_text("stopped")
    say(page, "hello", wait=False)
    expect(page.get_by_text("Waiting until the model is loaded.")).to_be_visible()
    app.extensions["qengine"].models = Models([Served(engine)])
    expect(answers(page).last).to_contain_text("You said hello.")       # without another click, or a reload
    expect(page.get_by_text("Waiting until")).not_to_be_visible()
    expect(page.get_by_role("heading", name="qengine")).to_contain_text(engine.name)
    assert len(engine.requests) == 1


def test_a_model_that_cannot_be_loaded(open_page):
    """Whoever waits for it is told."""
    app = app_of()
    page = open_page(app=app)
    say(page, "hello", wait=False)
    expect(page.get_by_text("Waiting until the model is loaded.")).to_be_visible()
    app.extensions["qengine"].drain(0)
    expect(page.get_by_role("alert")).to_contain_text("The server says:")


def test_a_model_that_is_put_away(page):
    """It is loaded when somebody asks; then the page looks again at what it can do."""
    states = ["unloaded", "loaded"]
    page.route("**/health", lambda route: route.fulfill(json=WELL | {
        "state": states[0], "counts_pipes": states[0] == "loaded"}))
    page.reload()
    expect(page.get_by_role("heading", name="qengine")).to_contain_text("m, loaded when you ask")
    expect(button(page, "Pipes")).not_to_be_visible()
    del states[0]
    say(page, "hello")
    expect(page.get_by_role("heading", name="qengine")).not_to_contain_text("loaded")
    expect(button(page, "Pipes")).to_be_visible()


@pytest.fixture
def two(open_page):
    """A page over two models, (small, other): the first sees nothing, the other sees, and is asked otherwise."""
    models = [PacedEngine(lambda prompt, name=name: f"I am {name}.", sees=name == "other")
              for name in ("small", "other")]
    for model, name in zip(models, ("small", "other")):
        model.name = name
    served = [Served(model, defaults=Defaults({"temperature": warmth}))
              for model, warmth in zip(models, (0.25, 0.75))]
    yield open_page(app=create_app(models=Models(served))), *models


def test_one_of_several_models_is_chosen(two):
    page, small, other = two
    field = page.get_by_label("Model")
    expect(field).to_have_value("small")
    expect(field.locator("option")).to_have_text(["small", "other"])
    say(page, "hello")
    expect(answers(page).last).to_contain_text("I am small.")
    button(page, "Add pictures").click()
    expect(page.get_by_role("alert")).to_have_text("This model has no eyes: it reads text alone.")
    field.select_option("other")
    add(page, PHOTO)                                            # this one sees
    expect(chosen(page)).to_have_count(1)
    button(page, "Settings").click()
    expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "0.75")
    button(page, "Done").click()
    say(page, "and now?")
    expect(answers(page).last).to_contain_text("I am other.")
    expect(answers(page).last).to_contain_text(re.compile(r"other · \d+ tokens"))
    assert [len(model.requests) for model in (small, other)] == [1, 1]


def test_a_conversation_keeps_its_model(two):
    page, small, other = two
    field = page.get_by_label("Model")
    expect(field).to_have_value("small")
    say(page, "first")
    button(page, "New chat").click()
    field.select_option("other")
    say(page, "second")
    chats(page).filter(has_text="first").click()
    expect(field).to_have_value("small")
    page.reload()
    expect(field).to_have_value("small")
    say(page, "third")
    assert [len(model.requests) for model in (small, other)] == [2, 1]
    button(page, "New chat").click()                            # begins with the one that was chosen last
    expect(field).to_have_value("other")
    page.evaluate("chat.model = 'gone'; showModel()")
    expect(field).to_have_value("other")


def test_one_model_alone_is_no_choice(page, engine):
    expect(page.get_by_role("heading", name="qengine")).to_contain_text(engine.name)
    expect(page.get_by_label("Model")).to_be_hidden()
    say(page, "hello")
    expect(answers(page)).not_to_contain_text(f"{engine.name} ·")


def test_what_models_do_is_shown_where_one_chooses(page):
    """A model that has failed is none of the others' business."""
    states = {"small": {"state": "failed", "error": "the card fell off"}, "away": {"state": "unloaded"},
              "rows": {"state": "loaded", "kind": "embedding"}}
    first, *side = [{"kind": "text", "model": name} | more for name, more in states.items()]
    page.route("**/health", lambda route: route.fulfill(status=503, json=first | {"status": "error", "side": side}))
    page.reload()
    field = page.get_by_label("Model")
    expect(field.locator("option")).to_have_text(["small, has failed", "away, loaded when you ask"])
    expect(page.get_by_role("heading", name="qengine")).to_contain_text("the card fell off")
    field.select_option("away")
    expect(page.get_by_text("the card fell off")).to_be_hidden()
    expect(field).to_be_visible()


def test_an_engine_that_fails(page):
    say(page, "broken")
    expect(page.get_by_role("alert")).to_contain_text("The answer broke off: the card fell off the bus.")


def test_no_server(page):
    page.context.set_offline(True)
    say(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached.")
    page.context.set_offline(False)
    button(page, "Try again").click()
    expect(answers(page)).to_contain_text("You said hello.")


def test_a_connection_that_is_lost(page):
    half = 'data: {"choices": [{"index": 0, "delta": {"content": "Half an ans"}, "finish_reason": null}]}\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=half, content_type="text/event-stream"))
    page.route("**/health", lambda route: route.abort())
    say(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("The connection was lost. What had arrived is kept.")
    expect(answers(page)).to_contain_text("Half an ans")
    expect(page.get_by_role("heading", name="qengine")).to_contain_text("is not reachable")     # it looked at once
    page.unroute("**/health")
    expect(page.get_by_role("heading", name="qengine")).to_contain_text("scripted")


def test_a_connection_that_is_lost_while_the_server_is_asked_how_it_is(page):
    """The answer on its way is older than the loss: the page asks again."""
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body="", content_type="text/event-stream"))
    asked = []
    page.route("**/health", lambda route: asked.append(route))
    page.reload()
    wait_until(lambda: page.wait_for_timeout(10) or asked)
    say(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("The connection was lost.")
    page.route("**/health", lambda route: route.abort())
    asked[0].continue_()
    expect(page.get_by_role("heading", name="qengine")).to_contain_text("is not reachable")


def test_a_connection_that_is_lost_before_a_word(page):
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        body=": reading 1 of 9 tokens\n\n", content_type="text/event-stream"))
    say(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("The connection was lost. Nothing had arrived.")


def test_a_conversation_longer_than_the_context(page, engine):
    say(page, "x " * engine.n_ctx)
    expect(page.get_by_role("alert")).to_contain_text("maximum context length")


def test_the_settings_have_a_field_for_the_key_where_one_is_wanted(open_page, engine):
    """Before any message was refused; and nowhere else."""
    wanting, free = open_page(app=app_of(engine, keys=["secret"])), open_page(app=app_of(engine))
    button(wanting, "Settings").click()
    wanting.get_by_label("API key").fill("secret")
    button(wanting, "Done").click()
    say(wanting, "hello")
    expect(answers(wanting)).to_contain_text("You said hello.")
    button(free, "Settings").click()
    expect(free.get_by_label("API key")).to_be_hidden()


def test_a_server_that_asks_for_a_key(open_page, engine):
    page = open_page(app=app_of(engine, keys=["secret"]))
    say(page, "hello")
    page.keyboard.press("Escape")
    expect(page.get_by_role("alert")).to_contain_text("This server wants an API key: enter it under Settings.")
    button(page, "Try again").click()
    for sentence, key in ("wants an API key", "wrong"), ("does not know this API key", "secret"):
        expect(page.get_by_role("alert")).to_contain_text(sentence)
        expect(page.get_by_label("API key")).to_be_focused()
        expect(page.get_by_role("dialog")).to_contain_text(sentence)
        page.get_by_label("API key").fill(key)
        expect(page.get_by_role("dialog")).not_to_contain_text(sentence)        # it was said of the former key
        page.keyboard.press("Enter")            # with another key, the page asks again by itself
    expect(answers(page)).to_contain_text("You said hello.")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("alert")).to_have_count(0)
    page.reload()
    say(page, "again")
    expect(answers(page).last).to_contain_text("You said again.")


def test_every_conversation_that_was_refused_is_asked_again_with_the_key(open_page, engine):
    """But for one that was deleted meanwhile. Refusals may come late: while the key is typed, and after it."""
    page, held = open_page(app=app_of(engine, keys=["secret"])), []
    page.on("dialog", lambda dialog: dialog.accept())
    say(page, "deleted")
    page.keyboard.press("Escape")
    chats(page)
    button(page, "Delete “deleted”").click()
    page.route("**/v1/chat/completions", lambda route: held.append(route) if len(held) < 4 else route.continue_())
    texts = ["one", "two", "three", "four"]
    for n, text in enumerate(texts, start=1):
        say(page, text, wait=False)
        wait_until(lambda n=n: page.evaluate("running.size") == n)
        button(page, "New chat").click()
    wait_until(lambda: page.evaluate("running.size") == len(held))
    page.wait_for_timeout(300)
    assert len(held) == 4
    chats(page).filter(has_text="one").click()
    for route in held[:2]:
        route.continue_()
    wait_until(lambda: page.evaluate("running.size") == 2)
    page.get_by_label("API key").fill("secret")
    held[2].continue_()
    wait_until(lambda: page.evaluate("running.size") == 1)
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("You said one.")
    held[3].continue_()
    for text in texts:
        chats(page).filter(has_text=text).click()
        expect(answers(page)).to_contain_text(f"You said {text}.")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(chats(page)).to_have_count(4)
    assert len(engine.requests) == 4


# ---- where it is shown -------------------------------------------------------------------------------------


def test_a_phone_needs_no_scrolling_sideways(open_page, engine):
    page = open_page(width=390, is_mobile=True, has_touch=True)
    change_settings(page, Thinking="on", Tools=json.dumps(TOOLS))
    for text in ("markdown", "w" * 300, "weather", "broken"):
        say(page, text)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.locator("main").evaluate("main => main.scrollWidth <= main.clientWidth")
    button(page, "Settings").click()
    box = page.get_by_role("dialog").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    for name in ("Settings", "New chat", "Send"):
        box = page.get_by_role("button", name=name, exact=True, include_hidden=True).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390


@pytest.mark.parametrize("width", [320, 390])
def test_nothing_lies_over_something_else_on_a_phone(open_page, width):
    page = open_page(width=width, is_mobile=True, has_touch=True)
    page.route("**/health", lambda route: route.fulfill(json=WELL | {
        "model": "qengine-10m", "counts_pipes": True, "sees": {"pixels": 256 * 256, "pictures": 4}}))
    page.reload()
    expect(button(page, "Pipes")).to_be_visible()
    expect(button(page, "Take a picture")).to_be_visible()
    say(page, "hello")
    for narrow in [page.get_by_role("heading", name="qengine"), *page.get_by_role("button").all()]:
        assert narrow.evaluate("e => e.scrollWidth <= e.clientWidth"), narrow.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_escape_folds_the_list_of_a_narrow_window(page, engine):
    engine.pace = 0.05
    say(page, "long", wait=False)
    assert chats(page).count() == 1
    page.keyboard.press("Escape")
    expect(page.get_by_role("navigation", name="Chats")).to_be_hidden()
    expect(button(page, "Chats")).to_be_focused()
    expect(button(page, "Stop")).to_be_visible()                # which is what the next one does
    page.keyboard.press("Escape")
    expect(answers(page)).to_contain_text("stopped")


def test_a_thumb_meets_the_buttons_of_a_phone(open_page):
    page = open_page(width=390, is_mobile=True, has_touch=True)
    say(page, "markdown")
    chats(page)
    small = page.evaluate("""[...document.querySelectorAll("button")].filter(e => e.checkVisibility())
        .map(e => [e.textContent, e.getBoundingClientRect()]).filter(([, box]) => box.width < 32 || box.height < 32)
        .map(([text, box]) => [text, box.width, box.height])""")
    assert small == []


def test_light_and_dark(open_page):
    def brightness(page):
        colour = page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)))

    assert brightness(open_page(color_scheme="light")) > 600 > 300 > brightness(open_page(color_scheme="dark"))


def test_the_view_follows_unless_the_reader_scrolled_up(page, engine):
    def below():
        return page.locator("main").evaluate("main => main.scrollHeight - main.scrollTop - main.clientHeight")

    say(page, "long", wait=False)
    wait_until(lambda: page.locator("main").evaluate("main => main.scrollHeight > main.clientHeight + 600"))
    wait_until(lambda: below() < 60)
    page.locator("main").hover()
    page.mouse.wheel(0, -400)
    wait_until(lambda: below() > 200)
    page.wait_for_timeout(300)
    assert below() > 200
    button(page, "Stop").click()


def test_a_bar_says_how_much_of_a_prompt_is_read(page, engine):
    bar = page.get_by_role("progressbar", name="How much of the prompt is read")
    expect(bar).to_be_hidden()
    engine.delay, engine.is_reading = 60.0, True
    say(page, "word " * 200, wait=False)
    expect(bar).to_be_visible()
    n_read, n_prompt = bar.evaluate("bar => [bar.value, bar.max]")
    assert 0 < n_read < n_prompt == engine.generations[-1].n_prompt
    engine.delay = 0.0
    expect(answers(page)).to_contain_text("You said")
    expect(bar).to_be_hidden()


def test_where_the_experts_of_an_answer_were(page):
    asked = []
    page.route("**/health", lambda route: route.fulfill(json=WELL | {"counts_experts": True}))
    page.route("**/experts", lambda route: asked.append(1) or route.fulfill(
        json={"hits": 100 + 75 * len(asked), "used": 1000 + 100 * len(asked)}))
    page.reload()
    say(page, "hello")
    expect(answers(page)).to_contain_text(re.compile("tokens(/s)? · 75 % of experts on the card · first after"))
    assert len(asked) == 2


PIPES = {"tokens": 1, "launches": 46, "pipes": {"dp4a": 300, "integer": 600, "barrier": 100}, "megabytes": 12.9,
         "card": "CMP 100-210", "estimated_seconds": 85e-6, "seconds_ago": 0}


def test_the_bar_of_pipes_asks_only_while_it_is_shown_and_something_runs(page, engine):
    asked = []
    expect(button(page, "Pipes")).not_to_be_visible()           # the card of this engine counts nothing
    page.route("**/health", lambda route: route.fulfill(json=WELL | {"counts_pipes": True}))
    page.route("**/pipes", lambda route: asked.append(1) or route.fulfill(json=PIPES))
    page.reload()
    say(page, "hello")
    assert not asked
    with page.expect_request("**/pipes"):
        button(page, "Pipes").click()
    wait_until(lambda: page.evaluate("compiling.size") == 0 and asked)
    page.wait_for_timeout(300)
    assert len(asked) == 1                                      # so that the server compiles what counts
    say(page, "long", wait=False)
    bar = page.get_by_role("img", name="integer 60 %, dp4a 30 %, barrier 10 %")
    expect(bar).to_be_visible()
    widths = [part.bounding_box()["width"] for part in bar.locator("div").all()]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.05)
    expect(page.get_by_role("region", name="Pipes of the card")).to_contain_text(
        "46 launches, 0.001 million instructions of warps, 12.9 MB moved. A CMP 100-210 would take 85 µs, by estimate.")
    for width in range(400, 320, -4):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.get_by_text("CMP 100-210", exact=True).evaluate("name => name.getClientRects().length") == 1
    button(page, "Stop").click()
    button(page, "Pipes").click()
    expect(bar).not_to_be_visible()


def test_an_answer_begins_when_what_counts_it_is_compiled(page, engine):
    asked = []
    page.route("**/health", lambda route: route.fulfill(json=WELL | {"counts_pipes": True}))
    page.route("**/pipes", lambda route: asked.append(route) or len(asked) > 1 and (        # the first one waits
        route.fulfill(json=PIPES) if engine.requests else route.fulfill(status=204)))
    page.reload()
    button(page, "Pipes").click()
    say(page, "hello", wait=False)
    expect(page.get_by_text("Waiting for a step that is counted.")).to_be_visible()
    page.wait_for_timeout(500)
    assert not engine.requests
    button(page, "Stop").click()                                # which need not wait
    expect(answers(page)).to_contain_text("stopped")
    say(page, "long", wait=False)
    page.wait_for_timeout(300)
    assert not engine.requests
    asked[0].fulfill(status=204)
    expect(answers(page).last).to_contain_text("word word")
    expect(page.get_by_role("img", name="integer 60 %")).to_be_visible()
    button(page, "Stop").click()


@pytest.mark.parametrize("has_counted", [True, False])
def test_an_answer_does_not_wait_for_ever_for_what_counts_it(open_page, engine, has_counted):
    """A server that has counted a step before has compiled what counts. Another one may hang."""
    asked, is_over = [], threading.Event()

    def count_pipes():
        asked.append(1)
        if len(asked) == 1:
            is_over.wait(PATIENCE)
        return PIPES if has_counted else None

    engine.counts_pipes, engine.count_pipes = True, count_pipes
    page = open_page()
    page.clock.install()
    page.reload()
    button(page, "Pipes").click()
    wait_until(lambda: asked)
    say(page, "hello", wait=False)
    if not has_counted:
        expect(page.get_by_text("Waiting for a step that is counted.")).to_be_visible()
        page.clock.fast_forward(30_000)
    expect(answers(page)).to_contain_text("You said hello.")
    is_over.set()


def test_an_answer_that_was_not_counted_says_so(page):
    """The server has counted nothing yet when a short answer is over."""
    told = []
    page.route("**/health", lambda route: route.fulfill(json=WELL | {"counts_pipes": True}))
    page.route("**/pipes", lambda route: route.fulfill(json=told[0]) if told else route.fulfill(status=204))
    page.reload()
    button(page, "Pipes").click()
    say(page, "hello")
    meter, bar = page.get_by_role("region", name="Pipes of the card"), page.get_by_role("img", name="integer 60 %")
    expect(meter.get_by_text("No step of this answer was counted: it was over too soon.")).to_be_visible()
    expect(bar).not_to_be_visible()
    told.append(PIPES | {"seconds_ago": 60})                    # of another answer, before this one
    say(page, "another")
    expect(meter.nth(1).get_by_text("No step of this answer was counted")).to_be_visible()
    expect(bar).not_to_be_visible()
    told[0] = PIPES
    say(page, "and again")
    expect(bar).to_be_visible()
    expect(meter.nth(2)).to_contain_text("46 launches")


def test_a_step_that_was_counted_after_an_answer_is_not_shown_below_it(page):
    """The server waits for a step; here it is one of somebody else."""
    held, is_over = [], []
    page.route("**/health", lambda route: route.fulfill(json=WELL | {"counts_pipes": True}))
    page.route("**/pipes", lambda route: route.fulfill(json=PIPES) if is_over else held.append(route))
    page.reload()
    button(page, "Pipes").click()
    wait_until(lambda: page.evaluate("compiling.size"))
    held.pop().fulfill(status=204)                              # what counts is compiled
    wait_until(lambda: not page.evaluate("compiling.size"))
    say(page, "hello")
    expect(page.get_by_text("Waiting for a step that is counted.")).to_be_visible()
    is_over.append(True)
    for route in held:
        route.fulfill(json=PIPES)
    expect(page.get_by_text("No step of this answer was counted")).to_be_visible()
    expect(page.get_by_text("Waiting for a step")).not_to_be_visible()
