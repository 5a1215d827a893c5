"""Durations as people write them."""

import re

UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def read_seconds(text: str) -> float:
    """A duration as Ollama and Go write it: "10m", "1h30m"; a bare number is of seconds. Raises ValueError."""
    sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text)
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", rest, re.ASCII):
        return sign * float(rest)
    parts = re.findall(r"(\d{1,9}(?:\.\d{1,9})?)(ms|[smh])", rest, re.ASCII)
    if not parts or "".join(map("".join, parts)) != rest:
        raise ValueError(f"{text[:40]!r} is no duration")
    return sign * sum(float(n) * UNITS[unit] for n, unit in parts)
