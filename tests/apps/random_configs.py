#!/usr/bin/env python3
"""Random configurations, drawn from the program's own table of keys.

    random_configs.py PROGRAM [--count N] [--seed S] [--at I] [--jobs J]

Every key that has something to say about numbers takes part, a few of them at a time, over random
layouts of up to four ranks. A configuration is either refused, by --dry-run already, with a documented
code and a last line that names a key; or it is trained for four steps with a checkpoint after two, and
then the printed configuration means the same, no number is lost, and a run that goes on from that
checkpoint repeats the last two steps to the bit. --seed and --at I run one configuration again.
Standard library alone.
"""
import argparse
import concurrent.futures
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

PROGRAM = ""
WAITING = 120.0  # seconds of a clock that four steps may take on a busy machine
REFUSED = {2, 8}

# Small enough to train in a moment. Every other key draws from its default and its range.
BASE = {"run.device": ["cpu"], "data.synthetic": ["markov", "uniform", "copy"], "model.preset": [""],
        "model.vocab": [0, 264, 272, 301], "model.d_model": [32, 64, 96], "model.layers": [1, 2, 3],
        "model.heads": [2, 4, 8], "model.kv_heads": [1, 2, 4], "model.d_ffn_dense": [64, 96],
        "moe.experts": [1, 2, 4, 6, 8], "moe.d_ffn": [32, 64, 96], "data.seq_len": [8, 16, 32],
        "train.steps": [4], "train.global_batch": [4, 8], "checkpoint.interval": [2], "log.peak_tflops": [1],
        "log.tensorboard": ["false"], "log.plot_every": [0], "optim.lr": [1e-3, 3e-4],
        "optim.warmup_steps": [0, 2, 100], "guard.comm_timeout_s": [60]}
# Drawn in one configuration of three each.
SOMETIMES = {"model.head_dim": [8, 16, 32], "model.dense_layers": ["[]", "[0]", "[1]"],
             "model.moe_every": [1, 2], "model.rope_theta": [1e4, 1e6], "moe.top_k": [1, 2, 3, 4],
             "moe.path": ["auto", "cpu", "reference"], "moe.shared_d_ffn": [0, 32, 64], "moe.capacity_factor": [-1, 0, 0.5, 1, 2],
             "router.scale": [0.5, 1, 2.5], "router.groups": [1, 2, 3], "router.group_top_k": [1, 2],
             "router.aux_coef": [0, 0.01, 1], "router.z_coef": [0, 0.001], "router.bias_rate": [0, 0.001],
             "init.std": [0, 0.02, 1], "train.micro_batch": [1, 2, 4], "train.grad_clip": [0, 1, 1e-3],
             "train.loss_z_coef": [0, 1e-4],
             "train.freeze": ['["embed*"]', '["layers.0.*"]', '["embed*", "layers.0.*", "*.attn.*"]', '["*norm*"]',
                              '["*.experts.*"]', '["*fc1.weight", "head*"]', '["layers.*"]', '["*.attn.o.*", "embed*"]'], "optim.beta1": [0, 0.9], "optim.beta2": [0, 0.95, 0.999],
             "optim.weight_decay": [0, 0.1, 10], "optim.decay_steps": [0, 1, 3], "optim.eps": [1e-8, 1],
             "memory.loss_chunk": [0, 1, 7, 64], "precision.keep_first": [-1, 0, 1, 5],
             "precision.keep_last": [-1, 0, 1], "precision.switch_step": [0, 2, 3],
             "precision.amax_history": [1, 2, 16, 1024],
             "run.threads": [0, 1, 3], "run.seed": [0, 1, 2**31], "eval.every": [0, 1],
             "checkpoint.keep_best": [0, 1], "guard.spike_sigma": [0, 6], "data.prefetch": [1, 4],
             "data.pack": ["stream", "documents"]}
# Words and switches of these sections are drawn too, whichever they are.
SECTIONS = {"model", "moe", "router", "data", "init", "train", "optim", "memory", "precision", "ep"}
NUMBERS = ["loss", "gnorm", "aux", "z", "lr", "drop", "bal", "skipped"]  # of a step, that no clock is in
ACTIVATIONS = {"clamped_swiglu": {"moe.act_limit": 7}, "qgeglu": {"moe.act_alpha": 1.702, "moe.act_limit": 7}}
AXES = ["dp", "tp", "gtp", "ep", "egtp"]


def ask(*arguments, cwd=None):
    try:
        return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False, cwd=cwd,
                              timeout=WAITING)
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(late.cmd, "did not end", "", "")


def words():
    """key -> its words, of all keys that choose among some."""
    table, section = {}, ""
    for line in ask("train", "--help=markdown").stdout.splitlines():
        found = re.match(r"## \[(\w+)\]", line)
        if found:
            section = found[1]
        found = re.match(r"\| `(\w+)` \| `(.*?)` \| (.*?) \| (?:\w|/| )* \| ", line)
        if found and section in SECTIONS:
            choices = [w.strip().strip('"') for w in found[3].split("\\|")]
            if found[2] in ("true", "false"):
                choices = ["true", "false"]
            if len(choices) > 1:
                table[f"{section}.{found[1]}"] = choices
    if not {"precision.recipe", "router.score", "moe.delay_wgrad"} <= set(table):
        raise AssertionError(f"the table of keys is not read: {sorted(table)}")
    return table


