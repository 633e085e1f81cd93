#!/usr/bin/env python3
"""Keeps rows of benchmarks in bench/results, with the machine, the date and the commit in each.

  build/gpu/bin/quantize_bench ... | python3 bench/keep.py quantize.h200.jsonl --machine "H200"
  python3 bench/keep.py --check      fails where a kept row lacks one of the three
"""

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
ORIGIN = ("machine", "date", "commit")


def faults():
    for path in sorted(RESULTS.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            missing = [key for key in ORIGIN if not json.loads(line).get(key)]
            if missing:
                yield f"bench/results/{path.name}:{number}: no {', '.join(missing)}"


def keep(arguments):
    origin = {key: getattr(arguments, key) for key in ORIGIN}
    rows = [json.loads(line) for line in sys.stdin if line.startswith("{")]
    with open(RESULTS / arguments.file, "a") as out:
        for row in rows:
            out.write(json.dumps({**row, **origin}) + "\n")
    print(f"{len(rows)} rows in bench/results/{arguments.file}")
    return 0 if rows else 1


def head():
    command = ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", nargs="?", help="in bench/results; rows come from stdin")
    parser.add_argument("--machine", help="that measured: its GPU, or its processor and cores")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--commit", help="that was measured (default: HEAD)")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        found = list(faults())
        print("\n".join(found or ["bench/results: every row says machine, date and commit"]))
        return 1 if found else 0
    if not arguments.file or not arguments.machine:
        parser.error("FILE and --machine are needed, or --check")
    arguments.commit = arguments.commit or head()
    return keep(arguments)


if __name__ == "__main__":
    sys.exit(main())
