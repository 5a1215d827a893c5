"""The models that are served, and the server's settings and slots, as OpenAI's and llama.cpp's clients ask for them."""

from werkzeug.exceptions import ServiceUnavailable

from engine.limits import SAMPLING
from engine.request import Answer, Request
from engine.served import Facts, Served

from .endpoint import Endpoint
from .errors import NotFound
from .fields import TEXT, one_of
from .openai import BUILD, PROTOCOL

# llama.cpp's names for numbers of SAMPLING, beside our own.
THEIR_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty"}


OF_MODEL = {"model": TEXT}      # in a query string: which of several models is meant


def models(service):
    return {"object": "list", "data": [described(service, one) for one in service.ready().served]}


def model(service, id: str):
    """Only here does an unknown name matter: every other request is answered by a model of the kind that it needs."""
    found = [one for one in service.ready().served if one.is_named(id)]
    if not found:
        raise NotFound("model", f"the model {id[:80]!r} is not here; /v1/models says what is", "model_not_found")
    return described(service, found[0])


def described(service, served: Served) -> dict:
    facts = served.facts
    return {"id": facts.name, "object": "model", "created": service.started, "owned_by": "qengine",
            "aliases": list(served.aliases), "kind": facts.kind, "abilities": abilities(facts),
            "modalities": modalities(facts), "status": {"value": served.state},     # llama.cpp's router's word
            "max_model_len": facts.n_ctx,                                           # vLLM's name
            "meta": {"n_ctx": facts.n_ctx, "n_vocab": facts.tokenizer.n_vocab}}     # llama.cpp's


def abilities(facts: Facts) -> list[str]:
    """What a model can be asked for."""
    can = {"chat": facts.kind == "text" and facts.template is not None, "completion": facts.kind == "text",
           "pictures": facts.sees, "embeddings": facts.kind == "embedding", "reranking": facts.kind == "reranking"}
    return [name for name in can if can[name]]


def modalities(facts: Facts) -> dict:
    """What a model takes beside text, as llama.cpp has it."""
    return {"vision": facts.sees, "audio": False}


def props(service):
    """What a client that speaks llama.cpp's dialect asks before it talks. model_path is a name without directories."""
    engine = service.engine
    tokenizer, template = engine.tokenizer, engine.template
    return {"default_generation_settings": slot(service, 0), "total_slots": n_slots(engine),
            "model_alias": engine.name, "model_path": engine.name,
            "chat_template": template.source if template else "", "modalities": modalities(service.served.facts),
            "eos_token": tokenizer.decode([min(tokenizer.eos_ids)], special=True),
            "build_info": BUILD, "is_sleeping": False}


def slots(service, fail_on_no_slot: str = "0"):
    """What runs, one request in each slot, the oldest first; slots of the engine have no other order. Texts of requests
    are shown only with --log-prompts: everybody who may ask sees all slots."""
    engine = service.engine
    n = n_slots(engine)
    with service.changed:
        running = [generation for generation, _, exchange in service.open.values()
                   if exchange.engine is engine and is_open(generation)][:n]
    if len(running) == n and fail_on_no_slot == "1":
        raise ServiceUnavailable("no slot is free", retry_after=1)
    return [slot(service, i, *running[i:i + 1]) for i in range(n)]


def n_slots(engine) -> int:
    """How many answers are generated at the same time."""
    return engine.n_slots if engine.kind == "text" else 0


def is_open(generation) -> bool:
    """Whether more tokens may come."""
    is_text = isinstance(generation, Answer)
    return is_text and generation.finish_reason is None and generation.error is None and not generation.cancelled


def slot(service, index: int, generation=None) -> dict:
    """A slot, busy with this generation or idle. It shows the numbers that control sampling, and no texts."""
    request = generation.request if generation else Request([], **service.sampling)
    params = {name: getattr(request, name) for name in SAMPLING}
    params |= {theirs: params[ours] for ours, theirs in THEIR_NAMES.items()}
    params |= {name: -1 for name in ("max_tokens", "n_predict", "seed") if params[name] is None}    # without a limit
    said = {"id": index, "id_task": -1 if generation is None else index,
            "n_ctx": service.engine.n_ctx, "speculative": False, "is_processing": generation is not None,
            "params": params | {"ignore_eos": request.ignore_eos, "n_keep": 0, "samplers": []}}
    if generation is None:
        return said
    n_decoded, limit = generation.n_generated, request.max_tokens
    left = -1 if limit is None else limit - n_decoded
    said |= {"n_prompt_tokens": generation.n_prompt, "n_prompt_tokens_cache": generation.n_cached,
             "next_token": {"has_next_token": True, "n_remain": left, "n_decoded": n_decoded}}
    if text_of := service.log.text_of:
        said["prompt"] = text_of(request.prompt_ids, service.engine)
    return said


ENDPOINTS = [Endpoint("GET", "/v1/models", "The models that are served", models, PROTOCOL),
             Endpoint("GET", "/v1/models/{id}", "The model of this name", model, PROTOCOL),
             Endpoint("GET", "/models", "The models that are served (llama.cpp)", models, PROTOCOL),
             Endpoint("GET", "/props", "The server's settings (llama.cpp)", props, PROTOCOL, query=OF_MODEL,
                      asks="loaded"),
             Endpoint("GET", "/slots", "What runs (llama.cpp)", slots, PROTOCOL,
                      query={"fail_on_no_slot": one_of("0", "1")} | OF_MODEL, asks="loaded")]
