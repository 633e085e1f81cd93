#!/usr/bin/env python3
"""Tokens per second of fine-tuning a published model's shapes on one GPU: `moiety train` and transformers.

A folder of Hugging Face with random weights is written where this runs. Ours goes the user's way: `moiety
prepare` makes a token file of random ids, `moiety train --run.init_from=FOLDER` trains with
configs/finetune.toml, in bf16 with fp32 masters; its figure is the median of the steps after the first
ten. The peer is bench/peers/finetune_step.py. Rounds alternate. Prints rows and a table, as compare.py.
"""

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from random import Random

from compare import BENCH, Peer, in_turns, peer_python, stop

TARGET = 1.3
SKIPPED = 10  # steps, of which some record the graph


def run(*command):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        stop(f"{' '.join(map(str, command[:3]))} ended with exit code {done.returncode}: {done.stderr[-3000:]}")
    return done.stdout


def write_random_tokens(path, vocab, count):
    """As llm.c writes them: a header of 256 numbers of 32 bits, then ids of 16 or 32 bits."""
    wide = vocab > 65536
    ids = array("I" if wide else "H", Random(1).choices(range(vocab - 1), k=count))
    header = [20240801 if wide else 20240520, 1, count] + [0] * 253
    path.write_bytes(struct.pack("<256i", *header) + ids.tobytes())


def our_round(a, work):
    config = work / "model.toml"
    log = work / "run" / "metrics.jsonl"
    if not config.exists():
        sizes = [f"--data.seq_len={a.seq_len}"]
        config.write_text(run(a.moiety, "import", "--hf", work / "hf", *sizes, "--print-config"))
        vocab = json.loads((work / "hf" / "config.json").read_text())["vocab_size"]
        tokens = a.micro_batches * a.micro_batch * a.seq_len * (a.steps + SKIPPED)
        write_random_tokens(work / "random.bin", vocab, tokens + a.seq_len)
        run(a.moiety, "prepare", work / "random.bin", "--from", "llmc", "--tokenizer", work / "hf", "--out",
            work / "random")
    data = next(work.glob("random*.tok"))
    run("rm", "-rf", work / "run")
    batch = a.micro_batches * a.micro_batch
    run(a.moiety, "train", "--quiet", "--config", config, "--config", BENCH.parent / "configs/finetune.toml",
        "--run", work / "run", f"--run.init_from={work / 'hf'}", "--run.device=cuda", f"--data.seq_len={a.seq_len}",
        f"--data.train=['{data}']", "--data.document_mask=false", f"--train.steps={a.steps + SKIPPED}",
        f"--train.micro_batch={a.micro_batch}", f"--train.global_batch={batch}", "--eval.every=0",
        "--checkpoint.interval=0", *a.options)
    steps = [r for r in map(json.loads, log.read_text().splitlines()) if "event" not in r]
    ms = statistics.median(r["step_ms"] for r in steps[SKIPPED:])
    return [{"name": "finetune_step", "case": a.model, "device": "cuda",
             "value": round(batch * a.seq_len / ms * 1e3, 1), "unit": "tokens/s", "ms": round(ms, 3)}]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=["smollm2", "qwen3"], default="smollm2")
    parser.add_argument("--moiety", type=Path, default=BENCH.parent / "build/gpu/bin/moiety")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step")
    parser.add_argument("--steps", type=int, default=20, help="timed in a round")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--python", help="that runs the peer (default: of bench/setup_peers.sh)")
    a, a.options = parser.parse_known_args()
    shared = [f"--{key}={getattr(a, key.replace('-', '_'))}"
              for key in ("model", "seq-len", "micro-batch", "micro-batches", "steps")]
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        peer = Peer([peer_python(a.python), BENCH / "peers/finetune_step.py", *shared, "--folder", work / "hf"],
                    dict(os.environ))
        in_turns(lambda: our_round(a, work), peer, a.repeat, TARGET)


if __name__ == "__main__":
    main()
