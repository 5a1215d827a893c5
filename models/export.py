"""A trained network and its tower to GGUF files, and such files back to networks or to transformers' own.

    python models/export.py CHECKPOINT [FILE.gguf [MMPROJ.gguf]]
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models.checkpoint import load_checkpoint  # noqa: E402
from models.data import MERGE, SIZE, byte_level_tokenizer, cut  # noqa: E402
from models.network import Network, Shape  # noqa: E402
from models.tower import Tower, TowerShape  # noqa: E402

ROOT = Path(__file__).resolve().parent
NAME = "qengine-10m"
FILE = ROOT / f"{NAME}-Q8_0.gguf"
TOWER_FILE = ROOT / f"{NAME}-mmproj-Q8_0.gguf"
PROJECTOR = "qwen3vl_merger"
KERNELS = ("v.patch_embd.weight", "v.patch_embd.weight.1")      # for two moments of a video
Q8_0, F32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32
TOKEN_TYPES = {"normal": 1, "control": 3, "user": 4, "unused": 5}


# ---- writing -------------------------------------------------------------------------------------------


def write_gguf(path: str | Path, network: Network, tokenizer: tokenizers.Tokenizer, template: str,
               name: str = NAME):
    """Write a network in Q8_0, with its tokenizer (byte-level BPE) and chat template."""
    writer = gguf.GGUFWriter(str(path), "qwen35")
    _add_general(writer, "model", name, n_parameters(network),
                 "The Qwen3.5 architecture, small, trained from scratch on text made for qengine")
    writer.add_languages(["en", "ko"])
    _add_shape(writer, network.shape)
    _add_tokenizer(writer, json.loads(tokenizer.to_str()), network.shape.n_vocab)
    writer.add_chat_template(template)
    _write(writer, file_tensors(network))


def write_tower(path: str | Path, tower: Tower, name: str = NAME):
    """Write a tower with its matrices in Q8_0. The table of positions and what is no matrix stay float32."""
    shape = tower.shape
    writer = gguf.GGUFWriter(str(path), "clip")
    _add_general(writer, "mmproj", name, sum(p.numel() for p in tower.parameters()),
                 "A vision tower of the Qwen3.5 architecture, small, trained from scratch on pictures made for qengine")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(PROJECTOR)
    writer.add_vision_use_gelu(True)
    writer.add_vision_image_size(SIZE * shape.side)
    writer.add_vision_patch_size(SIZE)
    writer.add_vision_spatial_merge_size(MERGE)
    writer.add_vision_embedding_length(shape.width)
    writer.add_vision_feed_forward_length(shape.ffn)
    writer.add_vision_block_count(shape.n_blocks)
    writer.add_vision_head_count(shape.n_heads)
    writer.add_vision_projection_dim(shape.hidden)
    writer.add_vision_attention_layernorm_eps(shape.norm_eps)
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)
    writer.add_vision_is_deepstack_layers([False] * shape.n_blocks)
    _write(writer, tower_tensors(tower))


def _add_general(writer: gguf.GGUFWriter, kind: str, name: str, n: int, description: str):
    """n: parameters."""
    writer.add_type(kind)
    writer.add_name(name)
    writer.add_license("apache-2.0")
    writer.add_author("the qengine project")
    writer.add_description(description)
    writer.add_size_label(f"{n / 1e6:.0f}M")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _write(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]):
    """Matrices whose rows are whole blocks in Q8_0, all else in float32."""
    for name, values in tensors.items():
        is_matrix = values.ndim == 2 and values.shape[1] % 32 == 0 and name != "v.position_embd.weight"
        kind = Q8_0 if is_matrix else F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def n_parameters(network: Network) -> int:
    """Of the model, without the MTP block."""
    draft = f"blk.{network.shape.n_layers}."
    return sum(p.numel() for name, p in network.named_parameters() if not name.startswith(draft))


def file_tensors(network: Network) -> dict[str, np.ndarray]:
    """The network's parameters under the file's names, float32."""
    tensors = {name: p.detach().float().cpu().numpy() for name, p in network.named_parameters()}
    for name in [name for name in tensors if name.endswith("ssm_log_a")]:
        tensors[name.replace("ssm_log_a", "ssm_a")] = -np.exp(tensors.pop(name))
    return tensors


def tower_tensors(tower: Tower) -> dict[str, np.ndarray]:
    """The tower's parameters under the file's names, float32. Each of the two kernels for patches is half of ours."""
    tensors = {name: p.detach().float().cpu().numpy() for name, p in tower.named_parameters()}
    half = tensors.pop(KERNELS[0]).reshape(-1, 3, SIZE, SIZE) / 2
    return tensors | dict.fromkeys(KERNELS, half)


def _add_shape(writer: gguf.GGUFWriter, shape: Shape):
    writer.add_block_count(shape.n_layers + 1)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.rope_dim)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(shape.conv_width)
    writer.add_ssm_state_size(shape.linear_head_dim)
    writer.add_ssm_group_count(shape.n_key_heads)
    writer.add_ssm_time_step_rank(shape.n_value_heads)
    writer.add_ssm_inner_size(shape.n_value_heads * shape.linear_head_dim)
    writer.add_nextn_predict_layers(1)
    writer.add_uint32("qwen35.full_attention_interval", shape.attention_interval)
    recurrent = [not shape.is_attention(i) for i in range(shape.n_layers)] + [False]
    writer.add_array("qwen35.attention.recurrent_layers", recurrent)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict, n_vocab: int):
    ids = dict(tokenizer["model"]["vocab"])
    kinds = dict.fromkeys(ids, "normal")
    for token in tokenizer["added_tokens"]:
        ids[token["content"]] = token["id"]
        kinds[token["content"]] = "control" if token["special"] else "user"
    padding = range(len(ids), n_vocab)
    tokens = sorted(ids, key=ids.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in padding])
    types = [TOKEN_TYPES[kinds[token]] for token in tokens]
    writer.add_token_types(types + [TOKEN_TYPES["unused"]] * len(padding))
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(ids["<|endoftext|>"])  # never added; the family's files name it
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_pad_token_id(ids["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


# ---- reading -------------------------------------------------------------------------------------------


def read_gguf(path: str | Path) -> Network:
    """The network of a `qwen35` file with one MTP block, float32, with the file's dequantised weights."""
    tensors, get = _read(path, "qwen35")
    network = Network(Shape(
        n_vocab=len(tensors["token_embd.weight"]),
        hidden=get("embedding_length"), ffn=get("feed_forward_length"),
        n_layers=get("block_count") - get("nextn_predict_layers"),
        attention_interval=get("full_attention_interval"),
        n_heads=get("attention.head_count"), n_kv_heads=get("attention.head_count_kv"),
        head_dim=get("attention.key_length"),
        rope_dim=get("rope.dimension_count"), rope_base=get("rope.freq_base"),
        n_key_heads=get("ssm.group_count"), n_value_heads=get("ssm.time_step_rank"),
        linear_head_dim=get("ssm.state_size"), conv_width=get("ssm.conv_kernel"),
        norm_eps=get("attention.layer_norm_rms_epsilon"), context=get("context_length"),
        tied="output.weight" not in tensors))
    for name in [name for name in tensors if name.endswith("ssm_a")]:
        tensors[name.replace("ssm_a", "ssm_log_a")] = (-tensors.pop(name)).log()
    network.load_parameters(tensors)
    return network


