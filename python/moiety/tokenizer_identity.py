"""The identity of a tokenizer, which its token files keep (moiety/data/bpe/canonical.cpp): equal for
all files that give equal ids. What the program refuses to read has an identity of its own kind."""

import hashlib
import json
from typing import Any

BYTES = b"moiety tokenizer bytes 1: eos=256 bos=257 pad=258 vocab=264\n"
BEHAVIORS = ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]
SCHEMES = ["never", "first", "always"]


class NotRead(Exception):
    """The program reads no such tokenizer."""


class _Spelling:
    def __init__(self) -> None:
        self.parts = [b"moiety tokenizer bpe 1\n"]

    def word(self, s: Any) -> None:
        data = s.encode()
        self.parts.append(b"%d:%s" % (len(data), data))

    def number(self, n: Any) -> None:
        self.parts.append(b"%d;" % n)

    def sought(self, pattern: Any) -> None:
        (kind, text), *more = pattern.items()
        if more or kind not in ("String", "Regex") or not text:
            raise NotRead(f"pattern {pattern}")
        self.number(kind == "Regex")
        self.word(text)


def _fields(node: Any, known: Any) -> Any:
    unknown = set(node) - {"type", *known.split()}
    if unknown:
        raise NotRead(f"fields {sorted(unknown)} of {node.get('type')}")
    return {key: value for key, value in node.items() if value is not None}


def _flat(node: Any, parts: Any) -> Any:
    """A step, or those of sequences in it."""
    if node is None:
        return []
    if node["type"] != "Sequence":
        return [node]
    return [one for part in _fields(node, parts)[parts] for one in _flat(part, parts)]


def _spell_normal(s: Any, node: Any) -> None:
    kind = node["type"]
    if kind == "NFC":
        _fields(node, "")
        s.word("NFC")
    elif kind == "Prepend":
        s.word("Prepend")
        s.word(_fields(node, "prepend")["prepend"])
    elif kind == "Replace":
        f = _fields(node, "pattern content")
        s.word("Replace")
        s.sought(f["pattern"])
        s.word(f["content"])
    else:
        raise NotRead(f"normalizer {kind}")


def _scheme(f: Any) -> Any:
    if "prepend_scheme" in f:
        return SCHEMES.index(f["prepend_scheme"])
    return 2 if f.get("add_prefix_space", True) else 0


def _spell_split(s: Any, node: Any) -> None:
    kind = node["type"]
    known = {
        "Split": "pattern behavior invert",
        "ByteLevel": "add_prefix_space use_regex trim_offsets",
        "Digits": "individual_digits",
        "Punctuation": "behavior",
        "Metaspace": "replacement split str_rep prepend_scheme add_prefix_space",
    }
    if kind not in known:
        raise NotRead(f"pre_tokenizer {kind}")
    f = _fields(node, known[kind])
    s.word(kind)
    if kind == "Split":
        s.sought(f["pattern"])
        s.number(BEHAVIORS.index(f["behavior"]))
        s.number(f.get("invert", False))
    elif kind == "ByteLevel":
        s.number(f.get("add_prefix_space", True))
        s.number(f.get("use_regex", True))
    elif kind == "Digits":
        s.number(f.get("individual_digits", False))
    elif kind == "Punctuation":
        s.number(BEHAVIORS.index(f.get("behavior", "Isolated")))
    else:
        s.word(f["replacement"])
        s.number(_scheme(f))
        s.number(f.get("split", True))


def _check_decoder(node: Any) -> None:
    known = {
        "ByteLevel": "add_prefix_space trim_offsets use_regex",
        "ByteFallback": "",
        "Fuse": "",
        "Strip": "content start stop",
        "Replace": "pattern content",
        "Metaspace": "replacement split str_rep prepend_scheme add_prefix_space",
    }
    fused = False
    for step in _flat(node, "decoders"):
        kind = step["type"]
        if kind not in known:
            raise NotRead(f"decoder {kind}")
        f = _fields(step, known[kind])
        pattern = f.get("pattern", {})
        long = kind == "Replace" and ("Regex" in pattern or len(pattern["String"]) != 1)
        if fused and (long or kind == "ByteFallback"):
            raise NotRead(f"decoder {kind} behind Fuse or ByteLevel")
        fused = fused or kind in ("Fuse", "ByteLevel")


def _check_processor(node: Any) -> None:
    for step in _flat(node, "processors"):
        known = {"ByteLevel": "add_prefix_space trim_offsets use_regex", "TemplateProcessing": "single pair special_tokens"}
        if step["type"] not in known:
            raise NotRead(f"post_processor {step['type']}")
        _fields(step, known[step["type"]])


def _canonical(root: Any) -> Any:
    s = _Spelling()
    _fields(root, "version truncation padding added_tokens normalizer pre_tokenizer post_processor decoder model")
    if root.get("truncation") or root.get("padding"):
        raise NotRead("truncation or padding")
    model = _fields(
        root["model"],
        "dropout continuing_subword_prefix end_of_word_suffix unk_token fuse_unk byte_fallback ignore_merges vocab merges",
    )
    if root["model"].get("type", "BPE") != "BPE":
        raise NotRead(f"model {root['model']['type']}")
    if any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        raise NotRead("dropout or affixes")
    _check_processor(root.get("post_processor"))
    _check_decoder(root.get("decoder"))

    normal, split = _flat(root.get("normalizer"), "normalizers"), _flat(root.get("pre_tokenizer"), "pretokenizers")
    if any(step["type"] == "ByteLevel" for step in split[:-1]):
        raise NotRead("a pre_tokenizer behind ByteLevel")
    s.number(len(normal))
    for step in normal:
        _spell_normal(s, step)
    s.number(len(split))
    for step in split:
        _spell_split(s, step)
    for key in ("ignore_merges", "byte_fallback", "fuse_unk"):
        s.number(model.get(key, False))
    s.number("unk_token" in model)
    s.word(model.get("unk_token", ""))
    vocab = sorted((i, token) for token, i in model["vocab"].items())
    s.number(len(vocab))
    for i, token in vocab:
        s.number(i)
        s.word(token)
    s.number(len(model["merges"]))
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        s.word(left)
        s.word(right)
    added = sorted(root.get("added_tokens") or [], key=lambda t: t["id"])
    s.number(len(added))
    for token in added:
        f = _fields(token, "id content single_word lstrip rstrip normalized special")
        special = f.get("special", False)
        s.number(f["id"])
        s.word(f["content"])
        for key in ("single_word", "lstrip", "rstrip"):
            s.number(f.get(key, False))
        s.number(f.get("normalized", not special))
        s.number(special)
    return b"".join(s.parts)


def is_read(root: Any) -> Any:
    """Whether the program reads the tokenizer, and if not, what it refuses."""
    try:
        _canonical(root)
    except (NotRead, KeyError, ValueError, TypeError, AttributeError) as e:
        return False, str(e)
    return True, ""


def identity(root: Any, eos: Any, bos: Any) -> Any:
    """The SHA-256 of a tokenizer.json (parsed) with these ids."""
    try:
        what = _canonical(root)
    except (NotRead, KeyError, ValueError, TypeError, AttributeError):
        kept = {k: v for k, v in root.items() if k not in ("version", "truncation", "padding", "post_processor", "decoder")}
        what = b"moiety tokenizer of another kind 1\n" + json.dumps(kept, sort_keys=True).encode()
    return hashlib.sha256(what + b"eos=%d bos=%d\n" % (eos, bos)).digest()
