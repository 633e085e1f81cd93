#!/usr/bin/env python3
"""Trains a model under each recipe, and compares the losses.

On the CPU with weights sharded by gtp 2; on a GPU with one rank. The model is the demo's, or one of 50
million parameters (--model 50m). Prints one row a recipe and seed (JSON, one a line): `value`, the mean
training loss of the last steps (10 on the CPU, 20 on a GPU), `gap`, what it is above that of bf16 (0.01 is
1 %), `ratio`, bf16's loss over it, and the same of the validation loss after the last step. Exits with 1 if
a gap is over 2 % (CPU) or 1.5 % (GPU). Runs of a seed begin with the same weights and see the same data; as
many of them as have two cores each go on at a time. Data is what demo.sh prepares.

With --device both each recipe is trained by one rank on a GPU and by one on the CPU, and a row is added for
each: `gap` is what the GPU's loss is above the CPU's, either way at most 1 %.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ["bf16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"]  # the first is what the others are compared with
# By device: the layout, the steps whose mean is the loss, and the gap that is allowed.
DEVICES = {"cpu": ("gtp 2", 2, ["--parallel.ep=1", "--parallel.gtp=2", "--parallel.egtp=2"], 10, 0.02),
           "cuda": ("one GPU", 1, ["--parallel.ep=1"], 20, 0.015)}
DEVICES["both"] = DEVICES["cuda"]
CPU_GAP = 0.01  # of a GPU's loss and a CPU's
MODELS = {"demo": [],
          "50m": ["--model.d_model=512", "--model.layers=9", "--model.heads=8", "--model.kv_heads=4",
                  "--moe.d_ffn=384", "--data.seq_len=512", "--train.global_batch=16", "--optim.lr=1e-3",
                  "--optim.min_lr=1e-4", "--init.std=0.02"]}


def train(a, device, recipe, seed, cores, directory):
    """The records of a run on these cores."""
    _, ranks, layout, _, _ = DEVICES[a.device]
    batch = (16 if a.model == "50m" else 8) // ranks
    run = directory / f"{device}-{recipe}-{seed}"
    command = [a.moiety, "train", "--quiet", "--config", a.config, "--run", run, f"--run.device={device}",
               f"--run.ranks={ranks}", f"--run.seed={seed}", f"--train.micro_batch={batch}", *layout,
               *MODELS[a.model], f"--precision.recipe={recipe}", f"--train.steps={a.steps}",
               "--eval.every=0", "--checkpoint.interval=0",
               f"--data.train={[str(a.data) + '.train.tok']}",
               f"--data.valid={[str(a.data) + '.valid.tok']}"]
    try:
        done = subprocess.run(command, preexec_fn=lambda: os.sched_setaffinity(0, cores),
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                              timeout=a.limit)
    except subprocess.TimeoutExpired:
        sys.exit(f"recipes: {recipe} took more than {a.limit} s")
    if done.returncode != 0:
        sys.exit(f"recipes: {recipe} ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    with open(run / "metrics.jsonl") as lines:
        return [json.loads(line) for line in lines]


def losses(records, steps, last):
    """The final training loss, the validation loss, and the median time of a step."""
    trained = [r for r in records if "event" not in r]
    if [r["step"] for r in trained] != list(range(1, steps + 1)):
        sys.exit(f"recipes: a run of {steps} steps has records of {len(trained)}")
    valid = [r["loss"] for r in records if r.get("event") == "eval" and r["step"] == steps]
    return (statistics.fmean(r["loss"] for r in trained[-last:]), valid[-1],
            statistics.median(r["step_ms"] for r in trained))


def beside_the_cpu(a, results, recipe, seed, facts):
    """The row of a recipe on both devices."""
    (gpu, gpu_valid, _), (cpu, cpu_valid, ms) = results["cuda", recipe, seed], results["cpu", recipe, seed]
    return {"name": "recipe_device_loss", "case": f"{a.model} one rank {a.steps} steps {recipe}", "device": "cpu",
            "value": round(cpu, 4), "unit": "nats", "ms": round(ms, 3), "ratio": round(cpu / gpu, 4),
            "against": "one GPU", "target": round(1 - CPU_GAP, 3), "gap": round(gpu / cpu - 1, 5),
            "valid_gap": round(gpu_valid / cpu_valid - 1, 5), "valid_loss": round(cpu_valid, 4), **facts}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipes", nargs="*", help=f"beside bf16 (default {' '.join(RECIPES[1:])})")
    parser.add_argument("--moiety", type=Path, default=ROOT / "build/cpu/bin/moiety",
                        help="the program (default build/cpu/bin/moiety)")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/demo.toml")
    parser.add_argument("--data", type=Path, default=ROOT / "runs/demo-data/demo",
                        help="before .train.tok and .valid.tok (default runs/demo-data/demo)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--jobs", type=int, help="runs at a time (default: two cores each)")
    parser.add_argument("--limit", type=float, default=3600, help="seconds of a run (default 3600)")
    a = parser.parse_args()
    layout, ranks, _, last, bound = DEVICES[a.device]
    if a.steps < last:
        parser.error(f"--steps {a.steps}: the loss is the mean of the last {last}")

    recipes = RECIPES[:1] + (a.recipes or RECIPES[1:])
    first = "cuda" if a.device == "both" else a.device
    devices = ["cpu", "cuda"] if a.device == "both" else [a.device]
    runs = [(device, recipe, seed) for device in devices for seed in a.seeds for recipe in recipes]
    cores = sorted(os.sched_getaffinity(0))
    jobs = a.jobs or max(1, min(len(runs), len(cores) // 2))
    each = max(1, len(cores) // jobs)
    free = SimpleQueue()
    for j in range(jobs):
        free.put(cores[j * each:(j + 1) * each] or cores)

    def on_free_cores(run):
        mine = free.get()
        try:
            return losses(train(a, *run, mine, Path(directory)), a.steps, last)
        finally:
            free.put(mine)

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(jobs) as pool:
        results = dict(zip(runs, pool.map(on_free_cores, runs)))
    over = False
    for seed, recipe in ((seed, recipe) for seed in a.seeds for recipe in recipes):
        loss, valid, ms = results[first, recipe, seed]
        bf16_loss, bf16_valid, _ = results[first, recipes[0], seed]
        facts = {"seed": seed, "ranks": ranks, "cores": each, "runs_at_a_time": jobs}
        row = {"name": "recipe_loss", "case": f"{a.model} {layout} {a.steps} steps {recipe}",
               "device": first, "value": round(loss, 4), "unit": "nats", "ms": round(ms, 3)}
        if recipe != recipes[0]:
            row |= {"ratio": round(bf16_loss / loss, 4), "against": recipes[0],
                    "target": round(1 / (1 + bound), 3), "gap": round(loss / bf16_loss - 1, 5),
                    "valid_gap": round(valid / bf16_valid - 1, 5)}
        print(json.dumps(row | {"valid_loss": round(valid, 4), **facts}))
        over |= loss > (1 + bound) * bf16_loss
        if a.device == "both":
            row = beside_the_cpu(a, results, recipe, seed, facts)
            print(json.dumps(row))
            over |= abs(row["gap"]) > CPU_GAP
    return over


if __name__ == "__main__":
    sys.exit(main())
