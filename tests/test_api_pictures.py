"""Pictures in the requests of every protocol, sent by the official clients to a scripted engine that reads them."""

import base64
import contextlib
import http.client
import io
import json
import random
import threading

import anthropic
import ollama
import openai
import pytest
from PIL import Image

from api import body, pictures, service
from api.errors import MAX_BODY, MAX_SEEING
from api.openapi import ENDPOINTS
from api.pictures import SLICE, Pictures, Sent, decoded
from engine.images import LARGEST, PAD, Limits, Picture, Reader
from engine.picture_files import BLOCK
from engine.prefix import PAGE_TOKENS
from engine.request import RequestError
from engine.sight import BLIND
from engine.template import ChatTemplate
from tests.clients import CHAT, app_of, send, serving
from tests.longest_wait import LongestWait
from tests.oracle import oracle_npz
from tests.pictures import file_of, scene
from tests.scripted import ScriptedEngine
from tests.test_body import SECONDS
from tests.test_sight import Golden, load_seeing, tokens_of
from tests.until import PATIENCE, wait_until

SHOWN = f"<|vision_start|>{PAD}<|vision_end|>"
PATHS = {"/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses",
         "/v1/responses/input_tokens", "/api/chat", "/api/generate", "/tokenize", "/apply-template"}

A, B = (file_of(scene(*size), "PNG") for size in ((256, 256), (320, 224)))      # 64 and 70 tokens


def text_of(file: bytes) -> str:
    return base64.b64encode(file).decode()


def url_of(file: bytes) -> str:
    return f"data:image/png;base64,{text_of(file)}"


@pytest.fixture(scope="module")
def server():
    """(engine, port, Service)"""
    engine = ScriptedEngine("Seen.", sees=True)
    with serving(app_of(engine)) as (port, service):
        yield engine, port, service
    engine.eyes.close()


@pytest.fixture
def engine(server):
    server[0].requests.clear()
    return server[0]


def ask_openai(port, *content, **arguments):
    """The number of tokens of the prompt, as the answer tells it. content: texts, and bytes of files."""
    parts = [{"type": "text", "text": one} if isinstance(one, str) else
             {"type": "image_url", "image_url": {"url": url_of(one), **arguments}} for one in content]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        return client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": parts}]).usage.prompt_tokens


def ask_responses(port, *content, **arguments):
    parts = [{"type": "input_text", "text": one} if isinstance(one, str) else
             {"type": "input_image", "image_url": url_of(one), **arguments} for one in content]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        items = [{"role": "user", "content": parts}]
        n_counted = client.responses.input_tokens.count(model="m", input=items).input_tokens
        assert client.responses.create(model="m", input=items).usage.input_tokens == n_counted
        return n_counted


def ask_anthropic(port, *content):
    parts = [{"type": "text", "text": one} if isinstance(one, str) else
             {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text_of(one)}}
             for one in content]
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": parts}]
        n_counted = client.messages.count_tokens(model="m", messages=messages).input_tokens
        usage = client.messages.create(model="m", max_tokens=9, messages=messages).usage
        assert usage.input_tokens + usage.cache_read_input_tokens == n_counted
        return n_counted


def ask_ollama(port, *content):
    """Ollama's images stand before the text."""
    message = {"role": "user", "content": "".join(one for one in content if isinstance(one, str)),
               "images": [one for one in content if not isinstance(one, str)]}
    return ollama.Client(f"http://127.0.0.1:{port}").chat("m", [message]).prompt_eval_count


def ask_ollama_generate(port, *content):
    answer = ollama.Client(f"http://127.0.0.1:{port}").generate(
        "m", "".join(one for one in content if isinstance(one, str)),
        images=[one for one in content if not isinstance(one, str)])
    assert answer.context is None           # the ids of pictures say nothing without them
    return answer.prompt_eval_count


