"""The reference models and outputs of ../shared/oracle, for tests: skips, saying so, where they are not."""

import json
from pathlib import Path

import numpy as np
import pytest

ORACLE = Path(__file__).resolve().parents[1].parent / "shared" / "oracle"
DATA = Path(__file__).resolve().parent / "data"  # the small files that a plain clone has


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
