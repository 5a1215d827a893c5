"""The OpenAPI document of the server, made of what checks its requests."""

from . import anthropic, completions, embeddings, metrics, models, ollama, openai, page, plain, rerank, responses
from .endpoint import Endpoint, WireProtocol


def document(service):
    """The whole document."""
    paths = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation(endpoint)
    return {"openapi": "3.1.0", "info": {"title": "qengine", "version": "1"}, "paths": paths}


def operation(endpoint: Endpoint) -> dict:
    """What the document says of one endpoint."""
    said = {"summary": endpoint.summary, "responses": {
        "200": {"description": "The answer"}, "default": {"description": "An error, in the shape of the protocol"}}}
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                  for name in endpoint.path_names]
    parameters += [{"name": name, "in": "query", "schema": one} for name, one in endpoint.query.items()]
    if parameters:
        said["parameters"] = parameters
    if endpoint.body is not None:
        content = {"application/json": {"schema": published(endpoint.body)}}
        said["requestBody"] = {"required": True, "content": content}
    return said


def published(description: dict) -> dict:
    """A description with all that `fields.check` takes for granted: what is not required may also be null."""
    said = dict(description)
    if "anyOf" in said:
        said["anyOf"] = list(map(published, said["anyOf"]))
    if "items" in said:
        said["items"] = published(said["items"])
    if "properties" in said:
        said["properties"] = {
            name: published(one) if name in said.get("required", ()) or not one else
            {"anyOf": [published(one), {"type": "null"}]} for name, one in said["properties"].items()}
    return said


PROTOCOLS = [openai.PROTOCOL, anthropic.PROTOCOL, ollama.PROTOCOL]
# In the document's order.
FILES = openai, responses, completions, embeddings, rerank, models, anthropic, ollama, plain, page, metrics
ENDPOINTS = [*(endpoint for file in FILES for endpoint in file.ENDPOINTS),
             Endpoint("GET", "/openapi.json", "This document", document, openai.PROTOCOL)]
BY_NAME = {endpoint.name: endpoint for endpoint in ENDPOINTS}


def protocol_of(name: str | None, path: str) -> WireProtocol:
    """The protocol of a request's errors: the endpoint's where one has this name (None: nothing is served there), or
    else the one that declares the longest prefix of the path."""
    if name in BY_NAME:
        return BY_NAME[name].protocol
    fitting = [protocol for protocol in PROTOCOLS if path.startswith(protocol.prefix)]
    return max(fitting, key=lambda protocol: len(protocol.prefix))