ASK = {"openai": ask_openai, "responses": ask_responses, "anthropic": ask_anthropic, "ollama": ask_ollama,
       "ollama generate": ask_ollama_generate}


def prompt_of(engine, request) -> str:
    """The prompt, with one pad for each picture. Every picture has as many pads in the prompt as it has tokens."""
    left, text = iter(request.pictures), engine.tokenizer.decode(request.prompt_ids, special=True)
    pieces = text.split("<|vision_start|>")
    for i, piece in enumerate(pieces[1:], start=1):
        pads, end, rest = piece.partition("<|vision_end|>")
        assert pads == PAD * next(left).n_tokens and end
        pieces[i] = PAD + end + rest
    assert not list(left)
    return "<|vision_start|>".join(pieces)


@pytest.mark.parametrize("protocol", ASK)
@pytest.mark.parametrize("content", [(A, "What is it?"), (B, A, "Which is larger?"), (B,), (A, A, A, "Once?")], ids=len)
def test_official_clients_send_pictures(protocol, content, server, engine):
    """Each client says that the prompt has as many tokens as the engine was given, and the engine gets the pixels."""
    n_tokens = ASK[protocol](server[1], *content)
    request, files = engine.requests[-1], [one for one in content if not isinstance(one, str)]
    assert n_tokens == len(request.prompt_ids) > sum({A: 64, B: 70}[file] for file in files)
    assert [picture.digest for picture in request.pictures] == [
        engine.eyes.of_image(Image.open(io.BytesIO(file))).digest for file in files]
    shown = "".join(one if isinstance(one, str) else SHOWN for one in content)
    assert f"<|im_start|>user\n{shown}<|im_end|>" in prompt_of(engine, request)


@pytest.mark.parametrize("protocol", ["openai", "responses", "anthropic"])
def test_pictures_stand_among_texts(protocol, server, engine):
    ASK[protocol](server[1], "First ", B, "then ", A, "and that is all.")
    assert f"First {SHOWN}then {SHOWN}and that is all." in prompt_of(engine, engine.requests[-1])


@pytest.mark.parametrize("protocol", ["openai", "responses"])
@pytest.mark.parametrize("detail, n_tokens", [("low", 54), ("high", 70), ("auto", 70)])
def test_detail(protocol, detail, n_tokens, server, engine):
    """Low: at most as many tokens as the smallest picture has, 64. The others: as many as the limits allow."""
    ASK[protocol](server[1], B, "What?", detail=detail)
    [picture] = engine.requests[-1].pictures
    assert picture.n_tokens == n_tokens


def test_letters_that_look_like_a_picture_stay_text(server, engine):
    ask_openai(server[1], f"{SHOWN}{PAD} is", A, PAD)
    request = engine.requests[-1]
    assert request.prompt_ids.count(engine.eyes.pad) == request.pictures[0].n_tokens == 64
    assert f"{SHOWN}{PAD} is{SHOWN}{PAD}" in engine.tokenizer.decode(request.prompt_ids, special=True).replace(
        PAD * 64, PAD)


def test_results_of_tools_show_pictures(server, engine):
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text_of(A)}}
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    bodies = {
        "/v1/messages": {"max_tokens": 9, "messages": [
            {"role": "user", "content": "Look"}, {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": [
                image, {"type": "text", "text": "blurred"}]}]}]},
        "/v1/responses": {"input": [{"role": "user", "content": "Look"}, call, {
            "type": "function_call_output", "call_id": "1", "output": [
                {"type": "input_text", "text": "Error: "}, {"type": "input_image", "image_url": url_of(A)},
                {"type": "input_text", "text": "blurred"}]}]}}
    for path, sent in bodies.items():
        assert send(server[1], "POST", path, sent)[0] == 200
        assert f"<tool_response>\nError: {SHOWN}blurred\n</tool_response>" in prompt_of(engine, engine.requests[-1])


