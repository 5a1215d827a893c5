"""The hyperparameters of a model: what the metadata of its file says, or the published shapes for random weights.

Three architectures are known: `qwen35`, hybrid models; `qwen35moe`, hybrid models whose MLPs are mixtures of experts;
and `qwen3`, whose layers are all attention without gates.
`read_hyperparameters` and `synthetic_hyperparameters` return the fields of `qengine.Config` as a dict.
"""

import dataclasses

from engine.gguf import GGUF, REQUIRED
from engine.request import ModelError, RequestError
from kernels.kv_formats import KV_FORMATS

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
# Those of the published mixtures of experts, as far as they differ in kind: from config.json of
# huggingface.co/Qwen/{Qwen3.6-35B-A3B,Qwen3.5-122B-A10B,Qwen3.5-397B-A17B}. "tiny-moe" is ours.
SYNTHETIC_MOE_FIELDS = ("hidden_dim", "n_experts", "n_used_experts", "expert_dim", "shared_dim", "n_layers", "n_heads",
                        "n_kv_heads", "n_key_heads", "n_value_heads", "n_vocab", "tied_embeddings")
SYNTHETIC_MOE = {
    "tiny-moe": (256, 8, 2, 256, 512, 4, 4, 2, 2, 4, 1024, True),
    "35b-a3b": (2048, 256, 8, 512, 512, 40, 16, 2, 16, 32, 248320, False),
    "122b-a10b": (3072, 256, 8, 1024, 1024, 48, 32, 2, 16, 64, 248320, False),
    "397b-a17b": (4096, 512, 10, 1024, 1024, 60, 32, 2, 16, 64, 248320, False),
}
# The same of huggingface.co/Qwen/Qwen3-{0.6B,1.7B,4B,8B,14B,32B}, which have no linear layers.
SYNTHETIC_QWEN3 = {
    "qwen3-tiny": (256, 320, 4, 4, 2, 0, 0, 1024, True),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 0, 0, 151936, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 0, 0, 151936, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 0, 0, 151936, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 0, 0, 151936, False),
    "qwen3-14b": (5120, 17408, 40, 40, 8, 0, 0, 151936, False),
    "qwen3-32b": (5120, 25600, 64, 64, 8, 0, 0, 151936, False),
}
DRAFTS = "+mtp"             # at the end of a Qwen3.5 name: with a draft block
POOLED = {"-embedding": "last", "-reranker": "rank"}    # at the end of a Qwen3 name: what the model is for
OF_QWEN35 = {"head_dim": 256, "rope_dim": 64, "rope_base": 1e7, "rope_sections": (11, 11, 10), "linear_head_dim": 128,
             "conv_width": 4, "architecture": "qwen35", "mlp_norm": "post_attention_norm", "pooling": None}
OF_QWEN35_MOE = OF_QWEN35 | {"architecture": "qwen35moe", "ffn_dim": 0}
NO_LINEAR_LAYERS = {"n_key_heads": 0, "n_value_heads": 0, "linear_head_dim": 0, "conv_width": 0}
OF_QWEN3 = {**NO_LINEAR_LAYERS, "head_dim": 128, "rope_dim": 128, "rope_base": 1e6, "rope_sections": (64, 0, 0),
            "architecture": "qwen3", "mlp_norm": "ffn_norm"}


