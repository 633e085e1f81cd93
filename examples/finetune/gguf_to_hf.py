#!/usr/bin/env python3
"""Writes a Llama in GGUF as a Hugging Face folder: config.json, model.safetensors, tokenizer.json,
tokenizer_config.json and generation_config.json. Needs the package `gguf`; no torch.

    gguf_to_hf.py MODEL.gguf FOLDER [--dtype float32|bfloat16]

Quantized weights become the numbers that they stand for. Memory holds one tensor at a time.
"""

import argparse
import json
import pathlib
import re
import struct
import sys

import gguf
import numpy as np

GPT2_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# How a text is cut into words, by tokenizer.ggml.pre.
PRE_TOKENIZERS = {
    "gpt-2": GPT2_SPLIT,
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2_SPLIT],
    },
    "llama-bpe": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False},
            {**GPT2_SPLIT, "use_regex": False},
        ],
    },
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class Refused(Exception):
    """The file is none that this program converts."""


class Metadata:
    def __init__(self, reader):
        self.reader = reader
        if self.get("general.architecture") != "llama":
            raise Refused(f"general.architecture = {self.get('general.architecture')!r}: expected 'llama'")

    def get(self, key, default=None):
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key):
        value = self.get(key)
        if value is None:
            raise Refused(f"{key} is missing")
        return value


def hf_name(name):
    """The name in a Hugging Face folder, and the part of the layer that it is."""
    if name in OUTSIDE:
        return OUTSIDE[name], None
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in IN_LAYER:
        raise Refused(f"tensor {name}: is no part of a Llama without biases and scaled positions")
    return f"model.layers.{match[1]}.{IN_LAYER[match[2]]}.weight", match[2]


def split_halves(rows, heads):
    """Rows of q or k as transformers has them. GGUF rotates neighbours (2i, 2i + 1) of a head, and
    transformers the pair (i, i + C/2): the even rows of a head come first, then the odd ones."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def read_config(meta, tensors, dtype):
    heads, size = meta.need("llama.attention.head_count"), meta.need("llama.embedding_length")
    if meta.get("llama.rope.scaling.type", "none") != "none":
        raise Refused(f"llama.rope.scaling.type = {meta.get('llama.rope.scaling.type')!r}: positions are scaled")
    head_dim = meta.get("llama.attention.key_length", size // heads)
    rotated = meta.get("llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise Refused(f"llama.rope.dimension_count = {rotated}: a head has {head_dim}")
    theta = meta.get("llama.rope.freq_base", 10000.0)
    ids = {name: meta.get(f"tokenizer.ggml.{key}_token_id") for name, key in
           [("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")]}
    return ids | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "dtype": dtype,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": size,
        "initializer_range": 0.02,
        "intermediate_size": meta.need("llama.feed_forward_length"),
        "max_position_embeddings": meta.need("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": meta.need("llama.block_count"),
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "rms_norm_eps": float(np.float32(meta.need("llama.attention.layer_norm_rms_epsilon")).astype(str)),
        "rope_theta": float(theta),
        "tie_word_embeddings": all(t.name != "output.weight" for t in tensors),
        "torch_dtype": dtype,
        "vocab_size": len(meta.need("tokenizer.ggml.tokens")),
    }


def to_bfloat16(values):
    """The upper halves of the numbers, rounded to nearest even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")


def write_weights(tensors, config, path):
    narrow = config["dtype"] == "bfloat16"
    header, at, plan = {"__metadata__": {"format": "pt"}}, 0, []
    for tensor in tensors:
        name, part = hf_name(tensor.name)
        shape = [int(n) for n in reversed(tensor.shape)]
        end = at + int(np.prod(shape)) * (2 if narrow else 4)
        header[name] = {"dtype": "BF16" if narrow else "F32", "shape": shape, "data_offsets": [at, end]}
        plan.append((tensor, part, shape))
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor, part, shape in plan:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("<f4").reshape(shape)
            if part in heads:
                values = split_halves(values, heads[part])
            out.write((to_bfloat16(values) if narrow else np.ascontiguousarray(values)).tobytes())


def write_tokenizer(meta, folder):
    if meta.need("tokenizer.ggml.model") != "gpt2":
        raise Refused(f"tokenizer.ggml.model = {meta.get('tokenizer.ggml.model')!r}: expected 'gpt2', byte-level BPE")
    pre = meta.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in PRE_TOKENIZERS:
        raise Refused(f"tokenizer.ggml.pre = {pre!r}: known are {', '.join(PRE_TOKENIZERS)}")
    tokens, types = meta.need("tokenizer.ggml.tokens"), meta.need("tokenizer.ggml.token_type")
    special, given = int(gguf.TokenType.CONTROL), int(gguf.TokenType.USER_DEFINED)
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": kind == special}
        for i, (token, kind) in enumerate(zip(tokens, types)) if kind in (special, given)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": meta.need("tokenizer.ggml.merges"),
        },
    }
    write_json(folder / "tokenizer.json", tokenizer)
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
             "model_max_length": meta.need("llama.context_length")}
    for name, key in [("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")]:
        if (token := meta.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            words[name] = tokens[token]
    if template := meta.get("tokenizer.chat_template"):
        words["chat_template"] = template
    write_json(folder / "tokenizer_config.json", words)


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def convert(model, folder, dtype="float32"):
    reader = gguf.GGUFReader(model)
    meta = Metadata(reader)
    config = read_config(meta, reader.tensors, dtype)
    for tensor in reader.tensors:
        hf_name(tensor.name)  # what is refused is refused before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(meta, folder)
    write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ids)
    write_weights(reader.tensors, config, folder / "model.safetensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    a = parser.parse_args()
    try:
        convert(a.model, a.folder, a.dtype)
    except (Refused, OSError, ValueError) as e:
        sys.exit(f"gguf_to_hf.py: {a.model}: {e}")


if __name__ == "__main__":
    main()
