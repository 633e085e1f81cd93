#!/usr/bin/env python3
"""The demo with every option that changes no bit, and with every recipe under every way of cutting.

    option_matrix.py PROGRAM [--cover] [--steps N] [--tokens S] [--jobs J] [--data FILE.tok]
                     [--device cpu|cuda] [--part K/N] [--only NAME]

Options: losses of all steps are equal to the bit over the whole product of the options of experts and
exchanges, once on one rank and once on two that share the experts. So are norms, but that
moe.glu_interleave changes the order in which they are summed, and with it their last digits. Recipes: with
tp 2, gtp 2 and ep 2 the mean of the last ten losses is within 1 % of that of one rank. Both are means over
three seeds: a cut adds in another order, and one seed alone was seen to differ by up to 1.4 % for that.

On a GPU (--device cuda): one rank, with every path of experts that a Hopper chip has, equal to the bit, and
cuda_plain near it; then each recipe and a model with frozen parts, within 1 % of the same on the CPU.

The default is the whole matrix of 200 steps of the demo, which takes an hour or two of two cores. --cover
takes rows that between them have every pair of values of any two options. --part 2/3 takes every third row,
from the second: a part on each of three machines, which agree if they print the same digests of losses;
each run's is printed as it ends. --only takes one matrix, or the recipes. Without --data, the synthetic
text stands for the demo's. Standard library alone.
"""
import argparse
import concurrent.futures
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WAITING = 1800.0  # seconds of a clock that a run may take on a busy machine
LAST = 10
LONG, LAST_LONG = 300, 20  # the same where a GPU is compared with the CPU
NEAR = 0.01
SEEDS = [1234, 2, 3]  # of recipes; a cover takes the first
SAME_NORM = 1e-9  # of norms that are summed in another order, in float64

SHARED = {"moe.expert_weights": ["packed", "indexed"], "moe.delay_wgrad": ["false", "true"],
          "memory.recompute": ["none", "moe", "full"], "moe.glu_interleave": [0, 32]}
# Of one rank, and of two, between which rows travel.
MATRICES = {
    "one rank": ({"run.ranks": 1, "parallel.ep": 1, "train.micro_batch": 8},
                 {**SHARED, "moe.layout": ["rank", "expert"]}),
    "ep 2": ({"run.ranks": 2, "parallel.ep": 2, "train.micro_batch": 2},
             {**SHARED, "moe.layout": ["rank", "expert"], "ep.zero_copy": ["off", "auto"],
              "ep.overlap": ["none", "wgrad", "shared", "micro_batch"], "ep.depth": [2, 3]}),
}
GPU_MATRICES = {
    "one GPU": ({"run.ranks": 1, "parallel.ep": 1, "train.micro_batch": 4, "run.device": "cuda"},
                {"moe.path": ["sm90", "sm90_fused"], "moe.expert_weights": ["packed", "indexed"],
                 "moe.delay_wgrad": ["false", "true"], "memory.recompute": ["none", "moe"],
                 "moe.layout": ["rank", "expert"]}),
}
# Beyond pairs of values, the product of these is what the whole matrix runs; others stay at their first.
CROSSED = {"moe.expert_weights", "moe.delay_wgrad", "memory.recompute", "moe.glu_interleave", "moe.layout",
           "ep.zero_copy", "moe.path"}
RECIPES = {name: {"precision.recipe": name} for name in ["bf16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"]}
RECIPES["fp8_tensor delayed"] = {**RECIPES["fp8_tensor"], "precision.scaling": "delayed"}
ALONE = {"run.ranks": 1, "parallel.ep": 1, "train.micro_batch": 8}
CUTS = {"gtp 2": {"run.ranks": 2, "parallel.ep": 1, "parallel.gtp": 2, "parallel.egtp": 2},
        "ep 2": {"run.ranks": 2, "parallel.ep": 2},
        "tp 2": {"run.ranks": 2, "parallel.ep": 1, "parallel.tp": 2, "train.micro_batch": 8}}
FROZEN = {"train.freeze": '["embed*", "layers.0.*", "*.router.*"]'}
# With tp 2 each slice of q, k and v is whole blocks of 128 rows.
SIZES = {"model.kv_heads": 8}