def synthetic_hyperparameters(name: str) -> dict:
    """The hyperparameters of a model by its name: "tiny", "0.8b", "2b", "4b", "9b" or "27b"; "35b-a3b" and the like are
    mixtures of experts; "9b+mtp" is a 9b with a draft block; "qwen3-0.6b" and the like are plain Qwen3,
    "qwen3-0.6b-embedding" and "qwen3-0.6b-reranker" the models of that size for embeddings and for reranking. Raises
    ModelError."""
    shapes, drafts, _ = name.partition(DRAFTS)
    ending = next((each for each in POOLED if name.endswith(each)), "")
    if shapes in SYNTHETIC | SYNTHETIC_MOE and name == shapes + drafts:
        fields, table, found = ((SYNTHETIC_FIELDS, SYNTHETIC, OF_QWEN35) if shapes in SYNTHETIC else
                                (SYNTHETIC_MOE_FIELDS, SYNTHETIC_MOE, OF_QWEN35_MOE))
        sizes = dict(zip(fields, table[shapes], strict=True))
        found = found | {"layer_kinds": kinds_by_interval(sizes["n_layers"], 4), "context_length": 262144}
    elif (shapes := name.removesuffix(ending)) in SYNTHETIC_QWEN3:
        sizes = dict(zip(SYNTHETIC_FIELDS, SYNTHETIC_QWEN3[shapes], strict=True))
        pooling = POOLED.get(ending)
        found = OF_QWEN3 | {"layer_kinds": (plain_kind(pooling),) * sizes["n_layers"], "context_length": 40960,
                            "pooling": pooling}
    else:
        raise ModelError(f"synthetic:{name}: there is no such model, only {', '.join(SYNTHETIC | SYNTHETIC_MOE)}, each "
                         f"also with {DRAFTS} at the end, for a draft block; and {', '.join(SYNTHETIC_QWEN3)}, each "
                         f"also with {' or '.join(POOLED)} at the end")
    return {"name": f"synthetic:{name}", "n_nextn": int(bool(drafts)), "norm_eps": 1e-6, **sizes, **found}


def kinds_by_interval(n_layers: int, interval: int) -> tuple[str, ...]:
    """Every interval-th layer is attention."""
    return tuple("linear" if (i + 1) % interval else "attention" for i in range(n_layers))


def plain_kind(pooling: str | None) -> str:
    """The kind of a plain Qwen3's layers."""
    return "pooled attention" if pooling else "plain attention"


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


# How a model makes one row of the rows of a text, by the number that files give it; "rank" is how rerankers do.
POOLINGS = {0: None, 1: "mean", 2: "cls", 3: "last", 4: "rank"}
LABELS = ["yes", "no"]       # of the rows of a reranker's classifier


def read_hyperparameters(gguf: GGUF) -> dict:
    """The hyperparameters of a file. Raises ModelError."""
    architecture = gguf.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{gguf.path}: architecture {architecture[:80]!r} is not supported, "
                         f"{' and '.join(map(repr, ARCHITECTURES))} are")
    metadata, embedding = Metadata(gguf, architecture), gguf.tensors.get("token_embd.weight")
    return ARCHITECTURES[architecture](metadata) | {
        "architecture": architecture,
        "name": gguf.get("general.name", str, gguf.stem),
        "hidden_dim": metadata.size("embedding_length"),
        "norm_eps": metadata.get("attention.layer_norm_rms_epsilon", float),
        "n_vocab": embedding.shape[0] if embedding else 1,
        "tied_embeddings": "output.weight" not in gguf.tensors,
        "pooling": _pooling(metadata), "context_length": metadata.size("context_length")}


def _pooling(metadata: Metadata) -> str | None:
    pooling = metadata.get("pooling_type", int, 0)
    if pooling not in POOLINGS:
        raise metadata.error("pooling_type", f"is {pooling}, not one of {', '.join(map(str, POOLINGS))}")
    labels = metadata.get("classifier.output_labels", list, LABELS)
    if POOLINGS[pooling] == "rank" and labels != LABELS:
        raise metadata.error("classifier.output_labels", f"is {str(labels)[:80]}, not {LABELS}: relevance is the first "
                                                         "number of a classifier")
    return POOLINGS[pooling]


def _qwen35(metadata: Metadata) -> dict:
    return _hybrid(metadata) | {"ffn_dim": metadata.size("feed_forward_length")}


def _qwen35moe(metadata: Metadata) -> dict:
    """Some files give the size of a dense MLP, too, which no layer has. Some have gate and up of an expert in one
    tensor."""
    for name, ours in ("expert_gating_func", 1), ("expert_weights_norm", True), ("expert_weights_scale", 1.0):
        if (value := metadata.get(name, type(ours), ours)) != ours:
            raise metadata.error(name, f"is {value}, and only {ours} is supported")
    expert_dim = metadata.size("expert_feed_forward_length")
    return _hybrid(metadata) | {
        "ffn_dim": 0, "n_experts": metadata.size("expert_count"), "n_used_experts": metadata.size("expert_used_count"),
        "expert_dim": expert_dim, "shared_dim": metadata.size("expert_shared_feed_forward_length", expert_dim),
        "one_gate_up": "blk.0.ffn_gate_up_exps.weight" in metadata.gguf.tensors}