def draw(choices, rng):
    config = {key: rng.choice(values) for key, values in BASE.items()}
    for key, values in {**choices, **SOMETIMES}.items():
        if key not in BASE and rng.random() < 1 / 3:
            config[key] = rng.choice(values)
    if rng.random() < 0.8:
        fit(config, rng)
    ranks = rng.choice([1, 1, 2, 4])
    config["run.ranks"] = ranks
    for axis in rng.sample(AXES, rng.randint(0, 2)):
        config[f"parallel.{axis}"] = rng.choice([1, 2, ranks])
    return config


def fit(config, rng):
    """Draws again, of what is there, numbers that must fit others."""
    among = lambda key, values: config.update({key: rng.choice(list(values))}) if key in config else None
    experts, layers, heads = config["moe.experts"], config["model.layers"], config["model.heads"]
    among("model.kv_heads", [n for n in (1, 2, 4) if heads % n == 0])
    among("model.head_dim", [8, 16])
    among("model.moe_every", range(1, layers + 1))
    among("model.dense_layers", ["[]"] + [f"[{layer}]" for layer in range(layers)])
    among("router.groups", [n for n in (1, 2, 3) if experts % n == 0])
    among("router.group_top_k", range(1, config.get("router.groups", 1) + 1))
    chosen = experts // config.get("router.groups", 1) * config.get("router.group_top_k", 1)
    config["moe.top_k"] = rng.randint(1, min(chosen, 4))
    if config.get("moe.shared_gate") == "true":
        config["moe.shared_d_ffn"] = 32
    if config.get("precision.scaling") == "delayed":
        config["precision.recipe"] = "fp8_tensor"
    config.update(ACTIVATIONS.get(config.get("moe.activation"), {}))
    for key in "train.cuda_graph", "checkpoint.keep_best":
        config.pop(key, None)


def arguments(config, run, **more):
    more = {key.replace("__", "."): value for key, value in more.items()}
    return ["train", "--run", run] + [f"--{key}={value}" for key, value in {**config, **more}.items()]


def losses(run):
    with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return {r["step"]: tuple(r.get(key) for key in NUMBERS) for r in records if "event" not in r}


def values(text):
    """The keys and values of a printed configuration, without where they come from."""
    section, out = "", {}
    for line in text.splitlines():
        found = re.match(r"\[(\w+)\]", line)
        section = found[1] if found else section
        found = re.match(r"(\w+) *= *(.*?)(?: +#.*)?$", line)
        if found:
            out[f"{section}.{found[1]}"] = found[2]
    return out


def fault_of_refusal(done):
    lines = done.stderr.split("\n")[:-1]
    if done.returncode not in REFUSED:
        return f"exit code {done.returncode}: {lines[-1:]}"
    if not lines or not lines[-1].startswith("moiety: "):
        return "the last line is not the error"
    if not re.search(r"\b(run|model|moe|router|data|train|optim|parallel|memory|precision|ep)\.\w+|memory",
                     lines[-1]):
        return f"the last line names no key: {lines[-1]}"
    return None


def fault_of_training(config, directory):
    first, second = os.path.join(directory, "first"), os.path.join(directory, "second")
    printed = ask(*arguments(config, first), "--print-config").stdout
    path = os.path.join(directory, "printed.toml")
    with open(path, "w", encoding="utf-8") as file:
        file.write(printed)
    again = ask("train", "--config", path, "--print-config").stdout
    if values(printed) != values(again) or len(values(printed)) < 50:
        return "the printed configuration means another"

    done = ask(*arguments(config, first))
    if done.returncode == 2 and "moe.overflow" in done.stderr:
        return None  # rows that the drawn capacity has no room for, which only the data tell
    if done.returncode != 0:
        return f"accepted by --dry-run, ended with {done.returncode}: {done.stderr.strip()[-400:]}"
    whole = losses(first)
    if sorted(whole) != [1, 2, 3, 4]:
        return f"records of steps {sorted(whole)}"
    if not all(math.isfinite(x) for record in whole.values() for x in record[:2]):
        return f"not finite: {whole}"
    done = ask(*arguments(config, second, run__resume=os.path.join(first, "checkpoints", "step-00000002")))
    if done.returncode != 0:
        return f"resume ended with {done.returncode}: {done.stderr.strip()[-400:]}"
    rest = losses(second)
    if rest != {step: whole[step] for step in (3, 4)}:
        return f"a resume computes {rest}, the whole run {whole}"
    return None


def check(number, choices, seed):
    config = draw(choices, random.Random(f"{seed}/{number}"))
    directory = tempfile.mkdtemp(prefix="moiety-random-configs-")
    try:
        dry = ask(*arguments(config, os.path.join(directory, "first")), "--dry-run")
        if dry.returncode:
            fault, trained = fault_of_refusal(dry), False
        else:
            fault, trained = fault_of_training(config, directory), True
    finally:
        shutil.rmtree(directory)
    shown = " ".join(arguments(config, "run")) if fault else ""
    return trained, f"configuration {number} of seed {seed}: {fault}\n    {shown}" if fault else None


def main():
    global PROGRAM
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--at", type=int, default=None)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    PROGRAM = os.path.abspath(options.program)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    choices = words()
    numbers = range(options.count) if options.at is None else [options.at]
    began = time.monotonic()
    trained = failed = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for ran, fault in pool.map(lambda number: check(number, choices, seed), numbers):
            trained += ran
            failed += fault is not None
            if fault:
                print(fault, flush=True)
    print(f"seed {seed}: {len(numbers)} configurations, {trained} trained and resumed, {failed} faults, "
          f"{time.monotonic() - began:.0f} s")
    return 1 if failed or not trained else 0


if __name__ == "__main__":
    sys.exit(main())
