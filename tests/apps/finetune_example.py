#!/usr/bin/env python3
"""The parts of examples/finetune that need no download, on a tiny Llama in GGUF: its conversion to a
Hugging Face folder, and the way of run.sh through import, upcycling, training and export. Exit code
77 without the packages gguf and numpy; what needs torch and transformers is skipped by name.

    finetune_example.py PROGRAM
"""

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples/finetune")]
for module in ("gguf", "numpy"):
    if importlib.util.find_spec(module) is None:
        print(f"skipped: the Python package {module} is not installed")
        sys.exit(77)
PROGRAM = sys.argv.pop(1)

import gguf
import gguf_to_hf
import numpy as np

D, HEADS, KV_HEADS, HEAD_DIM, F, LAYERS = 32, 4, 2, 8, 48, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "\u0120 the", "a n", "i n"]


def byte_alphabet():
    """The characters that stand for bytes in the vocabularies of byte-level tokenizers."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in shown]
    return [chr(b) for b in shown] + [chr(256 + i) for i in range(len(others))]


def permuted(w, heads):
    """Rows as llama.cpp's converter writes them: of a head row j of the first half to 2j, of the
    second to 2j + 1."""
    out = np.empty_like(w)
    half = HEAD_DIM // 2
    for h in range(heads):
        for j in range(half):
            out[h * HEAD_DIM + 2 * j] = w[h * HEAD_DIM + j]
            out[h * HEAD_DIM + 2 * j + 1] = w[h * HEAD_DIM + half + j]
    return out


class Finetune(unittest.TestCase):
    def setUp(self):
        kept = tempfile.TemporaryDirectory()
        self.addCleanup(kept.cleanup)
        self.dir = pathlib.Path(kept.name)
        draw = np.random.default_rng(1)
        self.vocab = TOKENS + byte_alphabet() + [m.replace(" ", "") for m in MERGES]
        self.weights = {"model.embed_tokens.weight": (len(self.vocab), D), "model.norm.weight": (D,)}
        for layer in range(LAYERS):
            rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "o": D}
            at = f"model.layers.{layer}."
            for part, n in rows.items():
                self.weights[at + f"self_attn.{part}_proj.weight"] = (n, HEADS * HEAD_DIM if part == "o" else D)
            for part, shape in {"gate": (F, D), "up": (F, D), "down": (D, F)}.items():
                self.weights[at + f"mlp.{part}_proj.weight"] = shape
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self.weights[at + norm + ".weight"] = (D,)
        for name, shape in self.weights.items():
            scale, mean = (0.1, 1.0) if len(shape) == 1 else (0.3, 0.0)
            self.weights[name] = (draw.standard_normal(shape) * scale + mean).astype(np.float32)

    def write_gguf(self, name="m.gguf", **changes):
        w = gguf.GGUFWriter(self.dir / name, changes.get("architecture", "llama"))
        w.add_block_count(LAYERS)
        w.add_context_length(128)
        w.add_embedding_length(D)
        w.add_feed_forward_length(F)
        w.add_head_count(HEADS)
        w.add_head_count_kv(KV_HEADS)
        w.add_layer_norm_rms_eps(1e-5)
        w.add_rope_freq_base(50000.0)
        w.add_rope_dimension_count(HEAD_DIM)
        if "scaling" in changes:
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_vocab_size(len(self.vocab))
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre(changes.get("pre", "smollm"))
        w.add_token_list(self.vocab)
        types = [gguf.TokenType.CONTROL] * len(TOKENS) + [gguf.TokenType.NORMAL] * (len(self.vocab) - len(TOKENS))
        w.add_token_types(types)
        w.add_token_merges(MERGES)
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)
        names = {hf: name for name, hf in gguf_to_hf.OUTSIDE.items()}
        parts = {hf: name for name, hf in gguf_to_hf.IN_LAYER.items()}
        for hf, value in self.weights.items():
            if hf in names:
                w.add_tensor(names[hf], value)
                continue
            layer, part = hf.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(part)
            w.add_tensor(f"blk.{layer}.{parts[part]}.weight", permuted(value, heads) if heads else value)
        if "extra" in changes:
            w.add_tensor(changes["extra"], np.zeros(4, np.float32))
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        return self.dir / name

    def folder(self, dtype="float32"):
        gguf_to_hf.convert(self.write_gguf(), self.dir / "hf", dtype)
        return self.dir / "hf"

    def run_program(self, *arguments):
        done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, f"{arguments}: {done.stderr}")
        return done.stdout

    def read_folder(self, folder):
        data = (folder / "model.safetensors").read_bytes()
        n = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + n])
        return {
            name: (t["dtype"], t["shape"], data[8 + n + t["data_offsets"][0] : 8 + n + t["data_offsets"][1]])
            for name, t in header.items() if name != "__metadata__"
        }  # fmt: skip

    def test_weights_come_back_and_rows_of_heads_in_their_order(self):
        tensors = self.read_folder(self.folder())
        self.assertEqual(set(tensors), set(self.weights))
        for name, (dtype, shape, data) in tensors.items():
            self.assertEqual((dtype, shape), ("F32", list(self.weights[name].shape)))
            self.assertEqual(data, self.weights[name].tobytes(), name)
        config = json.loads((self.dir / "hf/config.json").read_text())
        self.assertEqual((config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]), (50000.0, 1e-5, True))

    def test_bfloat16_is_rounded_to_even(self):
        values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -2.5], np.float32)
        self.assertEqual([hex(x) for x in gguf_to_hf.to_bfloat16(values)], ["0x3f80", "0x3f80", "0x3f82", "0x3f81", "0xc020"])
        self.assertEqual(self.read_folder(self.folder("bfloat16"))["model.norm.weight"][0], "BF16")

    def test_what_is_not_converted_is_refused_by_name(self):
        for changes, part in [({"architecture": "phi3"}, "'phi3'"), ({"pre": "tekken"}, "'tekken'"),
                              ({"scaling": 1}, "'yarn'"), ({"extra": "blk.0.attn_q.bias"}, "blk.0.attn_q.bias"),
                              ({"extra": "rope_freqs.weight"}, "rope_freqs.weight")]:  # fmt: skip
            path = self.write_gguf("bad.gguf", **changes)
            with self.assertRaisesRegex(gguf_to_hf.Refused, part.replace(".", r"\.")):
                gguf_to_hf.convert(path, self.dir / "none")

    def test_the_way_of_run_sh(self):
        folder, upcycle = self.folder(), ["--upcycle", "experts=4,top_k=2"]
        self.run_program("import", "--hf", folder, "--out", self.dir / "dense", "--data.seq_len=16")
        self.run_program("import", "--hf", folder, "--out", self.dir / "moe", *upcycle, "--data.seq_len=16")
        config = self.run_program("import", "--hf", folder, *upcycle, "--data.seq_len=16", "--print-config")
        (self.dir / "model.toml").write_text(config)
        (self.dir / "text.txt").write_text("the cat in the hat, and then a man in an inn. " * 60)
        self.run_program("prepare", self.dir / "text.txt", "--tokenizer", folder, "--out", self.dir / "t", "--quiet")

        def loss(checkpoint):
            words = ["eval", checkpoint, "--data", self.dir / "t.tok", "--samples", "8", "--json"]
            return json.loads(self.run_program(*words))["loss"]

        dense, before = loss(self.dir / "dense"), loss(self.dir / "moe")
        self.assertLess(abs(dense - before), 1e-5 * dense)
        self.run_program(
            "train", "--config", self.dir / "model.toml", "--config", ROOT / "configs/finetune.toml", "--run",
            self.dir / "run", f"--run.init_from={self.dir / 'moe'}", "--data.seq_len=16", "--train.steps=8",
            "--train.micro_batch=4", f"--data.train=['{self.dir / 't.tok'}']", "--data.document_mask=false",
            "--precision.recipe=fp32", "--optim.lr=1e-2", "--log.peak_tflops=1",
        )  # fmt: skip
        after = loss(self.dir / "run")
        self.assertLess(after, before - 0.1)
        self.run_program("export", self.dir / "run", "--hf", self.dir / "out", "--dtype", "fp32")
        self.assertTrue((self.dir / "out/tokenizer.json").exists())
        self.compare_with_transformers(dense, after)

    def compare_with_transformers(self, dense, after):
        def theirs(model):
            command = [sys.executable, ROOT / "examples/finetune/transformers_loss.py", model, self.dir / "t.tok"]
            done = subprocess.run([*command, "--seq-len", "16", "--samples", "8"], capture_output=True, text=True)
            if done.returncode == 77:
                self.skipTest(done.stderr.strip())
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(done.stdout)["loss"]

        self.assertLess(abs(theirs(self.dir / "out") - after), 1e-5 * after)
        self.assertLess(abs(theirs(self.dir / "m.gguf") - dense), 1e-5 * dense)


if __name__ == "__main__":
    unittest.main()
