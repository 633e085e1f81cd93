#!/usr/bin/env python3
"""Trains the demo's model under each recipe with weights sharded by gtp 2, and compares the losses.

Prints one row a recipe (JSON, one a line): `value`, the mean training loss of the last 10 steps, `gap`,
what it is above that of bf16 (0.01 is 1 %), `ratio`, bf16's loss over it, and the same of the validation
loss after the last step. Exits with 1 if a gap is over 2 %. Runs begin with the same weights and see the
same data; as many of them as have two cores each go on at a time. Data is what demo.sh prepares.
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
RANKS = 2
LAST = 10  # steps
BOUND = 0.02


def train(a, recipe, cores, directory):
    """The records of a run on these cores."""
    run = directory / recipe
    command = [a.moiety, "train", "--quiet", "--config", a.config, "--run", run,
               f"--run.ranks={RANKS}", f"--run.seed={a.seed}", "--parallel.ep=1",
               f"--parallel.gtp={RANKS}", f"--parallel.egtp={RANKS}", f"--precision.recipe={recipe}",
               f"--train.steps={a.steps}", "--eval.every=0", "--checkpoint.interval=0",
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


def losses(records, steps):
    """The final training loss, the validation loss, and the median time of a step."""
    trained = [r for r in records if "event" not in r]
    if [r["step"] for r in trained] != list(range(1, steps + 1)):
        sys.exit(f"recipes: a run of {steps} steps has records of {len(trained)}")
    valid = [r["loss"] for r in records if r.get("event") == "eval" and r["step"] == steps]
    return (statistics.fmean(r["loss"] for r in trained[-LAST:]), valid[-1],
            statistics.median(r["step_ms"] for r in trained))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipes", nargs="*", help=f"beside bf16 (default {' '.join(RECIPES[1:])})")
    parser.add_argument("--moiety", type=Path, default=ROOT / "build/cpu/bin/moiety",
                        help="the program (default build/cpu/bin/moiety)")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/demo.toml")
    parser.add_argument("--data", type=Path, default=ROOT / "runs/demo-data/demo",
                        help="before .train.tok and .valid.tok (default runs/demo-data/demo)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, help="runs at a time (default: two cores each)")
    parser.add_argument("--limit", type=float, default=3600, help="seconds of a run (default 3600)")
    a = parser.parse_args()
    if a.steps < LAST:
        parser.error(f"--steps {a.steps}: the loss is the mean of the last {LAST}")

    recipes = RECIPES[:1] + (a.recipes or RECIPES[1:])
    cores = sorted(os.sched_getaffinity(0))
    jobs = a.jobs or max(1, min(len(recipes), len(cores) // RANKS))
    each = max(1, len(cores) // jobs)
    free = SimpleQueue()
    for j in range(jobs):
        free.put(cores[j * each:(j + 1) * each] or cores)

    def on_free_cores(recipe):
        mine = free.get()
        try:
            return losses(train(a, recipe, mine, Path(directory)), a.steps)
        finally:
            free.put(mine)

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(on_free_cores, recipes))
    bf16_loss, bf16_valid, _ = results[0]
    for recipe, (loss, valid, ms) in zip(recipes, results):
        row = {"name": "recipe_loss", "case": f"demo gtp {RANKS} {a.steps} steps {recipe}",
               "device": "cpu", "value": round(loss, 4), "unit": "nats", "ms": round(ms, 3)}
        if recipe != recipes[0]:
            row |= {"ratio": round(bf16_loss / loss, 4), "against": recipes[0],
                    "target": round(1 / (1 + BOUND), 2), "gap": round(loss / bf16_loss - 1, 5),
                    "valid_gap": round(valid / bf16_valid - 1, 5)}
        print(json.dumps(row | {"valid_loss": round(valid, 4), "seed": a.seed, "ranks": RANKS,
                                "cores": each, "runs_at_a_time": jobs}))
    return any(loss > (1 + BOUND) * bf16_loss for loss, _, _ in results)


if __name__ == "__main__":
    sys.exit(main())