def test_tokens_are_counted_with_pictures(server, engine):
    """llama.cpp's and vLLM's endpoints, too. The rendered prompt shows one token for a picture."""
    sent = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url_of(B)}}]}]}
    _, _, counted = send(server[1], "POST", "/tokenize", sent | {"add_special_tokens": False})
    assert send(server[1], "POST", CHAT, sent)[0] == 200
    assert counted["tokens"] == engine.requests[-1].prompt_ids and counted["count"] == len(counted["tokens"])
    _, _, rendered = send(server[1], "POST", "/apply-template", sent)
    assert rendered["prompt"].count(PAD) == 1
    status, _, said = send(server[1], "POST", "/tokenize", sent | {"parse_special": False})
    assert status == 400 and said["error"]["param"] == "parse_special"


def test_the_server_says_whether_the_model_sees(server):
    with serving(app_of(ScriptedEngine())) as (blind, _):
        for port, sees in ((server[1], True), (blind, False)):
            assert send(port, "GET", "/props")[2]["modalities"] == {"vision": sees, "audio": False}
            assert send(port, "GET", "/v1/models")[2]["data"][0]["modalities"]["vision"] is sees
            assert ("vision" in ollama.Client(f"http://127.0.0.1:{port}").show("m").capabilities) is sees
            told = send(port, "GET", "/health")[2].get("sees")
            assert told == ({"pixels": 4096 * 32 * 32, "pictures": 64} if sees else None)


# ---- what is refused ---------------------------------------------------------------------------------------


def image_url(url, **others):
    parts = [{"type": "image_url", "image_url": {"url": url, **others}}]
    return CHAT, {"messages": [{"role": "user", "content": parts}]}


def input_image(**part):
    return "/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", **part}]}]}


def source(role="user", **given):
    blocks = [{"type": "image", "source": given}]
    return "/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}] * (role != "user") + [
        {"role": role, "content": blocks}]}


def images(text, role="user"):
    return "/api/chat", {"model": "m", "messages": [{"role": role, "content": "Hi", "images": [text]}]}


def generate(text, **others):
    return "/api/generate", {"model": "m", "prompt": "Hi", "images": [text], **others}


def message_of(said: dict) -> str:
    """The sentence of an error, in whatever protocol's shape."""
    return said["error"] if isinstance(said["error"], str) else said["error"]["message"]


ADDRESS = "https://pictures.example/cat.png"


@pytest.mark.parametrize("path, sent, says", [
    (*image_url(ADDRESS), "'messages[0].content[0].image_url.url' is an address of the web"),
    (*image_url("ftp://pictures.example/cat.png"), "must be a data: URL"),
    (*image_url("cat.png"), "must be a data: URL"), (*image_url(url_of(A), detail="tiny"), "image_url.detail"),
    (*image_url("data:image/png,abc"), "without base64"), (*image_url("data:image/png;base64;abc"), "without base64"),
    (*image_url("data:;base64,"), "is not base64: it is empty"), (*image_url("data:;base64,A"), "is not base64"),
    (*image_url("data:;base64,AAAA!AAA"), "is not base64"), (*image_url("data:;base64,AA=A"), "is not base64"),
    (*image_url("data:image/png;base64,AAAA"), "messages[0].content[0].image_url.url"),
    (*image_url(url_of(A[:999])), "messages[0].content[0].image_url.url"),
    (*input_image(image_url=ADDRESS), "'input[0].content[0].image_url' is an address of the web"),
    (*input_image(file_id="file_1"), "'input[0].content[0].file_id' is not supported: no files are kept here"),
    (*input_image(), "'input[0].content[0].image_url' is missing"),
    (*input_image(image_url=url_of(A), detail="tiny"), "input[0].content[0].detail"),
    ("/v1/responses", {"input": [{"role": "developer", "content": [{"type": "input_image", "image_url": url_of(A)}]}]},
     "only messages of the user and outputs of functions"),
    (*source(type="file", file_id="file_1"), "no files are kept here"),
    (*source(type="base64", data="AAAAA"), "'messages[0].content[0].source.data' is not base64"),
    (*source(type="url", url=ADDRESS), "'messages[0].content[0].source.url' is an address of the web"),
    (*source("assistant", type="base64", data=text_of(A)), "only messages of the user and results of tools"),
    (*images("AAAA!"), "'messages[0].images[0]' is not base64"), (*images(text_of(A), "system"), "messages[0].images"),
    (*generate("?"), "'images[0]' is not base64"), (*generate(text_of(A), raw=True), "'images' need")])
