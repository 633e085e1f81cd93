#!/usr/bin/env python3
"""Prints how large folders, files and functions are and fails where a budget of CONTRIBUTING.md is
exceeded: at most 60 sources in a folder; files at most 700 lines (95 of 100 at most 300, the
library's median at most 150); host functions at most 70 lines (95 of 100 at most 30), kernels 150."""

import pathlib
import re
import statistics
import subprocess
import sys

FILE_LINES, MEDIAN_LINES, FUNCTION_LINES, KERNEL_LINES = 700, 150, 70, 150
FOLDER_FILES, MOST_FILE_LINES, MOST_FUNCTION_LINES = 60, 300, 30  # the latter two: 95 of 100
CODE = {".h", ".cpp", ".cu", ".cuh"}


def blanked(text):
    """The text with comments, strings and preprocessor lines made blank, line breaks kept."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S
    )

    def blank(match):
        return re.sub(r"[^\n]", " ", match.group(0))

    text = re.sub(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F])", " ", text)  # digit separators
    text = pattern.sub(blank, text)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.M)


def functions(text):
    """(line, name, lines, is_kernel) of every function body at namespace or class level."""
    text = blanked(text)
    stack = []  # (kind, start, name, is_kernel)
    head = 0
    for match in re.finditer(r"[{};]", text):
        sign = match.group(0)
        if sign == "{":
            before = text[head : match.start()]
            outer = stack[-1][0] if stack else "namespace"
            kind, name = "other", ""
            if outer in {"namespace", "class"}:
                call = re.search(r"([~\w:]+|operator\S+)\s*\(", before)
                if re.search(r"\bnamespace\b", before) or 'extern' in before:
                    kind = "namespace"
                elif call and not re.search(r"=\s*$", before):
                    kind, name = "function", call.group(1)
                elif re.search(r"\b(class|struct|union)\b", before):
                    kind = "class"
            start = head + len(before) - len(before.lstrip())
            stack.append((kind, start, name, "__global__" in before))
        elif sign == "}" and stack:
            kind, start, name, kernel = stack.pop()
            if kind == "function":
                first = text.count("\n", 0, start) + 1
                yield first, name, text.count("\n", start, match.start()) + 1, kernel
        head = match.end()


def tracked(root):
    out = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=True,
    ).stdout
    return [pathlib.Path(line) for line in out.splitlines() if (root / line).is_file()]


def most(lengths):
    """The length that 95 of 100 do not exceed."""
    ordered = sorted(lengths)
    return ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]


def tails(sizes, bodies):
    """What is exceeded by folders, and by the larger files and functions as a whole."""
    code = {path: lines for path, lines in sizes.items()
            if path.suffix in CODE and path.parts[0] in {"moiety", "apps", "bench"}}
    count = {}
    for path in code:
        count[path.parent] = count.get(path.parent, 0) + 1
    largest = max(count, key=count.get)
    print(f"largest folder {largest}: {count[largest]} sources; 95 of 100 files have at most "
          f"{most(code.values())} lines, functions {most(bodies)}")
    for folder, files in count.items():
        if files > FOLDER_FILES:
            yield f"{folder}: {files} sources, at most {FOLDER_FILES}"
    if most(code.values()) > MOST_FILE_LINES:
        yield f"95 of 100 files: {most(code.values())} lines, at most {MOST_FILE_LINES}"
    if most(bodies) > MOST_FUNCTION_LINES:
        yield f"95 of 100 functions: {most(bodies)} lines, at most {MOST_FUNCTION_LINES}"


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    faults, sizes, bodies = [], {}, []
    for path in tracked(root):
        if path.suffix not in CODE | {".py"}:
            continue
        text = (root / path).read_text(encoding="utf-8")
        sizes[path] = lines = text.count("\n")
        if lines > FILE_LINES:
            faults.append(f"{path}: {lines} lines, at most {FILE_LINES}")
        if path.suffix in CODE and path.parts[0] in {"moiety", "apps", "bench"}:
            for line, name, length, kernel in functions(text):
                bodies.append(length)
                limit = KERNEL_LINES if kernel else FUNCTION_LINES
                if length > limit:
                    faults.append(f"{path}:{line}: {name} has {length} lines, at most {limit}")
    print(f"{'folder':<24}{'files':>6}{'lines':>8}{'median':>8}{'largest':>9}")
    folders = sorted({"/".join(p.parts[:2]) for p in sizes if len(p.parts) > 1})
    for folder in folders:
        own = [n for p, n in sizes.items() if "/".join(p.parts[:2]) == folder]
        print(f"{folder:<24}{len(own):>6}{sum(own):>8}{statistics.median(own):>8.0f}{max(own):>9}")
    library = [n for p, n in sizes.items() if p.parts[0] == "moiety"]
    if statistics.median(library) > MEDIAN_LINES:
        faults.append(f"moiety: median file has {statistics.median(library)} lines, "
                      f"at most {MEDIAN_LINES}")
    faults += tails(sizes, bodies)
    print("\n".join(faults) if faults else "sizes: ok")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
