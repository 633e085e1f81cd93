"""Peer of finetune_step.py: the same folder trained by transformers itself, eager and compiled.

Writes FOLDER if it is not there: a model with random weights, saved by transformers, and a byte-level
tokenizer.json of the model's vocabulary. Then serves rounds (common.py) of training steps as a user of
transformers writes them: from_pretrained in bf16 with experts_implementation="grouped_mm" and PyTorch's
attention, micro-batches with labels, clipping to 1, fused AdamW on the bf16 weights (no fp32 masters).
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from common import parser, serve

MODELS = {
    # SmolLM2-135M with four experts a layer: what examples/finetune trains.
    "smollm2": lambda: transformers.MixtralConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, num_local_experts=4,
        num_experts_per_tok=2, tie_word_embeddings=True, rope_theta=1e5, max_position_embeddings=8192,
        sliding_window=None, router_jitter_noise=0.0),
    # Four layers of Qwen3-30B-A3B.
    "qwen3": lambda: transformers.Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, intermediate_size=6144,
        num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        tie_word_embeddings=False, rope_theta=1e6, max_position_embeddings=8192),
}


def byte_characters():
    """The characters that stand for bytes in byte-level tokenizers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]


def write_folder(folder, config):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    words = byte_characters()
    words += [f"<unused {i}>" for i in range(config.vocab_size - len(words) - 1)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": len(words), "content": "<end>", "special": True, "single_word": False, "lstrip": False,
           "rstrip": False, "normalized": False}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": {word: i for i, word in enumerate(words)}, "merges": []}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


class Trainer:
    def __init__(self, a, compiled):
        self.a = a
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            a.folder, dtype=torch.bfloat16, experts_implementation="grouped_mm",
            attn_implementation="sdpa").to("cuda")
        self.model.train()
        self.forward = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
        vocab = self.model.config.vocab_size
        self.batch = torch.randint(0, vocab, (a.micro_batches, a.micro_batch, a.seq_len), device="cuda")

    def step(self):
        for ids in self.batch:
            (self.forward(input_ids=ids, labels=ids, use_cache=False).loss / len(self.batch)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def milliseconds(self, steps):
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)


def main():
    p = parser()
    p.add_argument("--model", choices=list(MODELS), default="smollm2")
    p.add_argument("--folder", type=Path, required=True)
    p.add_argument("--seq-len", type=int, default=1024)
    p.add_argument("--micro-batch", type=int, default=8)
    p.add_argument("--micro-batches", type=int, default=2)
    p.add_argument("--steps", type=int, default=20)
    a = p.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not a.folder.exists():
        write_folder(a.folder, MODELS[a.model]())
    peers = {}
    for name, compiled in {"transformers, eager": False, "transformers, torch.compile": True}.items():
        try:
            trainer = Trainer(a, compiled)
            trainer.milliseconds(5)
            peers[name] = trainer
        except Exception as error:  # a peer that does not run here is a line, and no row
            print(f"{name}: left out: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        torch.cuda.empty_cache()

    def round_of_rows():
        tokens = a.micro_batches * a.micro_batch * a.seq_len
        for name, trainer in peers.items():
            torch.cuda.reset_peak_memory_stats()
            ms = trainer.milliseconds(a.steps)
            yield {"name": "finetune_step", "case": a.model, "device": "cuda", "peer": name,
                   "value": round(tokens / ms * 1e3, 1), "unit": "tokens/s", "ms": round(ms, 3),
                   "memory": torch.cuda.max_memory_allocated()}
            torch.cuda.empty_cache()

    serve(round_of_rows)


if __name__ == "__main__":
    main()