def product(options):
    crossed = [[(key, value) for value in (values if key in CROSSED else values[:1])]
               for key, values in options.items()]
    return [dict(row) for row in itertools.product(*crossed)]


def pairs(row):
    return set(itertools.combinations(sorted((key, str(value)) for key, value in row.items()), 2))


def cover(options):
    """Rows, each the one with most pairs of values that no row before has; the first has all defaults."""
    rows = [dict(row) for row in itertools.product(*[[(k, v) for v in vs] for k, vs in options.items()])]
    chosen, seen = [rows[0]], pairs(rows[0])
    while True:
        best = max(rows, key=lambda row: len(pairs(row) - seen))
        if not pairs(best) - seen:
            return chosen
        chosen.append(best)
        seen |= pairs(best)


def digest(steps):
    """Of what every run has: norms are not a part of it."""
    losses = [(step, loss, aux) for step, (loss, aux, _) in sorted(steps.items())]
    return hashlib.sha256(repr(losses).encode()).hexdigest()[:12]


def different(one, other, same_order):
    """The first step that differs, or None."""
    for step in sorted(one):
        norm, norm_there = one[step][2], other[step][2]
        near = norm == norm_there or not same_order and abs(norm / norm_there - 1) < SAME_NORM
        if one[step][:2] != other[step][:2] or not near:
            return step
    return None


def part_of(text):
    first, of = map(int, text.split("/"))
    if not 1 <= first <= of:
        raise ValueError
    return first, of


def mean_of_last(steps, last=LAST):
    return sum(steps[step][0] for step in sorted(steps)[-last:]) / last


