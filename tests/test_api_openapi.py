"""The OpenAPI document: it describes what is served, and requests made up from it never break the server."""

import functools
import json

import hypothesis
import jsonschema
import pytest
import schemathesis
from schemathesis.checks import positive_data_acceptance
from schemathesis.specs.openapi.checks import allow_header_conformance

from api.endpoint import Endpoint
from api.fields import SECONDS, check
from api.openai import PROTOCOL
from api.openapi import ENDPOINTS, document, operation, published
from engine.request import RequestError
from tests.clients import HI, app_of
from tests.scripted import ScriptedEngine, ScriptedPooling
from tests.until import PATIENCE


@functools.cache
def app():
    return app_of(ScriptedEngine("Hello."), [ScriptedPooling(), ScriptedPooling("reranking")])


schema = schemathesis.openapi.from_wsgi("/openapi.json", app())


# The same requests every time, and no search for the shortest one that fails: that takes minutes.
settings = functools.partial(
    hypothesis.settings, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])


@schema.parametrize()
@settings(max_examples=8, deadline=1000 * PATIENCE)
def test_requests_made_up_from_the_document(case):
    """No error of the server's; what the document forbids is refused. What it allows may be refused, too: no document
    says what a template takes, or a grammar. A path like /v1/responses/input_tokens is also one of
    /v1/responses/{response_id}, and Flask counts the methods of both."""
    timeout = case.body.get("timeout") if isinstance(case.body, dict) else None
    if isinstance(timeout, int | float) and SECONDS["minimum"] <= timeout < 60:
        case.body["timeout"] = 60       # a millisecond is too short for a template, rightly answered 504
    case.call_and_validate(excluded_checks=[positive_data_acceptance, allow_header_conformance])


def test_every_endpoint_is_described():
    served = {(rule.rule, method) for rule in app().url_map.iter_rules()
              for method in rule.methods - {"HEAD", "OPTIONS"}}
    paths, rules = document(None)["paths"], {endpoint.path: endpoint.rule for endpoint in ENDPOINTS}
    assert {(rules[path], method.upper()) for path, methods in paths.items() for method in methods} == served
    for endpoint in ENDPOINTS:
        if endpoint.body is not None:
            jsonschema.Draft202012Validator.check_schema(published(endpoint.body))


class SparseEngine(ScriptedEngine):
    """Reads a quarter of the keys of a prompt that is to be sparse."""

    def begin(self, request):
        generation = super().begin(request)
        generation.keys_read, generation.keys_seen = (30, 120) if request.sparse else (0, 0)
        return generation


def properties(description, *names):
    """The properties of a body, or of an object in it, that are not refused."""
    found = {name: one for name, one in description.get("properties", {}).items() if "x-refused" not in one}
    return properties(found.get(names[0], {}), *names[1:]) if names else found


def shares(said):
    """What anything said says in a field `keys_read`, or in one whose name ends so."""
    if isinstance(said, list | dict):
        for name, value in said.items() if isinstance(said, dict) else enumerate(said):
            yield from [value] if str(name).endswith("keys_read") else shares(value)


SPARSE = {one.path: one.body for one in ENDPOINTS if one.generates and "sparse" in {
    *properties(one.body), *properties(one.body, "options")}}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", SPARSE)
def test_what_takes_sparse_prompts_tells_how_much_of_the_keys_was_read(path, is_stream):
    """In whatever protocol, and of other prompts nothing."""
    assert len(SPARSE) >= 6
    web, takes = app_of(SparseEngine("Hello.")).test_client(), properties(SPARSE[path])
    texts = {"messages": [HI], "input": "hi", "prompt": "hi"}
    body = dict([next((name, text) for name, text in texts.items() if name in takes)], model="m", stream=is_stream)
    body |= {"max_tokens": 9} if "max_tokens" in takes else {}
    if is_stream and "include_usage" in properties(SPARSE[path], "stream_options"):
        body["stream_options"] = {"include_usage": True}
    for sparse, told in (True, {0.25}), (False, set()):
        more = {"sparse": sparse} if "sparse" in takes else {"options": {"sparse": sparse}}
        answer = web.post(path, json=body | more)
        lines = [line[line.find("{"):] for line in answer.text.splitlines() if "{" in line]
        assert answer.status_code == 200 and {share for line in lines for share in shares(json.loads(line))} == told


@pytest.mark.parametrize("endpoint", [one for one in ENDPOINTS if one.body], ids=lambda endpoint: endpoint.path)
def test_what_the_document_allows_passes_the_check(endpoint):
    """Except that we want whole numbers written as such, 5 and not 5.0."""
    @settings(max_examples=20, deadline=None)
    @hypothesis.given(schema[endpoint.path]["POST"].as_strategy())
    def passes(case):
        check(whole(case.body), endpoint.body)

    passes()


def whole(value):
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return list(map(whole, value))
    return {name: whole(one) for name, one in value.items()} if isinstance(value, dict) else value


def test_parts_of_a_path():
    """What stands in the path and behind its question mark reaches the view, checked, and is described."""
    limit = {"type": "integer", "minimum": 1, "maximum": 9}
    endpoint = Endpoint("GET", "/pets/{name}/toys", "Toys", lambda service, name, limit=3: {"name": name, "n": limit},
                        PROTOCOL, query={"limit": limit})
    assert endpoint.rule == "/pets/<name>/toys"
    assert operation(endpoint)["parameters"] == [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}},
        {"name": "limit", "in": "query", "schema": limit}]
    with app().test_request_context("/pets/a/toys?limit=9&other=1"):
        assert endpoint.answer(None, name="a") == {"name": "a", "n": 9}
    with app().test_request_context("/pets/a/toys"):
        assert endpoint.answer(None, name="a") == {"name": "a", "n": 3}
    for wrong in "0", "10", "five", "1.5", "9" * 30:
        with app().test_request_context(f"/pets/a/toys?limit={wrong}"), pytest.raises(RequestError, match="1 to 9"):
            endpoint.answer(None, name="a")
