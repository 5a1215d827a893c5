"""The model, the server's settings and its slots, as clients of OpenAI and of llama.cpp ask for them."""

import openai
import pytest

from tests.clients import CHAT, HI, TEXT, app_of, official_client, serving
from tests.paced import PacedEngine
from tests.scripted import ScriptedEngine
from tests.until import PATIENCE, wait_until

SECRET = "the launch code is 0000"


@pytest.fixture
def engine():
    engine = ScriptedEngine("Hello.")
    engine.name = "org/small:q8"
    return engine


def test_one_model_by_its_name(engine):
    """A name may hold slashes. Only here is an unknown name an error; requests for answers take any name."""
    with serving(app_of(engine)) as (port, _):
        client = official_client(port)
        assert client.models.retrieve("org/small:q8").id == "org/small:q8" == client.models.list().data[0].id
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("gpt-5")
        assert caught.value.code == "model_not_found" and "gpt-5" in caught.value.body["message"]
        assert client.chat.completions.create(model="gpt-5", messages=[HI]).model == "org/small:q8"


def test_what_clients_of_llama_cpp_ask(engine):
    web = app_of(engine, sampling={"temperature": 0.5, "max_tokens": 7}).test_client()
    assert web.get("/models").json == web.get("/v1/models").json
    assert web.get("/models").json["data"][0]["meta"]["n_ctx"] == engine.n_ctx
    props = web.get("/props").json
    assert (props["total_slots"], props["chat_template"]) == (2, engine.template.source)
    assert props["default_generation_settings"]["n_ctx"] == engine.n_ctx
    params = props["default_generation_settings"]["params"]
    assert (params["temperature"], params["n_predict"], params["repeat_penalty"], params["seed"]) == (0.5, 7, 1, -1)
    assert props["modalities"] == {"vision": False, "audio": False} and props["eos_token"].startswith("<|")
    fingerprint = web.post(CHAT, json={"messages": [HI]}).json["system_fingerprint"]
    assert fingerprint == web.post(TEXT, json={"prompt": "a"}).json["system_fingerprint"] == props["build_info"]


@pytest.mark.parametrize("log_prompts", [False, True])
def test_slots(log_prompts):
    """Each shows how far its request is; what the request says is shown only with --log-prompts."""
    engine = PacedEngine("a b c d e f g h", pace=PATIENCE)
    app = app_of(engine, log_prompts=log_prompts)
    web = app.test_client()
    assert [slot["is_processing"] for slot in web.get("/slots").json] == [False, False]
    with serving(app) as (port, service):
        client = official_client(port)
        streams = [client.completions.create(model="m", prompt=SECRET, max_tokens=9, stop=[SECRET], stream=True,
                                             logit_bias={"5": -1}, temperature=0.25) for _ in range(2)]
        wait_until(lambda: len(service.open) == 2)
        answer = web.get("/slots?fail_on_no_slot=1")
        assert answer.status_code == 503
        answer = web.get("/slots")
        assert (SECRET in answer.text) == log_prompts
        for i, slot in enumerate(answer.json):
            assert (slot["id"], slot["is_processing"], slot["params"]["temperature"]) == (i, True, 0.25)
            assert slot["next_token"]["n_remain"] + slot["next_token"]["n_decoded"] == 9
        for stream in streams:
            stream.close()
        wait_until(lambda: not service.open)
    assert [slot["is_processing"] for slot in web.get("/slots").json] == [False, False]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/x", "/models", "/props", "/slots"])
def test_a_key_is_needed(engine, path):
    answer = app_of(engine, keys=["k"]).test_client().get(path)
    assert (answer.status_code, answer.json["error"]["code"]) == (401, "invalid_api_key")