def test_what_is_refused(path, sent, says, server, engine):
    status, _, said = send(server[1], "POST", path, sent)
    assert status == 400 and says in message_of(said) and "\n" not in message_of(said)
    assert not engine.requests


@pytest.mark.parametrize("path, sent", [image_url(url_of(A)), input_image(image_url=url_of(A)), images(text_of(A)),
                                        source(type="base64", data=text_of(A)), generate(text_of(A))])
def test_a_model_without_eyes_says_so(path, sent):
    engine = ScriptedEngine("Hi.")
    answer = app_of(engine).test_client().post(path, json=sent)
    assert answer.status_code == 400 and not engine.requests
    assert message_of(answer.json) == BLIND


@pytest.mark.parametrize("template, n_shown", [
    ("{% for m in messages %}{{ m.content }}{% endfor %}", 0),
    ("{% for m in messages %}{% for p in m.content %}{{ '<|image_pad|>' * 2 }}{% endfor %}{% endfor %}", 2)])
def test_a_template_that_does_not_show_what_was_sent(template, n_shown):
    """A picture must not be dropped in silence, and its tokens must not come twice."""
    engine = ScriptedEngine("Hi.", ChatTemplate(template, [PAD]), sees=True)
    path, sent = image_url(url_of(A))
    answer = app_of(engine).test_client().post(path, json=sent)
    assert answer.status_code == 400 and not engine.requests
    assert message_of(answer.json) == (f"the model's chat template does not show the pictures: the prompt has places "
                                       f"for {n_shown}, and 1 were sent")


def test_limits_of_a_request(server, engine):
    status, _, said = send(server[1], "POST", CHAT, {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url_of(A)}}] * (Limits().most_pictures + 1)}]})
    assert status == 400 and "may have 64 pictures" in message_of(said) and not engine.requests


def test_a_picture_longer_than_the_context(server, engine):
    path, sent = image_url("data:image/png;base64," + base64.b64encode(
        file_of(Image.new("RGB", (2048, 2048)), "PNG")).decode())
    status, _, said = send(server[1], "POST", path, sent)
    assert status == 400 and said["error"]["code"] == "context_length_exceeded" and not engine.requests
    assert said["error"]["param"] == "messages" and said["error"]["n_prompt_tokens"] > 4096 == said["error"]["n_ctx"]


# ---- how long, and how many at a time ----------------------------------------------------------------------


LARGE = file_of(Image.new("RGB", (7000, 7000)), "PNG")         # takes a second to read


def many_large(n: int) -> dict:
    """A conversation with pictures that take a second each, and few tokens. A PNG file may have something behind it."""
    return {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {
        "url": url_of(LARGE + bytes([i])), "detail": "low"}} for i in range(n)]}]}


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_client_that_hangs_up_while_its_pictures_are_read(path):
    engine, sent = ScriptedEngine("Seen.", sees=True), many_large(30)
    sent = sent if path == CHAT else {"messages": sent["messages"]}
    with serving(app_of(engine)) as (port, service), contextlib.closing(engine.eyes) as eyes:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request("POST", path, json.dumps(sent), {"Content-Type": "application/json"})
        wait_until(lambda: any(eyes._n_calls.values()))
        connection.close()
        wait_until(lambda: not service.n_entering and not any(eyes._n_calls.values()))
        assert not engine.requests
        wait_until(lambda: not service.pictures.held)


