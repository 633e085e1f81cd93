#!/usr/bin/env python3
"""Writes tests/golden/tokenizers/: small tokenizers with the ids and texts that the `tokenizers`
package gives, and what each class of its patterns holds, so that tests need no package.

    python3 tests/data/tokenizers/make_golden.py
"""

import hashlib
import json
import pathlib

from tokenizers import Regex, pre_tokenizers

import cases

OUT = pathlib.Path(__file__).resolve().parents[2] / "golden/tokenizers"
CATEGORIES = "Lu Ll Lt Lm Lo Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf L M N P S Z".split()
SCRIPTS = "Arabic Cyrillic Devanagari Greek Han Hangul Hebrew Hiragana Katakana Latin Thai".split()
CLASSES = [r"\s", r"\S", r"\w", r"\W", r"\d", r"\D", r"\h", r"\H", ".", r"(?m:.)", r"[^\s\p{L}\p{N}]"]
CLASSES += [r"[\w]", r"[^\W\d]", r"[^\S\n\P{L}]", r"[\P{N}\d]", r"[\W_]", r"(?i:[a-z])", r"(?i:k)", r"(?i:s)"]
CLASSES += [rf"\p{{{name}}}" for name in CATEGORIES + SCRIPTS] + [rf"\P{{{name}}}" for name in ["L", "N", "Han"]]
KEPT = ["gpt2_prefix", "qwen3", "llama3", "o200k", "deepseek", "smollm2", "odd", "mixtral", "metaspace_first",
        "metaspace_never", "punctuation", "no_unknown", "merged_with_next_inverted", "of_text"]


def class_golden(pattern):
    """The number of code points that the pattern matches, and the SHA-256 of a bit for each."""
    splitter = pre_tokenizers.Split(Regex(pattern), "removed")
    bits = bytearray(0x110000 // 8)
    count = 0
    everything = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    for at in range(0, len(everything), 50000):
        part = everything[at : at + 50000]
        matched = bytearray(b"\1" * len(part))
        for _, (begin, end) in splitter.pre_tokenize_str("".join(map(chr, part))):
            matched[begin:end] = bytes(end - begin)
        for c, is_match in zip(part, matched):
            count += is_match
            bits[c // 8] |= is_match << c % 8
    return {"pattern": pattern, "count": count, "sha256": hashlib.sha256(bits).hexdigest()}


def tokenizer_golden(name, tokenizer):
    texts = cases.SCRIPTS[:12] + cases.ODDITIES + cases.random_texts(20, 3)
    golden = {"name": name, "tokenizer": json.loads(tokenizer.to_str()), "cases": []}
    for text in texts:
        tokenizer.encode_special_tokens = False
        special = tokenizer.encode(text, add_special_tokens=False).ids
        tokenizer.encode_special_tokens = True
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        case = {"text": text, "ids": special, "decoded": tokenizer.decode(special)}
        if plain != special:
            case["plain"] = plain
        golden["cases"].append(case)
    return golden


def write(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    write(OUT / "classes.json", [class_golden(pattern) for pattern in CLASSES])
    corpus = [*cases.CORPUS.splitlines(True), *cases.SCRIPTS] * 3
    made = cases.tokenizers(340, corpus)
    for name in KEPT:
        write(OUT / f"{name}.json", tokenizer_golden(name, made[name]))


if __name__ == "__main__":
    main()
