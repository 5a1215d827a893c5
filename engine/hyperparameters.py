"""The hyperparameters of a model: what the metadata of its file says, or the published shapes for random weights.

Both functions return the fields of `qengine.Config` as a dict.
"""

from pathlib import Path

from engine.gguf import GGUF, REQUIRED
from engine.request import ModelError

# Shapes of the published dense models, from config.json of huggingface.co/Qwen/Qwen3.5-{0.8B,2B,4B,9B,27B};
# the parameter counts agree with those that llama-bench prints (752.39 M for 0.8B). "tiny" is ours.
SYNTHETIC_FIELDS = ("hidden_dim", "ffn_dim", "n_layers", "n_heads", "n_kv_heads", "n_key_heads",
                    "n_value_heads", "n_vocab", "tied_embeddings")
SYNTHETIC = {
    "tiny": (256, 320, 4, 4, 2, 2, 4, 1024, True),
    "0.8b": (1024, 3584, 24, 8, 2, 16, 16, 248320, True),
    "2b": (2048, 6144, 24, 8, 2, 16, 16, 248320, True),
    "4b": (2560, 9216, 32, 16, 4, 16, 32, 248320, True),
    "9b": (4096, 12288, 32, 16, 4, 16, 32, 248320, False),
    "27b": (5120, 17408, 64, 24, 4, 16, 48, 248320, False),
}
DRAFTS = "+mtp"             # at the end of a name: with a draft block


def synthetic_hyperparameters(name: str) -> dict:
    """The hyperparameters of a model by its name: "tiny", "0.8b", "2b", "4b", "9b" or "27b"; "9b+mtp" is a 9b with a
    draft block. Raises ModelError."""
    shapes, drafts, _ = name.partition(DRAFTS)
    if shapes not in SYNTHETIC or name != shapes + drafts:
        raise ModelError(f"synthetic:{name}: there is no such model, only {', '.join(SYNTHETIC)}, each also with "
                         f"{DRAFTS} at the end, for a draft block")
    sizes = dict(zip(SYNTHETIC_FIELDS, SYNTHETIC[shapes], strict=True))
    return {"name": f"synthetic:{name}", "n_nextn": int(bool(drafts)),
            "layer_kinds": kinds_by_interval(sizes["n_layers"], 4),
            "head_dim": 256, "rope_dim": 64, "rope_base": 1e7, "rope_sections": (11, 11, 10), "linear_head_dim": 128,
            "conv_width": 4, "norm_eps": 1e-6, "context_length": 262144, **sizes}


def kinds_by_interval(n_layers: int, interval: int) -> tuple[str, ...]:
    """Every interval-th layer is attention."""
    return tuple("linear" if (i + 1) % interval else "attention" for i in range(n_layers))


class Metadata:
    """The keys of one architecture in a file's metadata."""

    def __init__(self, gguf: GGUF, architecture: str):
        self.gguf, self.architecture = gguf, architecture

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def get(self, name: str, kind: type, default=REQUIRED):
        return self.gguf.get(self.key(name), kind, default)

    def size(self, name: str, default=REQUIRED) -> int:
        """A number from 1 to 2**31 - 1."""
        value = self.get(name, int, default)
        if not 0 < value < 2**31:
            raise self.error(name, f"is {value}, not a sensible size")
        return value

    def error(self, name: str, what: str) -> ModelError:
        return ModelError(f"{self.gguf.path}: key '{self.key(name)}' {what}")


def read_hyperparameters(gguf: GGUF) -> dict:
    """The hyperparameters of a `qwen35` file. Raises ModelError."""
    architecture = gguf.get("general.architecture", str)
    if architecture != "qwen35":
        raise ModelError(f"{gguf.path}: architecture {architecture[:80]!r} is not supported, 'qwen35' is")
    metadata, embedding = Metadata(gguf, architecture), gguf.tensors.get("token_embd.weight")
    found = _blocks(metadata) | _attention(metadata) | _linear(metadata) | {
        "name": gguf.get("general.name", str, Path(gguf.path).stem),
        "hidden_dim": metadata.size("embedding_length"),
        "ffn_dim": metadata.size("feed_forward_length"),
        "norm_eps": metadata.get("attention.layer_norm_rms_epsilon", float),
        "n_vocab": embedding.shape[0] if embedding else 1,
        "tied_embeddings": "output.weight" not in gguf.tensors,
        "context_length": metadata.size("context_length")}
    value_dim = found["n_value_heads"] * found["linear_head_dim"]
    if metadata.size("ssm.inner_size") != value_dim:
        raise metadata.error("ssm.inner_size", f"is not time_step_rank * state_size, {value_dim}")
    return found


def _blocks(metadata: Metadata) -> dict:
    """How many layers and next-token-prediction blocks there are, and the kinds of the layers."""
    n_blocks, n_tensors = metadata.size("block_count"), len(metadata.gguf.tensors)
    if n_blocks > n_tensors:            # checked before anything is made of this length
        raise metadata.error("block_count", f"is {n_blocks}, more than the tensors")
    n_nextn = metadata.get("nextn_predict_layers", int, 0)
    if not 0 <= n_nextn < n_blocks:
        raise metadata.error("nextn_predict_layers", f"is {n_nextn} of {n_blocks} blocks")
    n_layers, interval = n_blocks - n_nextn, metadata.size("full_attention_interval", 4)
    recurrent = metadata.gguf.get_array(metadata.key("attention.recurrent_layers"), "b", None)
    if recurrent is None:               # older files have no list
        kinds = kinds_by_interval(n_layers, interval)
    elif len(recurrent) != n_blocks:
        raise metadata.error("attention.recurrent_layers", f"is not {n_blocks} truth values")
    else:
        kinds = tuple("linear" if each else "attention" for each in recurrent[:n_layers])
    return {"n_layers": n_layers, "n_nextn": n_nextn, "layer_kinds": kinds}


def _attention(metadata: Metadata) -> dict:
    """The heads of attention layers and their rotation."""
    factor = metadata.get("rope.scaling.factor", float, 1.0)
    implied = "none" if factor in (0.0, 1.0) else "linear"      # as llama.cpp reads a factor without a type
    scaling = metadata.get("rope.scaling.type", str, implied)
    if scaling != "none":
        raise ModelError(f"{metadata.gguf.path}: rotary scaling {scaling[:80]!r} is not supported")
    sections = metadata.gguf.get_array(metadata.key("rope.dimension_sections"), "iu")
    if len(sections) < 3 or any(sections[3:]):
        raise metadata.error("rope.dimension_sections", f"is {sections.tolist()[:8]}, not time, height, width and 0")
    head_dim = metadata.size("attention.key_length")
    if metadata.size("attention.value_length") != head_dim:
        raise ModelError(f"{metadata.gguf.path}: keys and values of attention heads differ in length")
    return {"n_heads": metadata.size("attention.head_count"), "n_kv_heads": metadata.size("attention.head_count_kv"),
            "head_dim": head_dim, "rope_dim": metadata.size("rope.dimension_count"),
            "rope_base": metadata.get("rope.freq_base", float), "rope_sections": tuple(int(s) for s in sections[:3])}


def _linear(metadata: Metadata) -> dict:
    """The heads and the convolution of linear layers."""
    return {"n_key_heads": metadata.size("ssm.group_count"), "n_value_heads": metadata.size("ssm.time_step_rank"),
            "linear_head_dim": metadata.size("ssm.state_size"), "conv_width": metadata.size("ssm.conv_kernel")}