def _hybrid(metadata: Metadata) -> dict:
    """What only hybrid models have, or have in their own way."""
    sections = metadata.gguf.get_array(metadata.key("rope.dimension_sections"), "iu")
    if len(sections) < 3 or any(sections[3:]):
        raise metadata.error("rope.dimension_sections", f"is {sections.tolist()[:8]}, not time, height, width and 0")
    found = _attention(metadata) | _linear(metadata) | {
        "rope_dim": metadata.size("rope.dimension_count"), "rope_sections": tuple(int(s) for s in sections[:3]),
        "mlp_norm": "post_attention_norm"}
    value_dim = found["n_value_heads"] * found["linear_head_dim"]
    if metadata.size("ssm.inner_size") != value_dim:
        raise metadata.error("ssm.inner_size", f"is not time_step_rank * state_size, {value_dim}")
    return found | _blocks(metadata)


def _qwen3(metadata: Metadata) -> dict:
    """The same of plain Qwen3: every layer is attention, and the whole head turns by one position."""
    found, n_layers = _attention(metadata), _block_count(metadata)
    rope_dim = metadata.size("rope.dimension_count", found["head_dim"])
    return found | NO_LINEAR_LAYERS | {
        "ffn_dim": metadata.size("feed_forward_length"), "rope_dim": rope_dim, "mlp_norm": "ffn_norm",
        "rope_sections": (rope_dim // 2, 0, 0), "n_layers": n_layers, "n_nextn": 0,
        "layer_kinds": (plain_kind(_pooling(metadata)),) * n_layers}


ARCHITECTURES = {"qwen35": _qwen35, "qwen35moe": _qwen35moe, "qwen3": _qwen3}


def _block_count(metadata: Metadata) -> int:
    n_blocks, n_tensors = metadata.size("block_count"), len(metadata.gguf.tensors)
    if n_blocks > n_tensors:            # checked before anything is made of this length
        raise metadata.error("block_count", f"is {n_blocks}, more than the tensors")
    return n_blocks


def _blocks(metadata: Metadata) -> dict:
    """How many layers and next-token-prediction blocks there are, and the kinds of the layers."""
    n_blocks = _block_count(metadata)
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
    """The heads of attention layers and the base of their rotation."""
    factor = metadata.get("rope.scaling.factor", float, 1.0)
    implied = "none" if factor in (0.0, 1.0) else "linear"      # as llama.cpp reads a factor without a type
    scaling = metadata.get("rope.scaling.type", str, implied)
    if scaling != "none":
        raise ModelError(f"{metadata.gguf.path}: rotary scaling {scaling[:80]!r} is not supported")
    head_dim = metadata.size("attention.key_length")
    if metadata.size("attention.value_length") != head_dim:
        raise ModelError(f"{metadata.gguf.path}: keys and values of attention heads differ in length")
    return {"n_heads": metadata.size("attention.head_count"), "n_kv_heads": metadata.size("attention.head_count_kv"),
            "head_dim": head_dim, "rope_base": metadata.get("rope.freq_base", float)}


def _linear(metadata: Metadata) -> dict:
    """The heads and the convolution of linear layers."""
    return {"n_key_heads": metadata.size("ssm.group_count"), "n_value_heads": metadata.size("ssm.time_step_rank"),
            "linear_head_dim": metadata.size("ssm.state_size"), "conv_width": metadata.size("ssm.conv_kernel")}


def keeping(config, kv: str):
    """A `qengine.Config` whose keys and values are kept in this format of kernels/kv_formats.py. Raises
    RequestError."""
    if kv not in KV_FORMATS:
        raise RequestError("kv", f"there is no KV format {kv}, only {', '.join(KV_FORMATS)}")
    if config.pooling and KV_FORMATS[kv].expands:
        raise RequestError("kv", f"a model for embeddings or reranking keeps keys and values as float16, not as {kv}")
    return dataclasses.replace(config, kv=kv)
