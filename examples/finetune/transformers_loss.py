#!/usr/bin/env python3
"""The mean loss that transformers gives the first samples of a token file, as `moiety eval` does.

    transformers_loss.py MODEL TOKENS.tok --seq-len 256 --samples 24

MODEL is a Hugging Face folder, or a GGUF file, which transformers then reads by itself. Computes in
float32 on the CPU and prints one line of JSON. Exit code 77 without torch and transformers.
"""

import argparse
import json
import pathlib
import struct
import sys

try:
    import torch
    import transformers
except ImportError as e:
    print(f"skipped: {e}", file=sys.stderr)
    sys.exit(77)


def read_tokens(path, count):
    """The first `count` ids (docs/spec/trainer.md#token-files)."""
    data = memoryview(pathlib.Path(path).read_bytes())
    if bytes(data[:8]) != b"MOIETOK1":
        sys.exit(f"transformers_loss.py: {path}: is no token file")
    (width,) = struct.unpack_from("<I", data, 12)
    tokens, _, at = struct.unpack_from("<QQQ", data, 16)
    if tokens < count:
        sys.exit(f"transformers_loss.py: {path}: has {tokens} tokens, {count} are needed")
    ids = data[at : at + count * width].cast("H" if width == 2 else "I")
    return torch.tensor(list(ids), dtype=torch.long)


def load_model(path):
    where = pathlib.Path(path)
    if where.is_dir():
        return transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    return transformers.AutoModelForCausalLM.from_pretrained(
        where.parent, gguf_file=where.name, dtype=torch.float32
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokens")
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    a = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    ids = read_tokens(a.tokens, a.samples * a.seq_len + 1)
    model = load_model(a.model).eval()
    total = 0.0
    with torch.inference_mode():
        for i in range(a.samples):
            sample = ids[i * a.seq_len : i * a.seq_len + a.seq_len + 1]
            logits = model(input_ids=sample[None, :-1]).logits[0].float()
            total += torch.nn.functional.cross_entropy(logits, sample[1:], reduction="sum").item()
    loss = total / (a.samples * a.seq_len)
    print(json.dumps({"loss": loss, "tokens": a.samples * a.seq_len, "transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
