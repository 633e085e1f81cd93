#!/usr/bin/env python3
"""Holds documentation against the tree.

  tools/check_docs.py              every fault, one a line, and exit code 1; or "docs: ok"
  tools/check_docs.py --wrap FILE...   wraps prose of these markdown files at 100 columns

Checked: links and #anchors of *.md; that pages are linked; places cited in sources as
docs/x.md#anchor; paths in `code`; the width of prose (tables, code and words that cannot be broken
excepted); that every configuration key, command, flag and exit code that pages name exists, and
that every one that exists is named.
"""

import argparse
import pathlib
import re
import subprocess
import sys

WIDTH = 100
TEST = "tests/tools/check_docs_test.py"
SOURCES = (".h", ".cpp", ".cu", ".cuh", ".inc", ".py", ".sh", ".cmake", ".txt", ".toml", ".md")
CODE_SPAN = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
CITATION = re.compile(r"(?<![\w/.-])docs/[\w/.-]+\.md(?:#[\w-]+)?")
TREE_PATH = re.compile(r"(?:moiety|apps|tests|tools|bench|cmake|configs|examples|docs)/[\w./-]+")
# Not x.h, x_cuda.cu, no_x.cpp, _ref.cpp, which stand for many.
SOURCE_FILE = re.compile(
    r"(?!(?:no_)?x[._]|_)(?:[\w.-]+/)*[\w.-]+\.(?:h|cpp|cu|cuh|inc|py|sh|cmake)")
LIST_ITEM = re.compile(r"(\s*)([-*+]|\d+\.)\s+")
# A word that would begin a block of its own if it stood first on a line.
BLOCK_START = re.compile(r"([-*+=]+|#{1,6}|\d+[.)]|>.*|\|.*)$")
# What follows a dot in names of files, which are no keys.
NO_KEYS = set("h cpp cu cuh inc md py toml txt json jsonl safetensors svg tok".split())


# --- Markdown ---------------------------------------------------------------------------------


def kinds(lines):
    """(kind, line) of every line: code, table, heading, blank or prose."""
    fence = None
    for line in lines:
        mark = re.match(r"\s*(```+|~~~+)", line)
        if fence or mark:
            closes = fence and mark and mark.group(1).startswith(fence)
            fence = None if closes else fence or mark.group(1)
            yield "code", line
        elif not line.strip():
            yield "blank", line
        elif re.match(r"#{1,6}\s", line):
            yield "heading", line
        else:
            yield ("table" if line.lstrip().startswith("|") else "prose"), line