def read_tower(path: str | Path) -> Tower:
    """The tower of an mmproj file of a Qwen3.5 model, float32."""
    tensors, get = _read(path, "clip.vision")
    tower = Tower(TowerShape(
        width=get("embedding_length"), n_blocks=get("block_count"), n_heads=get("attention.head_count"),
        ffn=get("feed_forward_length"), side=get("image_size") // SIZE, hidden=get("projection_dim"),
        norm_eps=get("attention.layer_norm_epsilon")))
    tensors[KERNELS[0]] = sum(tensors.pop(name) for name in KERNELS).flatten(1)
    tower.load_state_dict(tensors)
    return tower


def _read(path: str | Path, prefix: str) -> tuple[dict, Callable]:
    """(dequantised tensors by name, what gives the metadata under the prefix) of a GGUF file."""
    reader = gguf.GGUFReader(str(path))
    tensors = {}
    for t in reader.tensors:
        values = gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1])
        tensors[t.name] = torch.from_numpy(values.astype(np.float32))
    return tensors, lambda key: reader.fields[f"{prefix}.{key}"].contents()


def read_tokenizer(path: str | Path) -> tokenizers.Tokenizer:
    """The tokenizer of such a file."""
    fields = gguf.GGUFReader(str(path)).fields
    tokens, types, merges = (fields[f"tokenizer.ggml.{name}"].contents()
                             for name in ("tokens", "token_type", "merges"))
    kinds = {number: kind for kind, number in TOKEN_TYPES.items()}
    ids = {token: i for i, token in enumerate(tokens) if kinds[types[i]] == "normal"}
    tokenizer = byte_level_tokenizer(tokenizers.models.BPE(ids, [tuple(pair.split(" ")) for pair in merges]))
    for token, number in zip(tokens, types, strict=True):
        added = tokenizers.AddedToken(token, normalized=False, special=kinds[number] == "control")
        if kinds[number] == "control":
            tokenizer.add_special_tokens([added])
        elif kinds[number] == "user":
            tokenizer.add_tokens([added])
    return tokenizer


