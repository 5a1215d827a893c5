"""Anthropic's messages."""

from . import openai

ENDPOINTS = []


def error_body(failure) -> dict:
    return openai.error_body(failure)