def slug(heading):
    """The anchor that a heading gets: lower case, punctuation dropped, spaces as hyphens."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lstrip("#").strip()).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(text):
    found = set()
    for kind, line in kinds(text.splitlines()):
        if kind == "heading":
            name, n = slug(line), 0
            while name + (f"-{n}" if n else "") in found:
                n += 1
            found.add(name + (f"-{n}" if n else ""))
    return found


def words(text):
    """Words of a paragraph; code spans and short links stay whole."""
    out, start = [], 0
    spans = [m.span() for m in CODE_SPAN.finditer(text)]
    spans += [m.span() for m in LINK.finditer(text) if m.end() - m.start() <= 60]
    for match in re.finditer(r"\s+", text):
        if not any(a < match.start() < b for a, b in spans):
            out.append(text[start : match.start()])
            start = match.end()
    out.append(text[start:])
    return [" ".join(word.split()) for word in out if word]


def wrap(first, rest, text):
    lines, line = [], first
    for word in words(text):
        empty = line in (first, rest)
        if not empty and len(line) + 1 + len(word) > WIDTH and not BLOCK_START.match(word):
            lines.append(line)
            line, empty = rest, True
        line += word if empty else " " + word
    return lines + [line]


def paragraphs(lines):
    """Runs [begin, end) of prose lines that are one paragraph or list item."""
    marked = list(kinds(lines))
    begin = None
    for i, (kind, line) in enumerate(marked + [("blank", "")]):
        if begin is not None and (kind != "prose" or LIST_ITEM.match(line)):
            yield begin, i
            begin = None
        if kind == "prose" and begin is None:
            begin = i


def too_wide(line):
    """Whether the line could be broken and is over the width."""
    if len(line) <= WIDTH:
        return False
    item = LIST_ITEM.match(line)
    indent = item.end() if item else len(line) - len(line.lstrip())
    return len(wrap(line[:indent], " " * indent, line[indent:])) > 1


def wrapped(text):
    lines = text.split("\n")
    for begin, end in reversed(list(paragraphs(lines))):
        part = lines[begin:end]
        if not any(too_wide(line) for line in part):
            continue
        item = LIST_ITEM.match(part[0])
        first = part[0][: item.end()] if item else part[0][: len(part[0]) - len(part[0].lstrip())]
        part[0] = part[0][len(first) :]
        lines[begin:end] = wrap(first, " " * len(first), "\n".join(part))
    return "\n".join(lines)


# --- What the program has -----------------------------------------------------------------------


class Program:
    """Names that pages may use, read from the sources of apps/moiety."""

    def __init__(self, root):
        sources = sorted(p for p in (root / "apps/moiety").rglob("*") if p.is_file())
        everything = "\n".join(p.read_text() for p in sources)
        self.keys = set(re.findall(r"^KEY\((\w+), (\w+),", everything, re.M))
        self.sections = {section for section, _ in self.keys}
        commands = re.search(r"kCommands\[\] = \{(.*?)\n\};", everything, re.S).group(1)
        self.commands = set(re.findall(r'^\s*\{"([\w-]+)"', commands, re.M))
        codes = re.search(r"enum (?:class )?ExitCode[^{]*\{(.*?)\}", everything, re.S).group(1)
        self.exit_codes = {int(code) for code in re.findall(r"kExit\w+ = (\d+)", codes)}
        self.flags = set(re.findall(r'"(--[a-z][\w-]*)"', everything))


def key_mentions(span, sections):
    """Configuration keys section.name that a code span or line names."""
    head = re.match(r"(\w+)\.(\w+)(?![\w.(/*])", span)
    found = [head.groups()] if head and head.group(1) in sections else []
    found += re.findall(r"--(%s)\.(\w+)" % "|".join(sorted(sections)), span)
    return [key for key in found if key[1] not in NO_KEYS]


# --- Faults -------------------------------------------------------------------------------------


class Checker:
    def __init__(self, root, names):
        self.root, self.names, self.program = root, names, Program(root)
        self.pages = {n: (root / n).read_text() for n in names if n.endswith(".md")}
        self.anchors = {name: anchors(text) for name, text in self.pages.items()}
        self.code = {name: self.code_of(text) for name, text in self.pages.items()}

    @staticmethod
    def code_of(text):
        """(line number, code span or line of a code block) of a page."""
        fenced = [k == "code" for k, _ in kinds(text.split("\n"))]
        prose = "\n".join("" if f else l for f, l in zip(fenced, text.split("\n")))
        spans = [(prose.count("\n", 0, m.start()) + 1, " ".join(m.group(2).split()))
                 for m in CODE_SPAN.finditer(prose)]
        return spans + [(i + 1, l) for i, (f, l) in enumerate(zip(fenced, text.split("\n"))) if f]

    def target_fault(self, target):
        """Why a place "path#anchor", the path from the root, cannot be found; else None."""
        path, _, anchor = target.partition("#")
        path = str(pathlib.PurePosixPath(path))
        if not (self.root / path).exists():
            return f"{path} does not exist"
        if anchor and anchor not in self.anchors.get(path, set()):
            return f"{path} has no heading #{anchor}"
        return None

    def links(self):
        for name, text in self.pages.items():
            folder = pathlib.PurePosixPath(name).parent
            fenced = [k == "code" for k, _ in kinds(text.split("\n"))]
            prose = "\n".join("" if f else l for f, l in zip(fenced, text.split("\n")))
            prose = CODE_SPAN.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), prose)
            for match in LINK.finditer(prose):
                target = match.group(1)
                if re.match(r"[a-z]+:", target):
                    continue
                path, _, anchor = target.partition("#")
                place = self.normal(folder / path) if path else name
                fault = self.target_fault(place + ("#" + anchor if anchor else ""))
                if fault:
                    yield f"{name}:{prose.count(chr(10), 0, match.start()) + 1}: {fault}"

    def unlinked(self):
        """Pages of docs/ that no page links to, nor to their folder."""
        linked = {self.normal(pathlib.PurePosixPath(name).parent / link.partition("#")[0])
                  for name, text in self.pages.items() for link in LINK.findall(text)}
        for name in self.pages:
            folder = str(pathlib.PurePosixPath(name).parent)
            if folder.startswith("docs") and not {name, folder} & (linked - {"docs"}):
                yield f"{name}: no page links to it"

    @staticmethod
    def normal(path):
        parts = []
        for part in path.parts:
            if part == ".." and parts:
                parts.pop()
            elif part != ".":
                parts.append(part)
        return "/".join(parts)

    def citations(self):
        for name in self.names:
            if name in ("tools/check_docs.py", TEST):  # these plant faults, or tell of them
                continue
            text = self.pages.get(name) or (self.root / name).read_text(errors="replace")
            if "docs/" not in text:
                continue
            for i, line in enumerate(text.split("\n")):
                for match in CITATION.finditer(LINK.sub("", line)):
                    fault = self.target_fault(match.group())
                    if fault:
                        yield f"{name}:{i + 1}: {fault}"

    def paths(self):
        """Places in the tree that pages name as code: files, folders, or stems of files."""
        known = ["/" + name for name in self.names]
        for name, code in self.code.items():
            if name == "docs/adding.md":  # the operation that it adds is not there
                continue
            for i, span in code:
                place, file = TREE_PATH.fullmatch(span), SOURCE_FILE.fullmatch(span)
                folder = self.root / pathlib.PurePosixPath(name).parent  # tests/README.md: apps/x_test.cpp
                if place and not list(self.root.glob(span + "*")) and not (folder / span).exists():
                    yield f"{name}:{i}: {span} does not exist"
                elif file and not any(k.endswith("/" + span) for k in known):
                    yield f"{name}:{i}: no file is called {span}"

    def width(self):
        for name, text in self.pages.items():
            for i, (kind, line) in enumerate(kinds(text.split("\n"))):
                if kind == "prose" and too_wide(line):
                    yield f"{name}:{i + 1}: {len(line)} columns of prose, at most {WIDTH}"

    def options(self):
        program = self.program
        for name, code in self.code.items():
            if name.startswith("bench/"):  # names of figures look like keys
                continue
            for i, span in code:
                for key in key_mentions(span, program.sections):
                    if key not in program.keys:
                        yield f"{name}:{i}: there is no key {key[0]}.{key[1]}"
        section, listed = None, set()
        for line in self.pages["docs/config.md"].split("\n"):
            head = re.match(r"## \[(\w+)\]", line)
            section = head.group(1) if head else section
            row = re.match(r"\| `(\w+)` \|", line)
            if row:
                listed.add((section, row.group(1)))
        for key in sorted(program.keys ^ listed):
            what = ".".join(key)
            yield f"docs/config.md: {what} is in one of this page and the option table alone"

    def commands(self):
        program, used, flags = self.program, set(), set()
        for name, code in self.code.items():
            for i, span in code:
                at = re.search(r"(?<![\w:-])(?:\S*/bin/)?moiety ([a-z][\w-]*)(.*)", span)
                if at and at.group(1) in program.commands:
                    used.add(at.group(1))
                elif at and re.match(r"moiety [a-z]|\S*/bin/moiety ", span):
                    yield f"{name}:{i}: there is no command moiety {at.group(1)}"
                named = re.findall(r"(?<![\w-])(--[a-z][\w-]*)(?![\w.-])", span)
                flags.update(named)
                for flag in named if at and at.group(1) in program.commands else []:
                    if flag not in program.flags:
                        yield f"{name}:{i}: no command has the option {flag}"
        for command in sorted(program.commands - used):
            yield f"docs: the command moiety {command} is on no page"
        for flag in sorted(program.flags - flags):
            yield f"docs: the option {flag} is on no page"

    def exit_codes(self):
        page = "docs/reliability.md"
        rows = {int(code) for code in re.findall(r"^\| (\d+) \|", self.pages[page], re.M)}
        for code in sorted(self.program.exit_codes ^ rows):
            yield f"{page}: exit code {code} is in one of this page and enum ExitCode alone"

    def faults(self):
        for check in (self.links, self.unlinked, self.citations, self.paths, self.width,
                      self.options, self.commands, self.exit_codes):
            yield from check()


# --- Command line -------------------------------------------------------------------------------


def tracked(root):
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    return sorted(n for n in names if n.endswith(SOURCES) and (root / n).is_file())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--wrap", nargs="+", metavar="FILE", type=pathlib.Path)
    arguments = parser.parse_args()
    for path in arguments.wrap or []:
        text = path.read_text()
        if wrapped(text) != text:
            path.write_text(wrapped(text))
    if arguments.wrap:
        return 0
    root = pathlib.Path(__file__).resolve().parent.parent
    found = list(Checker(root, tracked(root)).faults())
    print("\n".join(found) if found else "docs: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
