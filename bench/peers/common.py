"""What peers share: the conversation with compare.py.

A peer prints a line "ready" when its set-up is done. For every line on its standard input it runs
one round of measurements, prints a row (a JSON object on a line) per figure and then an empty line.
A row has name, case, device, value, unit, ms like a benchmark's own rows, and `peer`, who it is; the
version of torch is added here.
"""

import argparse
import json
import os
import sys


def parser():
    p = argparse.ArgumentParser()
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--bench", help="our binary of the same benchmark")
    return p


def wanted(name, only):
    """Whether --only, words by commas, wants rows of this name: it holds a word, or after = is it."""
    return any(name == word[1:] if word.startswith("=") else word in name
               for word in only.split(","))


def serve(round_of_rows):
    rows_out = sys.stdout
    torch = sys.modules.get("torch")
    versions = {"torch": torch.__version__} if torch else {}
    sys.stdout = sys.stderr  # libraries that print must not disturb the rows
    print("ready", file=rows_out, flush=True)
    for _ in sys.stdin:
        for row in round_of_rows():
            print(json.dumps({**row, **versions}), file=rows_out)
        print(file=rows_out, flush=True)