@pytest.mark.parametrize("most, fields, says", [
    (0.5, {}, "reading the pictures takes longer than the 0.5 s that the server allows"),
    (0.5, {"timeout": 60}, "reading the pictures takes longer than the 0.5 s that the server allows"),
    (60, {"timeout": 0.5}, "not finished after the 0.5 s that the request allows")])
def test_whose_limit_of_time_it_is(most, fields, says, server, engine, monkeypatch):
    """In the middle of a picture, and before the next one."""
    monkeypatch.setattr(pictures, "READING", most)
    for lock in [room._lock for room in engine.eyes._rooms], []:       # others are being read; or several are too many
        with contextlib.ExitStack() as stack:
            for each in lock:
                stack.enter_context(each)
            status, _, said = send(server[1], "POST", CHAT, many_large(30) | fields)
        assert status == 504 and message_of(said) == says and not engine.requests


def test_pixels_of_waiting_requests_are_bounded(monkeypatch):
    """Twelve clients each send a picture and wait for answers, and the pixels of at most three pictures may wait. The
    other clients are told so. A client that shows the same picture as another one adds nothing."""
    monkeypatch.setattr(pictures, "MAX_HELD", 3 * Picture.of(scene(256, 256)).pixels.nbytes)
    go_on, answers = threading.Event(), []
    engine = ScriptedEngine(lambda prompt: "Seen." if go_on.wait(PATIENCE) else "", sees=True)
    with serving(app_of(engine, max_requests=40)) as (port, service), contextlib.closing(engine.eyes):
        def ask(file):
            body = image_url(url_of(file))[1] | {"max_tokens": 9, "n": 2}
            answers.append(send(port, "POST", CHAT, body))

        def start(file):
            threads.append(threading.Thread(target=ask, args=(file,)))
            threads[-1].start()

        threads = []
        for seed in range(12):
            start(file_of(scene(256, 256, seed=seed), "PNG"))
        wait_until(lambda: len(answers) == 9 and len(engine.requests) == 3)
        for status, headers, said in answers:
            assert status == 429 and headers["Retry-After"] == "1"
            assert message_of(said).startswith("too many pictures: those of all requests may have 0 MiB of pixels")
        assert len(set().union(*service.pictures.held.values())) == 3
        held, = engine.requests[0].pictures
        start(file_of(held.pixels, "PNG"))
        start(file_of(scene(256, 256, seed=50), "PNG"))
        wait_until(lambda: len(answers) == 10 and len(engine.requests) == 4)
        go_on.set()
        for thread in threads:
            thread.join()
        assert sorted(status for status, _, _ in answers) == [200] * 4 + [429] * 10
        wait_until(lambda: not service.pictures.held)
        ask(file_of(scene(256, 256, seed=51), "PNG"))
        assert answers[-1][0] == 200


def test_a_picture_that_was_forgotten_and_read_anew_counts_once(monkeypatch):
    monkeypatch.setattr(pictures, "MAX_KEPT", 0)
    monkeypatch.setattr(pictures, "MAX_HELD", Picture.of(scene(256, 256)).pixels.nbytes)
    reading = Pictures()
    with contextlib.closing(Reader()) as eyes:
        shown = [reading.read(eyes, [Sent(text_of(A), "messages")], holder=i)[0] for i in range(3)]
    assert shown[0] is shown[1] is shown[2]


def test_honest_users_do_not_notice_that_bound():
    """All places of the queue taken by pictures of the default's largest size, and one request of the largest there
    is."""
    largest = Limits()
    assert service.MAX_WAITING * largest.max_tokens * BLOCK**2 * 3 <= pictures.MAX_HELD
    assert LARGEST * BLOCK**2 * 3 <= pictures.MAX_HELD and largest.most_tokens == LARGEST


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, others, status", [
    (CHAT, {"max_tokens": 9}, 200), ("/tokenize", {}, 200),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "?"}}}}, 400)])
