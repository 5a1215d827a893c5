"""The OpenAPI document of the server, made of what checks its requests."""

from . import anthropic, metrics, openai, page, plain
from .fields import Endpoint


def document(service):
    paths = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation(endpoint)
    return {"openapi": "3.1.0", "info": {"title": "qengine", "version": "1"}, "paths": paths}


def operation(endpoint: Endpoint) -> dict:
    said = {"summary": endpoint.summary, "responses": {
        "200": {"description": "The answer"}, "default": {"description": "An error, in the shape of the protocol"}}}
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


ENDPOINTS = [*openai.ENDPOINTS, *anthropic.ENDPOINTS, *plain.ENDPOINTS, *page.ENDPOINTS, *metrics.ENDPOINTS,
             Endpoint("GET", "/openapi.json", "This document", document)]
