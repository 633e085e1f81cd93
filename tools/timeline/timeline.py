#!/usr/bin/env python3
"""What the GPUs do in a step: times by kernel, a picture of what runs beside what, and the calls of
CUDA that the host made meanwhile.

    timeline.py [--step NAME] [--svg FILE] [--keep FILE] -- PROGRAM ARGUMENTS...
    timeline.py [--step NAME] [--svg FILE] --read FILE

A step lies between two runs of the kernel --step, which the program runs once a step: take_stands of
several ranks, by default. Needs CUPTI's header and library, of the CUDA toolkit, and a compiler. The
records slow the program down by a few percent.
"""

import argparse
import collections
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
# Rows of the picture: title, color, and what belongs there; the first that fits.
ROWS = [("pulls of peers' parts", "#c0504d", lambda e: e.kind == "C" and e.name == "peer copy"),
        ("sums of gradients", "#f0a030",
         lambda e: "mapped" in e.name and "sum_kernel" in e.name),
        ("meetings", "#808080", lambda e: "meet_kernel" in e.name),
        ("AdamW", "#9bbb59", lambda e: "update_tiles" in e.name),
        ("all else", "#4f81bd", lambda e: True)]

Event = collections.namedtuple("Event", "kind begin end gpu stream size name")


def record(command, path):
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/libactivity.so"
        paths = [f"-{flag}{cuda}/{part}" for flag, parts in
                 (("I", ("include", "extras/CUPTI/include")), ("L", ("lib64", "lib", "extras/CUPTI/lib64")))
                 for part in parts]
        subprocess.run(["g++", "-std=c++20", "-O1", "-shared", "-fPIC", str(HERE / "activity.cpp"),
                        "-o", library, *paths, "-lcupti"], check=True)
        environment = dict(os.environ, CUDA_INJECTION64_PATH=library, MOIETY_TIMELINE=str(path))
        libraries = [f"{cuda}/{part}" for part in ("lib64", "lib", "extras/CUPTI/lib64")]
        environment["LD_LIBRARY_PATH"] = ":".join(libraries + [os.environ.get("LD_LIBRARY_PATH", "")])
        subprocess.run(command, env=environment, check=True)


def read(path):
    events = []
    for line in open(path, errors="replace"):
        words = line.rstrip("\n").split("\t")
        if len(words) == 7:
            events.append(Event(words[0], *map(int, words[1:6]), words[6]))
    return sorted(events, key=lambda e: e.begin)


def step_of(events, mark):
    """The events of the step before the last two, of one GPU."""
    ends = [e.end for e in events if mark in e.name]
    if len(ends) < 4:
        sys.exit(f"timeline: {len(ends)} runs of a kernel with {mark} in its name, 4 are needed")
    begin, end = ends[-4], ends[-3]
    return begin, end, [e for e in events if begin <= e.begin < end]


def readable(names):
    names = sorted(names)
    try:
        text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
        found = dict(zip(names, text.stdout.split("\n")))
    except OSError:
        found = {}
    return {n: re.sub(r"^void |\(anonymous namespace\)::|moiety::", "", found.get(n, n))[:90]
            for n in names}


def table(gpu, begin, end, events):
    print(f"GPU {gpu}: a step of {(end - begin) * 1e-6:.2f} ms, {len(events)} kernels and copies")
    names = readable({e.name for e in events})
    sums = collections.defaultdict(lambda: [0, 0, 0])
    for e in events:
        entry = sums[names[e.name]]
        entry[0] += e.end - e.begin
        entry[1] += 1
        entry[2] += e.size if e.kind == "C" else 0
    for name, (ns, count, size) in sorted(sums.items(), key=lambda x: -x[1][0])[:40]:
        moved = f"{size / 1e6:9.1f} MB" if size else " " * 12
        print(f"{ns * 1e-6:9.3f} ms {count:6} x {ns / count * 1e-3:9.1f} us {moved}  {name}")


def host_calls(calls, events, mark):
    """The host's calls, but for those that only look, while the last steps ran."""
    ends = sorted(e.end for e in events if mark in e.name)
    begin, end = ends[len(ends) // 2], ends[-3]
    counts = collections.Counter(re.sub("_v[0-9]+(_ptsz)?$", "", c.name) for c in calls
                                 if begin <= c.begin < end)
    steps = sum(begin < e <= end for e in ends)
    print(f"calls of the host in {steps} steps of all GPUs together: "
          + ", ".join(f"{name} {count}" for name, count in counts.most_common()))


def bars(events, begin, gap):
    """Intervals of the events, joined over gaps of less than `gap` ns."""
    out = []
    for e in sorted(events, key=lambda e: e.begin):
        if out and e.begin - begin < out[-1][1] + gap:
            out[-1][1] = max(out[-1][1], e.end - begin)
        else:
            out.append([e.begin - begin, e.end - begin])
    return out


def picture(begin, end, events, path):
    width, left, height = 900, 170, 26
    scale = width / (end - begin)
    rows = {title: [] for title, _, _ in ROWS}
    for e in events:
        rows[next(title for title, _, fits in ROWS if fits(e))].append(e)
    kept = [row for row in reversed(ROWS) if rows[row[0]]]
    bottom = height * len(kept) + 10
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {bottom + 30}" '
             'font-family="sans-serif" font-size="13">',
             f'<rect width="{left + width + 20}" height="{bottom + 30}" fill="white"/>']
    for i, (title, color, _) in enumerate(kept):
        y = 8 + i * height
        lines.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{title}</text>')
        for a, b in bars(rows[title], begin, 0.0007 * (end - begin)):
            lines.append(f'<rect x="{left + a * scale:.1f}" y="{y}" width="{max(0.5, (b - a) * scale):.1f}" '
                         f'height="{height - 8}" fill="{color}"/>')
    for ms in range(0, int((end - begin) * 1e-6) + 1, 10):
        x = left + ms * 1e6 * scale
        lines.append(f'<line x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{bottom}" stroke="#cccccc"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{ms}{" ms" if ms else ""}</text>')
    pathlib.Path(path).write_text("\n".join(lines + ["</svg>", ""]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--step", default="take_stands", help="in the name of a kernel that ends steps")
    parser.add_argument("--svg", help="a picture of the first GPU's step")
    parser.add_argument("--keep", help="the records, for --read")
    parser.add_argument("--read", help="records that were kept, instead of a run")
    parser.add_argument("command", nargs="*")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = a.read or a.keep or f"{folder}/records"
        if not a.read:
            record(a.command or parser.error("a program, or --read"), path)
        found = read(path)
    calls = [e for e in found if e.kind == "A"]
    events = [e for e in found if e.kind != "A"]
    for i, gpu in enumerate(sorted({e.gpu for e in events})):
        begin, end, step = step_of([e for e in events if e.gpu == gpu], a.step)
        table(gpu, begin, end, step)
        if i == 0 and a.svg:
            picture(begin, end, step, a.svg)
    host_calls(calls, events, a.step)


if __name__ == "__main__":
    main()
