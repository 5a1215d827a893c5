"""Small vision towers of random weights, as files and as pictures for them."""

from types import SimpleNamespace

import gguf
import numpy as np

from engine.vision import SyntheticVisionWeights, VisionConfig
from kernels.formats import FORMATS
from tests.models import stored

# Heads of 72 as in published towers; widths that Q8_0 can store.
SMALL = VisionConfig(width=288, n_blocks=2, n_heads=4, ffn_dim=64, side=5, hidden_dim=20, norm_eps=1e-6)


def picture(rows, columns, seed=0):
    """A random picture of rows x columns blocks."""
    pixels = np.random.default_rng(seed).integers(0, 256, (32 * rows, 32 * columns, 3), np.uint8)
    return picture_of(pixels)


def picture_of(pixels):
    rows, columns = pixels.shape[0] // 32, pixels.shape[1] // 32
    return SimpleNamespace(pixels=pixels, rows=rows, columns=columns, n_tokens=rows * columns)


def keys_of(config):
    """The metadata of a file with such a tower."""
    return {
        "general.architecture": "clip", "clip.has_vision_encoder": True, "clip.projector_type": "qwen3vl_merger",
        "clip.vision.image_size": 16 * config.side, "clip.vision.patch_size": 16, "clip.vision.spatial_merge_size": 2,
        "clip.vision.embedding_length": config.width, "clip.vision.feed_forward_length": config.ffn_dim,
        "clip.vision.block_count": config.n_blocks, "clip.vision.attention.head_count": config.n_heads,
        "clip.vision.projection_dim": config.hidden_dim, "clip.use_gelu": True,
        "clip.vision.attention.layer_norm_epsilon": config.norm_eps,
        "clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3}


# Keys that llama.cpp's convert_hf_to_gguf.py and other tools write beside those above (gguf-py's constants.Keys lists
# them), with values that change nothing for this tower: where the model comes from, how it was stored, what other
# engines need. The last key is made up, for those that are still to come.
EXPORTED = {
    "general.type": "mmproj", "general.name": "Qwen3.5 9B", "general.basename": "Qwen3.5", "general.size_label": "9B",
    "general.finetune": "Instruct", "general.license": "apache-2.0", "general.quantized_by": "somebody",
    "general.base_model.count": 1, "general.base_model.0.name": "Qwen3.5 9B", "general.tags": ["image-text-to-text"],
    "general.languages": ["en", "ko"], "general.file_type": 1, "general.quantization_version": 2,
    "general.source.huggingface.repository": "Qwen/Qwen3.5-9B", "clip.has_audio_encoder": False,
    "clip.has_llava_projector": False, "clip.use_silu": False, "clip.vision.projector_type": "qwen3vl_merger",
    "clip.vision.n_wa_pattern": 0, "clip.vision.image_min_pixels": 65536, "clip.vision.image_max_pixels": 16777216,
    "clip.vision.preproc_image_size": 768, "clip.vision.is_deepstack_layers": [False] * SMALL.n_blocks,
    "clip.vision.something.new": 0.25}


def write_tower(path, config=SMALL, kind="F16", keys=None, change=None, more=()):
    """Writes a file with a random tower.

    kind: the type of all matrices whose rows are whole blocks of it; of the others F16, and of vectors F32. keys:
    metadata that is changed, or left out where the value is None. change(name, values): the values that are stored, or
    None for no such tensor. more: names of other tensors."""
    keys, weights = keys_of(config) | (keys or {}), SyntheticVisionWeights(config)
    writer = gguf.GGUFWriter(str(path), keys.pop("general.architecture"))
    for key, value in keys.items():
        if value is not None:
            kinds = gguf.GGUFValueType.get_type(value), None
            if isinstance(value, list):
                kinds = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.get_type(value[0])
            writer.add_key_value(key, value, *kinds)
    for name in config.shapes():
        values = weights.floats(name)
        values = values if change is None else change(name, values)
        if values is None:
            continue
        if values.ndim == 1:
            writer.add_tensor(name, values.astype(np.float32))
            continue
        fits = kind not in FORMATS or values.shape[-1] % FORMATS[kind].file_block == 0
        raw, number = stored(kind if fits else "F16", values.reshape(-1, values.shape[-1]))
        writer.add_tensor(name, raw.reshape(*values.shape[:-1], -1), raw_dtype=number)
    for name in more:
        writer.add_tensor(name, np.ones(8, np.float32))
    for step in writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close:
        step()
    return str(path)
