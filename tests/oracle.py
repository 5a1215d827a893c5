"""The reference models and outputs of ../shared/oracle, for tests: skips, saying so, where they are not."""

import json
from pathlib import Path

import numpy as np
import pytest

ORACLE = Path(__file__).resolve().parents[1].parent / "shared" / "oracle"
DATA = Path(__file__).resolve().parent / "data"  # the small files that a plain clone has

EMBEDDING, RERANKER = "embed-Q8_0", "rerank-Q8_0"
COSINE = 0.9995     # of our embeddings with those of float32 arithmetic, at least; llama.cpp's have 0.9993
NEAR_SCORE = 0.015  # between our scores and a server's, at most: both have 8-bit products


def oracle_path(name: str) -> Path:
    """Path of a file in the oracle, e.g. "gguf/dense_mtp-Q8_0.gguf"; skips the test when it is not there."""
    path = ORACLE / name
    if not path.exists():
        pytest.skip(f"no reference data: {path} is not there")
    return path


def oracle_files():
    """The GGUF files that the oracle's manifest lists, to parametrise a test, which is skipped where there are none."""
    manifest = ORACLE / "manifest.json"
    if not manifest.exists():
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"no reference data: {manifest} is not there"))]
    models = json.loads(manifest.read_text())["models"].values()
    return sorted({model[key] for model in models for key in ("file", "mmproj") if key in model})


def oracle_npz(name: str):
    """The arrays of npz/<name>.npz."""
    return np.load(oracle_path(f"npz/{name}.npz"))


def oracle_json(name: str):
    """A JSON file of the oracle, e.g. "manifest.json"."""
    return json.loads(oracle_path(name).read_text())


def server_cosine() -> float:
    """The least cosine of our embeddings with llama-server's, whose products have 8-bit activations throughout: its
    angle to the reference, which the manifest has, and our largest one together."""
    agreement = oracle_json("manifest.json")["models"][EMBEDDING]["embedding_agreement"]
    return np.cos(np.arccos(agreement["cos_min_llamacpp_quantised_vs_hf"]) + np.arccos(COSINE))


def server_said(group: str, path: str | None = None) -> list[tuple[str, dict, dict]]:
    """(path, request, response) of what llama-server was asked: "embed" or "rerank". path: what was asked there."""
    found = [(one["path"], one["request"], one["response"]) for one in oracle_json("server_responses.json")[group]]
    found = [one for one in found if path in (None, one[0])]
    assert found
    return found
