"""Makes the small files beside it: `python tests/data/make.py ORACLE_GGUF`, where ORACLE_GGUF is a `qwen35`
model whose vocabulary and metadata are taken over (the reference model dense_mtp-Q8_0.gguf).

tiny-Q8_0.gguf    a dense hybrid model of our own random weights: two Gated DeltaNet layers, one attention
                  layer and one next-token-prediction block, tied embeddings, the reference's vocabulary
"""

import sys
from pathlib import Path

import gguf
import numpy as np

N_LAYERS, N_NEXTN, INTERVAL, FFN = 3, 1, 3, 256
KEPT = ("general.", "tokenizer.", "qwen35.")
CHANGED = {"qwen35.block_count": N_LAYERS + N_NEXTN, "qwen35.nextn_predict_layers": N_NEXTN,
           "qwen35.full_attention_interval": INTERVAL, "qwen35.feed_forward_length": FFN,
           "qwen35.attention.head_count": 2, "qwen35.attention.head_count_kv": 1,
           "qwen35.ssm.group_count": 1, "qwen35.ssm.time_step_rank": 2, "qwen35.ssm.inner_size": 256,
           "general.name": "tiny", "general.size_label": None,
           "qwen35.attention.recurrent_layers": [True, True, False, False]}


def random_weights(name: str, shape: tuple, rng) -> np.ndarray:
    """Values in the ranges that trained models show, so that activations neither die nor explode."""
    if name.endswith("norm.weight"):
        return rng.uniform(0.5, 1.5, shape)
    if name.endswith("ssm_a"):
        return -rng.uniform(0.1, 1.0, shape)  # holds -exp(A_log)
    if name.endswith("ssm_dt.bias"):
        return rng.uniform(-3.0, 1.0, shape)
    return rng.normal(size=shape) * (1.0 / np.sqrt(shape[-1]) if len(shape) == 2 else 1.0)


def copy_metadata(writer, source):
    for key, field in source.fields.items():
        value = CHANGED.get(key, field.contents() if key.startswith(KEPT) else None)
        if value is None or key == "general.architecture":
            continue
        sub_type = field.types[-1] if isinstance(value, list) else None
        writer.add_key_value(key, value, field.types[0], sub_type)


def main(source: str):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import qengine

    target = Path(__file__).with_name("tiny-Q8_0.gguf")
    writer = gguf.GGUFWriter(target, "qwen35")
    copy_metadata(writer, gguf.GGUFReader(source))
    config = qengine.Config(
        name="tiny", hidden_dim=256, ffn_dim=FFN, n_layers=N_LAYERS, n_nextn=N_NEXTN,
        layer_kinds=("linear", "linear", "attention"), n_heads=2, n_kv_heads=1, head_dim=256, rope_dim=64,
        rope_base=1e7, rope_sections=(11, 11, 10), n_key_heads=1, n_value_heads=2, linear_head_dim=128,
        conv_width=4, norm_eps=1e-6, n_vocab=4096, tied_embeddings=True, context_length=4096)
    rng = np.random.default_rng(20)
    for name, shape in qengine.tensor_shapes(config).items():
        values = random_weights(name, shape, rng).astype(np.float32)
        quantised = len(shape) == 2 and "conv1d" not in name
        type = gguf.GGMLQuantizationType.Q8_0 if quantised else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, type) if quantised else values, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB, {qengine.n_parameters(config) / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main(*sys.argv[1:])
