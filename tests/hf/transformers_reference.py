"""Tiny random models of transformers, and what it computes with them, for transformers_test.cpp.

    python3 transformers_reference.py make DIR          writes DIR/<case>/ for every case
    python3 transformers_reference.py describe DIR      with transformers 4: DIR/<case>/config.4.json
    python3 transformers_reference.py check DIR TOKENS  loads the folder DIR, fails on any missing or
                                                        unexpected key, and writes its logits to
                                                        DIR/../logits.safetensors

A case has the folder as transformers saves it, config.4.json as transformers 4 spells it, grads/ with the
gradients under the names that weights have in memory, and reference.safetensors: tokens, logits, loss.
tests/hf/golden holds what `make` with transformers 5.23 and `describe` with 4.57 wrote once.
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, __version__

SIZES = dict(vocab_size=48, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5)
ARCHITECTURES = {"qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM", "llama": "LlamaForCausalLM",
                 "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"}
CASES = {
    "qwen3_moe": dict(model_type="qwen3_moe", moe_intermediate_size=16, intermediate_size=40, num_experts=4,
                      num_experts_per_tok=2, norm_topk_prob=True, num_hidden_layers=3, mlp_only_layers=[1],
                      rope_theta=1e6),
    "qwen3_moe_tied": dict(model_type="qwen3_moe", moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
                           norm_topk_prob=False, tie_word_embeddings=True),
    "mixtral": dict(model_type="mixtral", intermediate_size=16, num_local_experts=4, num_experts_per_tok=2),
    "llama": dict(model_type="llama", intermediate_size=40, tie_word_embeddings=True, num_attention_heads=3,
                  num_key_value_heads=None, head_dim=None),
    "mistral": dict(model_type="mistral", intermediate_size=40, sliding_window=None),
    "qwen3": dict(model_type="qwen3", intermediate_size=40),
}


def config_of(case):
    sizes = dict(SIZES, **CASES[case])
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes, architectures=[ARCHITECTURES[CASES[case]["model_type"]]])


def describe(case, folder):
    config = config_of(case)
    setattr(config, "torch_dtype" if __version__.startswith("4.") else "dtype", torch.bfloat16)
    (folder / f"config.{__version__[0]}.json").write_text(config.to_json_string())


def results(model, tokens):
    out = model(input_ids=tokens, use_cache=False)
    loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(),
                                             reduction="sum")
    return out.logits.float(), loss


def make(case, folder):
    torch.manual_seed(sum(case.encode()))
    config = config_of(case)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():  # wide enough that no part is negligible, and exact in bf16
        for name, p in model.named_parameters():
            p.copy_((torch.randn_like(p) * 0.2 + (1 if "norm" in name else 0)).bfloat16().float())
    model.to(torch.bfloat16).save_pretrained(folder)
    # Read again: what rounds weights rounds the frequencies of positions too.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.randint(0, config.vocab_size, (2, 11))
    logits, loss = results(model, tokens)
    loss.backward()
    save_file({"tokens": tokens.int(), "logits": logits.detach().contiguous(), "loss": loss.detach()[None]},
              folder / "reference.safetensors")
    (folder / "grads").mkdir(exist_ok=True)
    shutil.copy(folder / "config.json", folder / "grads")
    save_file({n: p.grad.contiguous() for n, p in model.named_parameters()}, folder / "grads" / "model.safetensors")


def check(folder, tokens):
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32,
                                                        attn_implementation="eager")
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[kind]:
            sys.exit(f"{kind}: {found[kind]}")
    with torch.no_grad():
        logits, loss = results(model.eval(), load_file(tokens)["tokens"].long())
    save_file({"logits": logits.contiguous(), "loss": loss[None]}, Path(folder).parent / "logits.safetensors")


def main():
    print(f"transformers {__version__}, torch {torch.__version__}")
    if sys.argv[1] == "make":
        for case in CASES:
            make(case, Path(sys.argv[2]) / case)
    elif sys.argv[1] == "describe":
        for case in CASES:
            describe(case, Path(sys.argv[2]) / case)
    else:
        check(sys.argv[2], sys.argv[3])


main()
