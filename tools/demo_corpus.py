#!/usr/bin/env python3
"""Collects English text from Debian packages as input for `moiety prepare`.

Writes OUTDIR/fortunes.jsonl (one quote a document), OUTDIR/jargon.jsonl and, with --gcide,
OUTDIR/gcide.jsonl (one dictionary entry a document), in clean UTF-8, and prints what it found. The
same packages give the same bytes.
"""

import argparse
import gzip
import json
import re
import sys
from pathlib import Path

FORTUNES = Path("/usr/share/games/fortunes")
DICTD = Path("/usr/share/dictd")
# Pictures; and files of the package that are no text: indexes, and links to the text files.
NOT_TEXT = re.compile(r"ascii-art|.*\.(dat|u8)")

OVERSTRIKE = re.compile(r"[^\n]\x08")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
DOUBLE_ENCODED = re.compile(r"[\u00c2-\u00f4][\u0080-\u00bf]+")
DICTD_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


class MissingPackage(Exception):
    pass


def decode_once_more(match):
    try:
        return match[0].encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        return match[0]


def clean(raw):
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("cp1252", errors="ignore")
    text = DOUBLE_ENCODED.sub(decode_once_more, text)
    text = OVERSTRIKE.sub("", text)
    text = CONTROL.sub("", text)
    lines = [line.rstrip() for line in text.split("\n")]
    return "\n".join(lines).strip("\n")


def fortunes():
    files = sorted(f for f in FORTUNES.glob("*") if f.is_file() and not NOT_TEXT.fullmatch(f.name))
    if not files:
        raise MissingPackage(f"{FORTUNES}: no quotes there; apt-get install fortunes")
    for file in files:
        yield from re.split(rb"^%[ \t]*$", file.read_bytes(), flags=re.MULTILINE)


def dictd_number(digits):
    value = 0
    for digit in digits:
        value = value * 64 + DICTD_DIGITS.index(digit)
    return value


def dictionary(name):
    """Entries of a dictd dictionary, in the order of its text."""
    index, packed = DICTD / f"{name}.index", DICTD / f"{name}.dict.dz"
    for file in index, packed:
        if not file.exists():
            raise MissingPackage(f"{file} is missing; apt-get install dict-{name}")
    text = gzip.decompress(packed.read_bytes())
    entries = set()  # several headwords may point at one entry
    for line in index.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not line or line.startswith("00"):  # 00-database-...: about the dictionary
            continue
        start, size = line.split("\t")[1:3]
        entries.add((dictd_number(start), dictd_number(size)))
    for start, size in sorted(entries):
        yield text[start : start + size]


def write(path, raw_documents):
    documents = [d for d in map(clean, raw_documents) if d]
    lines = (json.dumps({"text": d + "\n"}, ensure_ascii=False) for d in documents)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    size = sum(len(d.encode()) + 1 for d in documents)
    print(f"{path}: {len(documents)} documents, {size} bytes of text")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("outdir", metavar="OUTDIR", type=Path)
    parser.add_argument("--gcide", action="store_true", help="add the dictionary of dict-gcide (40 MB)")
    arguments = parser.parse_args()
    sources = {"fortunes": fortunes(), "jargon": dictionary("jargon")}
    if arguments.gcide:
        sources["gcide"] = dictionary("gcide")
    try:
        arguments.outdir.mkdir(parents=True, exist_ok=True)
        for name, documents in sources.items():
            write(arguments.outdir / f"{name}.jsonl", documents)
    except MissingPackage as error:
        sys.exit(f"demo_corpus: {error}")
    except OSError as error:
        sys.exit(f"demo_corpus: {error}")


if __name__ == "__main__":
    main()
