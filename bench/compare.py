#!/usr/bin/env python3
"""Runs one of our benchmarks and its peer alternately and prints both, with ratios.

Prints the rows (JSON, one a line; bench/README.md), ours with `ratio`, the time of the fastest
peer over our time, `against`, that peer, and `target`; then a table. Where a row has a ceiling of its
own as ratio (quantize: a copy), that stays, and the peer's is `peer_ratio`. Options that are not
listed here go to both programs, such as --dtype fp32.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent
TARGETS = {"train_step": 1.3, "ep": 6.4, "grouped_gemm": 1.0, "grouped_mlp": 1.2,
           "moe_layer": 1.25, "quantize": 1.0,
           "attention_cuda": 1.0, "torch_experts": 1.2}


def stop(sentence):
    print(f"compare: {sentence}", file=sys.stderr)
    sys.exit(2)


def peer_python(given):
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    python = Path(given) if given else cache / "moiety/torch-venv/bin/python"
    if not python.exists():
        stop(f"the peers' Python {python} is missing; bench/setup_peers.sh makes it")
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode != 0:
        stop(f"{python} has no working torch; bench/setup_peers.sh installs it")
    return python


class Peer:
    """A program of bench/peers, paused between rounds."""

    def __init__(self, command, environment):
        self.process = subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)

    def wait_until_ready(self):
        self.read_line()

    def read_line(self):
        line = self.process.stdout.readline()
        if not line:
            stop(f"the peer ended with exit code {self.process.wait()}; its messages are above")
        return line.strip()

    def end(self):
        self.process.kill()
        self.process.wait()

    def round(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return [json.loads(line) for line in iter(self.read_line, "")]


class FreshPeer:
    """A peer of several ranks, which is started for each round: it and we do not fit at once."""

    def __init__(self, command, environment):
        self.start = lambda: Peer(command, environment)

    def wait_until_ready(self):
        pass

    def end(self):
        pass

    def round(self):
        peer = self.start()
        try:
            peer.wait_until_ready()
            return peer.round()
        finally:
            peer.process.stdin.close()  # its end
            try:
                peer.process.wait(30)
            except subprocess.TimeoutExpired:
                peer.end()


def our_round(command, environment):
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        stop(f"{command[0]} ended with exit code {done.returncode}; its messages are above")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def merge(rounds, least):
    """The rows of several rounds, each figure the median, with its spread where over 5 %.

    With `least` they are those of the shortest time: where others share the machine, that is nearest to
    what the program itself takes.
    """
    rows = {}
    for row in (row for rows_of_round in rounds for row in rows_of_round):
        rows.setdefault((row["name"], row["case"], row.get("peer")), []).append(row)
    merged = []
    for same in rows.values():
        times = [row["ms"] for row in same]
        if least:
            merged.append(dict(min(same, key=lambda row: row["ms"]),
                               timing=f"least of {len(same)} alternating rounds"))
            continue
        row = dict(same[0], ms=statistics.median(times))
        row.pop("spread", None)  # within a round
        for figure in {"value", "ratio"} & row.keys():
            row[figure] = statistics.median(row[figure] for row in same)
        spread = (max(times) - min(times)) / row["ms"]
        if spread > 0.05:
            row["spread"] = round(spread, 3)
        merged.append(row)
    return merged


def compare(ours, peers, target):
    for row in ours:
        rivals = [p for p in peers if (p["name"], p["case"]) == (row["name"], row["case"])]
        if rivals:
            best = min(rivals, key=lambda p: p["ms"])
            ratio = round(best["ms"] / row["ms"], 3)
            if "ratio" in row:
                row["peer_ratio"] = ratio
            else:
                row |= {"ratio": ratio, "against": best["peer"], "target": target}
            if "torch" in best:
                row["torch"] = best["torch"]
        yield [row, *rivals]


def table(groups):
    lines = [("name", "case", "who", "value", "unit", "ms", "spread", "ratio", "to peer")]
    for ours, *rivals in groups:
        for row in (ours, *rivals):
            mine = row is ours
            ratio = ""
            if "ratio" in row:
                ratio = f"{row['ratio']:.2f}"
            if "target" in row:
                ratio += f" ({'>=' if row['ratio'] >= row['target'] else '< '} {row['target']:g})"
            lines.append((row["name"] if mine else "", row["case"] if mine else "",
                          row.get("peer", "moiety"), f"{row['value']:g}", row["unit"],
                          f"{row['ms']:.3f}", f"{row['spread']:.0%}" if "spread" in row else "",
                          ratio, f"{row['peer_ratio']:.2f}" if "peer_ratio" in row else ""))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip()
                     for line in lines)


def in_turns(our_round, peer, rounds, target, least=False):
    """Runs our rounds and the peer's alternately, ends the peer, and prints the rows and a table."""
    ours, theirs = [], []
    try:
        peer.wait_until_ready()
        for k in range(rounds):
            print(f"round {k + 1} of {rounds}", file=sys.stderr)
            ours.append(our_round())
            theirs.append(peer.round())
    finally:
        peer.end()
    groups = list(compare(merge(ours, least), merge(theirs, least), target))
    for group in groups:
        for row in group:
            print(json.dumps(row))
    print("\n" + table(groups))


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the peer ends too
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=sorted(TARGETS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--least", action="store_true",
                        help="of the rounds the shortest times, not the medians: for a busy machine")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)),
                        help="of both programs (default: the cores)")
    parser.add_argument("--ranks", type=int,
                        help="of ours, sharing the threads; on GPUs of both, each with one")
    parser.add_argument("--bin", type=Path,
                        help="folder of our programs (default build/cpu/bin or build/gpu/bin)")
    parser.add_argument("--peer-options", default="", metavar="'...'",
                        help="for the peer alone, such as '--attention cudnn'")
    parser.add_argument("--our-options", default="", metavar="'...'",
                        help="for ours alone, such as '--engine bf16'")
    parser.add_argument("--python", help="that runs the peers (default: of bench/setup_peers.sh)")
    a, both = parser.parse_known_args()

    preset = "gpu" if a.device == "cuda" else "cpu"
    name = a.name
    own = [BENCH / f"peers/{name}_cuda{end}.py" for end in ("", "_ranks")]
    if a.device == "cuda" and any(path.exists() for path in own):
        name += "_cuda"  # a program of its own
    ours = (a.bin or BENCH.parent / f"build/{preset}/bin") / f"{name}_bench"
    python = peer_python(a.python)
    if name == "torch_experts":  # the Python package, which has no program
        ours = None
    elif not ours.exists():
        stop(f"{ours} is missing; build it: cmake --preset {preset} && cmake --build "
             f"build/{preset} --target {ours.name}")
    both += ["--threads", str(a.threads)] if a.device == "cpu" else ["--device", a.device]
    environment = dict(os.environ, OMP_NUM_THREADS=str(a.threads))
    if ours is None:
        package = os.environ.get("PYTHONPATH", str(BENCH.parent / "python"))
        environment["PYTHONPATH"] = package
        command = [python, BENCH / "peers" / f"{name}.py", "--ours", *both]
        peer = Peer([python, BENCH / "peers" / f"{name}.py", *both, *a.peer_options.split()], environment)
    elif a.device == "cuda" and a.ranks:
        peer = FreshPeer([python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                          str(a.ranks), BENCH / "peers" / f"{name}_ranks.py", *both,
                          *a.peer_options.split()], environment)
        layout = ["--parallel", "dp"] if name == "train_step" else []
        command = [ours, *both, *layout, "--ranks", str(a.ranks)]
    else:
        peer = Peer([python, BENCH / "peers" / f"{name}.py", "--bench", ours, *both,
                     *a.peer_options.split()], environment)
        command = [ours, *both, *(["--ranks", str(a.ranks)] if a.ranks else [])]
    command += a.our_options.split()

    in_turns(lambda: our_round(command, environment), peer, a.repeat, TARGETS[a.name],
             a.least)


if __name__ == "__main__":
    main()