class Matrix:
    def __init__(self, options):
        self.options = options
        self.directory = tempfile.mkdtemp(prefix="moiety-option-matrix-")
        self.faults = []

    def train(self, name, config):
        """step -> (loss, norm), as they are printed; or the fault."""
        run = os.path.join(self.directory, name.replace(" ", "-"))
        data = ({"data.train": f"['{os.path.abspath(self.options.data)}']"} if self.options.data
                else {"data.synthetic": "markov"})
        config = {**data, "run.device": "cpu", "train.steps": self.options.steps,
                  "data.seq_len": self.options.tokens, "eval.every": 0, "checkpoint.interval": 0,
                  "log.tensorboard": "false", "log.plot_every": 0, "log.peak_tflops": 1,
                  "log.progress": "off", **config}
        arguments = ["train", "--config", os.path.join(ROOT, "configs", "demo.toml"), "--run", run]
        arguments += [f"--{key}={value}" for key, value in config.items()]
        try:
            done = subprocess.run([self.options.program, *arguments], capture_output=True, text=True,
                                  check=False, timeout=WAITING)
            if done.returncode:
                return f"{name}: exit code {done.returncode}: {done.stderr.strip()[-300:]}"
            with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as file:
                records = [json.loads(line) for line in file]
        except subprocess.TimeoutExpired:
            return f"{name}: did not end in {WAITING:.0f} s"
        finally:
            shutil.rmtree(run, ignore_errors=True)
        steps = {r["step"]: (r["loss"], r["aux"], r["gnorm"]) for r in records if "event" not in r}
        if sorted(steps) != list(range(1, config["train.steps"] + 1)):
            return f"{name}: records of {len(steps)} steps"
        print(f"  {name}: {digest(steps)} mean of the last {mean_of_last(steps)}", flush=True)
        return steps

    def run(self, configs):
        """name -> its steps, of those that ran."""
        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
            results = dict(zip(configs, pool.map(lambda c: self.train(*c), configs.items())))
        self.faults += [result for result in results.values() if isinstance(result, str)]
        return {name: result for name, result in results.items() if not isinstance(result, str)}

    def bits(self, name, base, options):
        rows = self.part(cover(options) if self.options.cover else product(options))
        configs = {f"{name} {number}": {**base, **row} for number, row in enumerate(rows)}
        results = self.run(configs)
        # The run that others are compared with, the first, and the first of each interleave.
        first, firsts = next(iter(results), None), {}
        for run, steps in results.items():
            nearest = firsts.setdefault(configs[run].get("moe.glu_interleave"), run)
            for other in {first, nearest} - {run}:
                at = different(steps, results[other], same_order=other == nearest)
                if at is not None:
                    self.faults.append(f"{run}: step {at} has {steps[at]}, {other} {results[other][at]}\n"
                                       f"    {configs[run]}\n    {configs[other]}")
        if first is not None:
            print(f"{name}: {len(results)} of {len(rows)} runs of {self.options.steps} steps, last loss "
                  f"{results[first][self.options.steps][0]}, digests "
                  f"{sorted({digest(steps) for steps in results.values()})}", flush=True)

    def part(self, rows):
        first, of = self.options.part
        return rows[first - 1::of]

    def beside_cpu(self, base):
        """Paths of experts, recipes and frozen parts on the GPU, near to the same on the CPU."""
        kinds = {"sm90": {"moe.path": "sm90"}, "cuda_plain": {"moe.path": "cuda_plain"}, "frozen": FROZEN,
                 **{name: keys for name, keys in RECIPES.items() if name != "bf16"}}
        configs = {f"{kind}, {device}": {**base, **keys, "run.device": device, "train.steps": LONG}
                   for kind, keys in kinds.items() for device in ("cuda", "cpu")}
        for name, config in configs.items():
            if name.endswith("cpu"):
                config.pop("moe.path", None)
        mean = {name: mean_of_last(steps, LAST_LONG) for name, steps in self.run(configs).items()}
        for kind in kinds:
            gpu, cpu = mean.get(f"{kind}, cuda"), mean.get(f"{kind}, cpu")
            if gpu is None or cpu is None:
                continue
            print(f"{kind}: {gpu} on the GPU, {100 * (gpu / cpu - 1):+.3f} % of the CPU's", flush=True)
            if abs(gpu / cpu - 1) > NEAR:
                self.faults.append(f"{kind}: mean of the last {LAST_LONG} losses is {gpu} on the GPU, {cpu} on the CPU")

    def recipes(self):
        seeds = SEEDS[:1] if self.options.cover else SEEDS
        configs, names = {}, []
        for recipe, settings in self.part(list(RECIPES.items())):
            for cut, layout in {"one rank": ALONE, **CUTS}.items():
                names.append(f"{recipe}, {cut}")
                for seed in seeds:
                    configs[f"{names[-1]}, {seed}"] = {**SIZES, **settings, **layout, "run.seed": seed}
        last = {name: mean_of_last(steps) for name, steps in self.run(configs).items()}
        mean = {name: sum(last[f"{name}, {seed}"] for seed in seeds) / len(seeds)
                for name in names if all(f"{name}, {seed}" in last for seed in seeds)}
        for recipe, _ in self.part(list(RECIPES.items())):
            one = mean.get(f"{recipe}, one rank")
            shown = []
            for cut in CUTS:
                there = mean.get(f"{recipe}, {cut}")
                if one is None or there is None:
                    continue
                shown.append(f"{cut} {100 * (there / one - 1):+.3f} %")
                if abs(there / one - 1) > NEAR:
                    self.faults.append(f"{recipe}, {cut}: mean of the last {LAST} losses is {there}, "
                                       f"on one rank {one}")
            print(f"{recipe}: {one} on one rank; {', '.join(shown)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("--cover", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--data")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="K/N")
    parser.add_argument("--only", choices=[*MATRICES, *GPU_MATRICES, "recipes"],
                        help="without it all of the device")
    options = parser.parse_args()
    options.program = os.path.abspath(options.program)
    if options.steps < LAST:
        parser.error(f"--steps {options.steps}: at least {LAST}")
    began = time.monotonic()
    matrix = Matrix(options)
    try:
        for name, (base, choices) in (MATRICES if options.device == "cpu" else GPU_MATRICES).items():
            if options.only in (None, name):
                matrix.bits(name, base, choices)
        if options.only in (None, "recipes"):
            if options.device == "cpu":
                matrix.recipes()
            else:
                matrix.beside_cpu(GPU_MATRICES["one GPU"][0])
    finally:
        shutil.rmtree(matrix.directory)
    for fault in matrix.faults:
        print(fault)
    print(f"{len(matrix.faults)} faults, {time.monotonic() - began:.0f} s")
    return 1 if matrix.faults else 0


if __name__ == "__main__":
    sys.exit(main())