def test_pixels_are_let_go_however_a_request_ends(path, others, status, stream, server, engine, monkeypatch):
    kept, counts = server[2].pictures, []
    monkeypatch.setattr(kept, "hold", lambda *given: (Pictures.hold(kept, *given), counts.append(len(kept.held)))[0])
    sent = image_url(url_of(A))[1] | others | ({"stream": True} if stream and path == CHAT else {})
    connection = http.client.HTTPConnection("127.0.0.1", server[1], timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(sent), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == status and answer.read()
    wait_until(lambda: not kept.held)
    assert counts == [1]


# ---- turns of a conversation -------------------------------------------------------------------------------


class CountingEyes:
    """Eyes that count what they read. The picture of a file is the file's length."""

    limits, n = Limits(), 0

    def read(self, data, field, max_tokens=None, patience=None):
        self.n += 1
        return Measured(len(data))


class Measured:
    n_tokens = 1
    digest = property(id)           # each is another picture

    def __init__(self, n_bytes):
        self.pixels = self
        self.nbytes = n_bytes


def sent(text: str, detail="auto") -> Sent:
    return Sent(base64.b64encode(text.encode()).decode(), "images", detail=detail)


def test_a_picture_of_an_earlier_turn_is_not_read_again():
    kept, eyes = Pictures(), CountingEyes()
    first = kept.read(eyes, [sent("a"), sent("b")])
    again = kept.read(eyes, [sent("a"), sent("b"), sent("c"), sent("a")])
    assert eyes.n == 3 and again == [*first, again[2], first[0]]
    assert kept.read(eyes, [sent("a", "low")]) != [first[0]] and eyes.n == 4


def test_pictures_are_kept_within_bounds(monkeypatch):
    monkeypatch.setattr(pictures, "MAX_KEPT", 10)
    kept, eyes = Pictures(), CountingEyes()
    kept.read(eyes, [sent("aaaa"), sent("bbbb"), sent("aaaa"), sent("cccc")])       # b makes room
    assert kept.n_bytes == 8 and eyes.n == 3
    kept.read(eyes, [sent("aaaa"), sent("cccc"), sent("bbbb")])
    assert eyes.n == 4
    kept.read(eyes, [sent("d" * 11)])
    assert kept.n_bytes == 0 and not kept.kept


# ---- megabytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_bytes", [1, 2, 3, SLICE - 1, SLICE, SLICE * 3 // 4, 3 * SLICE + 1])
def test_base64_in_slices(n_bytes):
    data = random.Random(n_bytes).randbytes(n_bytes)
    text = base64.b64encode(data).decode()
    assert decoded(text, "images") == decoded(base64.encodebytes(data).decode(), "images") == data
    twice = text + text if n_bytes % 3 else text[:-2]           # with padding in the middle, or cut
    for bad in (text[:-1], text + "=", twice, text[:SLICE - 1] + "*" + text[SLICE:]):
        with pytest.raises(RequestError, match="'images' is not base64"):
            decoded(bad, "images")


@pytest.mark.parametrize("slash", ["/", "\\/"])
def test_megabytes_of_base64_keep_no_thread_waiting(slash):
    """60 MiB, nearly the most that a request may have. The shortest of five waits counts, see test_body.py, by the
    work that was done meanwhile: a machine that is busy stretches such a wait too far."""
    data = random.Random(3).randbytes(45 << 20)
    written = json.dumps({"images": [base64.b64encode(data).decode()]}).replace("/", slash).encode()
    assert len(written) < MAX_SEEING
    for _ in range(5):
        with LongestWait() as wait:
            text = body.parse_body(written)["images"][0]
            assert decoded(text, "images") == data
        if wait.work < SECONDS:
            break
    assert wait.work < SECONDS


def test_bodies_may_be_large_where_the_model_sees(server, engine):
    path, sent = image_url(url_of(A))
    whole = json.dumps(sent).encode()
    for n_bytes, status in ((MAX_SEEING, 200), (MAX_SEEING + 1, 413)):
        assert send(server[1], "POST", path, whole + b" " * (n_bytes - len(whole)))[0] == status
    told = send(server[1], "POST", "/v1/completions", b'{"prompt": "Hi"}' + b" " * MAX_BODY)
    assert told[0] == 413 and told[2]["error"]["message"] == f"the request body is larger than {MAX_BODY} bytes"
    with serving(app_of(ScriptedEngine())) as (blind, _):
        assert send(blind, "POST", path, whole + b" " * MAX_BODY)[0] == 413
    assert {endpoint.path for endpoint in ENDPOINTS if endpoint.may_show} == PATHS


def test_large_bodies_have_bounded_memory(monkeypatch):
    """Small ones are answered all the same. What a large one has held is given back."""
    monkeypatch.setattr(service, "MAX_LARGE", 2 * MAX_BODY)
    app = app_of(ScriptedEngine("Seen.", sees=True))
    path, sent = image_url(url_of(A))
    large, small = json.dumps(sent).encode() + b" " * MAX_BODY, json.dumps(sent).encode()
    with app.extensions["qengine"].memory_for(MAX_BODY + 1):
        refused = app.test_client().post(path, data=large, content_type="application/json")
        assert refused.status_code == 429 and "large requests" in message_of(refused.json)
        assert refused.headers["Retry-After"] == "1"
        assert app.test_client().post(path, data=small, content_type="application/json").status_code == 200
    assert app.test_client().post(path, data=large, content_type="application/json").status_code == 200
    assert app.extensions["qengine"].n_large == 0


def test_backslashes_are_counted():
    at_most = b'{"a":"' + b"\\n" * body.MAX_ESCAPES + b'"}'
    assert len(body.parse_body(at_most)["a"]) == body.MAX_ESCAPES
    with pytest.raises(RequestError, match="backslashes"):
        body.parse_body(at_most[:-2] + b'\\n"}')


# ---- an engine that sees -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(card):
    """(engine, its tower, port, the case of the reference): the reference's model, which knows the rows of a picture"""
    case, rgb = Golden("aligned"), oracle_npz("dense_mtp-vision")["aligned_rgb"]
    case.picture, case.file = Picture.of(rgb), file_of(rgb, "PNG")
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine, tower = load_seeing(card, [case], monkeypatch)
        with serving(app_of(engine)) as (port, _):
            yield engine, tower, port, case
        engine.close()


def test_the_reference_by_the_protocol(seeing):
    """The official client's picture and question become the token ids of the reference, and so its answer. The next
    turn goes on behind the picture, which is encoded once."""
    engine, tower, port, case = seeing
    text = engine.tokenizer.decode(case.ids, special=True).partition("<|vision_end|>")[2].partition("<|im_end|>")[0]
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url_of(case.file)}},
                                             {"type": "text", "text": text}]}]
    wishes = {"model": "m", "temperature": 0, "max_tokens": 16, "extra_body": {
        "ignore_eos": True, "return_token_ids": True}}
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(messages=messages, **wishes)
        assert answer.usage.prompt_tokens == len(case.ids)
        assert answer.choices[0].token_ids == tokens_of(engine, case.ids, [case.picture], 16)
        messages += [{"role": "assistant", "content": "Stripes."}, {"role": "user", "content": "And below?"}]
        later = client.chat.completions.create(messages=messages, **wishes)
    assert later.usage.prompt_tokens_details.cached_tokens >= PAGE_TOKENS and len(tower.encoded) == 1


@pytest.mark.parametrize("protocol", ASK)
def test_every_protocol_asks_an_engine_that_sees(protocol, seeing):
    _, tower, port, case = seeing
    assert ASK[protocol](port, case.file, "What is it?") > case.picture.n_tokens
    assert len(tower.encoded) == 1
