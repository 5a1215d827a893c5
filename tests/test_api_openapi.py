"""The OpenAPI document: it describes what is served, and requests made up from it never break the server."""

import functools

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
from tests.clients import app_of
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
