"""The console script `moiety`: the trainer that lies in the wheel."""

import os
import pathlib
import sys


def main() -> None:
    program = pathlib.Path(__file__).resolve().parent / "bin" / "moiety"
    if not program.exists():
        sys.exit(f"moiety: {program} is missing; install the wheel again")
    os.execv(program, ["moiety", *sys.argv[1:]])