# ---- transformers --------------------------------------------------------------------------------------

LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight", "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight", "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight", "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight", "ssm_log_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias", "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "attn_q.weight": "self_attn.q_proj.weight", "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight", "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight",
}
NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
         "output.weight": "lm_head.weight"}


TOWER_NAMES = {
    "v.patch_embd": "patch_embed.proj", "v.position_embd": "pos_embed", "v.post_ln": "merger.norm",
    "mm.0": "merger.linear_fc1", "mm.2": "merger.linear_fc2", "v.blk.": "blocks.", "ln1": "norm1", "ln2": "norm2",
    "attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2",
}


def to_transformers(network: Network):
    """transformers' Qwen3_5ForCausalLM with the network's trunk, float32. It knows no MTP blocks."""
    from transformers import Qwen3_5ForCausalLM

    model = Qwen3_5ForCausalLM(_text_config(network.shape)).eval()
    model.load_state_dict(_text_state(network))
    return model


def to_transformers_that_sees(network: Network, tower: Tower, pad: int):
    """transformers' Qwen3_5ForConditionalGeneration, float32. pad: the id of a picture's tokens. The norms of its tower
    have an epsilon of their own, 1e-6."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5VisionConfig

    t = tower.shape
    vision = Qwen3_5VisionConfig(
        depth=t.n_blocks, hidden_size=t.width, intermediate_size=t.ffn, num_heads=t.n_heads, patch_size=SIZE,
        spatial_merge_size=MERGE, out_hidden_size=t.hidden, num_position_embeddings=t.side ** 2)
    config = Qwen3_5Config(text_config=_text_config(network.shape), vision_config=vision, image_token_id=pad,
                           tie_word_embeddings=network.shape.tied)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    state = {name.replace("model.", "model.language_model."): values for name, values in _text_state(network).items()}
    tensors = tower_tensors(tower)
    tensors[KERNELS[0]] = np.stack([tensors.pop(name) for name in reversed(KERNELS)], 2)
    for name, values in tensors.items():
        for ours, theirs in TOWER_NAMES.items():
            name = name.replace(ours, theirs)
        state[f"model.visual.{name}"] = torch.from_numpy(np.ascontiguousarray(values))
    model.load_state_dict(state)
    return model


def transformers_pictures(pictures: list[np.ndarray], ids: list[int], pad: int) -> dict[str, torch.Tensor]:
    """What it takes with a prompt's ids: the pictures, uint8 [height, width, 3], at both moments of a video."""
    patches = np.concatenate([cut(pixels)[0] for pixels in pictures]).reshape(-1, 3, 1, SIZE * SIZE)
    values = patches.repeat(2, axis=2).reshape(len(patches), -1) / 127.5 - 1
    sizes = [(1, *(side // SIZE for side in pixels.shape[:2])) for pixels in pictures]
    return {"pixel_values": torch.from_numpy(values).float(), "image_grid_thw": torch.tensor(sizes),
            "mm_token_type_ids": (torch.tensor([ids]) == pad).int()}


def _text_config(s: Shape):
    from transformers import Qwen3_5TextConfig

    kinds = ["full_attention" if s.is_attention(i) else "linear_attention" for i in range(s.n_layers)]
    return Qwen3_5TextConfig(
        vocab_size=s.n_vocab, hidden_size=s.hidden, intermediate_size=s.ffn, num_hidden_layers=s.n_layers,
        num_attention_heads=s.n_heads, num_key_value_heads=s.n_kv_heads, head_dim=s.head_dim,
        linear_conv_kernel_dim=s.conv_width, linear_key_head_dim=s.linear_head_dim,
        linear_value_head_dim=s.linear_head_dim, linear_num_key_heads=s.n_key_heads,
        linear_num_value_heads=s.n_value_heads, rms_norm_eps=s.norm_eps, max_position_embeddings=s.context,
        tie_word_embeddings=s.tied, eos_token_id=None, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": s.rope_base, "mrope_section": [11, 11, 10],
                         "mrope_interleaved": True, "partial_rotary_factor": s.rope_dim / s.head_dim},
        layer_types=kinds)


def _text_state(network: Network) -> dict[str, torch.Tensor]:
    draft = f"blk.{network.shape.n_layers}."
    return dict(_to_transformers(name, values, network.shape) for name, values in network.state_dict().items()
                if not name.startswith(draft))


def _to_transformers(name: str, values: torch.Tensor, shape: Shape) -> tuple[str, torch.Tensor]:
    """A tensor's name and values in transformers: norms but one are less 1, value heads ordered otherwise."""
    if name.endswith("norm.weight") and "ssm_norm" not in name:
        values = values - 1
    if name in NAMES:
        return NAMES[name], values
    _, layer, tensor = name.split(".", 2)
    value_dim = shape.n_value_heads * shape.linear_head_dim
    if tensor in ("attn_qkv.weight", "ssm_conv1d.weight"):
        other, v = values[:-value_dim], values[-value_dim:]
        values = torch.cat([other, _reorder_heads(v, shape)])
    elif tensor in ("attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_log_a", "ssm_dt.bias"):
        values = _reorder_heads(values, shape)
    elif tensor == "ssm_out.weight":
        values = _reorder_heads(values.T, shape).T.contiguous()
    if tensor == "ssm_conv1d.weight":
        values = values[:, None]
    return f"model.layers.{layer}.{LAYER_NAMES[tensor]}", values


def _reorder_heads(rows: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Rows of value heads, from the file's order, where head j reads key head j mod n_k, to transformers',
    where it reads j // (n_v / n_k)."""
    by_head = rows.unflatten(0, (shape.n_value_heads // shape.n_key_heads, shape.n_key_heads, -1))
    return by_head.transpose(0, 1).flatten(0, 2)


def main():
    checkpoint = load_checkpoint(sys.argv[1])
    path = Path(sys.argv[2]) if len(sys.argv) > 2 else FILE
    template = (ROOT / "chat_template.jinja").read_text(encoding="utf-8")
    write_gguf(path, checkpoint.network, checkpoint.tokenizer, template)
    tower_path = Path(sys.argv[3]) if len(sys.argv) > 3 else path.with_name(TOWER_FILE.name)
    if checkpoint.tower is not None:
        write_tower(tower_path, checkpoint.tower)
    for written in (path, tower_path)[:1 + (checkpoint.tower is not None)]:
        print(f"{written}: {written.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
