#!/usr/bin/env python3
"""Writes moiety/data/bpe/code_points.inc: what the `tokenizers` package knows of code points and
PCRE2 or utf8proc may not. Needs `pip install tokenizers`, and a Python whose unicodedata is Unicode
14 (3.11), which is the oldest that PCRE2 may be of. Half a minute.

    python3 tools/make_unicode_ages.py [--check]
"""

import pathlib
import sys
import unicodedata

from tokenizers import Regex, normalizers, pre_tokenizers

OUT = pathlib.Path(__file__).resolve().parent.parent / "moiety/data/bpe/code_points.inc"
ALL = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cf".split()
SCRIPTS = "Arabic Cyrillic Devanagari Greek Han Hangul Hebrew Hiragana Katakana Latin Thai".split()


def removed_by(pre_tokenizer):
    """The code points that a pre-tokenizer with the behaviour `removed` takes out of a text."""
    members = set()
    for at in range(0, len(ALL), 50000):
        part = ALL[at : at + 50000]
        kept = bytearray(len(part))
        for _, (begin, end) in pre_tokenizer.pre_tokenize_str("".join(map(chr, part))):
            kept[begin:end] = b"\1" * (end - begin)
        members.update(c for c, k in zip(part, kept) if not k)
    return members


def members_of(pattern):
    return removed_by(pre_tokenizers.Split(Regex(pattern), "removed"))


def digits():
    """What the pre-tokenizer Digits takes for one."""
    members = set()
    for at in range(0, len(ALL), 50000):
        text = "".join("x" + chr(c) for c in ALL[at : at + 50000])
        for piece, _ in pre_tokenizers.Digits(False).pre_tokenize_str(text):
            if len(piece) == 1 and piece != "x":
                members.add(ord(piece))
    return members


def without_class(marks, young):
    """What NFC takes for a letter that it neither moves nor joins, although utf8proc may know more:
    everything young, marks of classes that the package's table lacks, and letters that are joined
    only since then."""
    nfc = normalizers.NFC()

    def stays(text):
        return nfc.normalize_str(text) == text

    members = set(young)
    for c in marks - young:
        is_fixed = stays("\u4e00\u0301" + chr(c)) and stays("\u4e00" + chr(c) + "\u0334")
        if is_fixed and unicodedata.combining(chr(c)) > 0:
            members.add(c)
    for c in set(ALL) - young:
        parts = unicodedata.normalize("NFD", chr(c))
        joined = unicodedata.normalize("NFC", parts)
        if joined != parts and nfc.normalize_str(parts) != joined:
            members.add(ord(parts[-1]))
    return members


def ranges(members):
    out = []
    for c in sorted(members):
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return out


def table(name, members):
    items = ", ".join(f"{{{a:#x}, {b:#x}}}" for a, b in ranges(members))
    return f"constexpr CodePoints {name}[] = {{{items}}};\n"


def main():
    if unicodedata.unidata_version != "14.0.0":
        sys.exit(f"unicodedata is of Unicode {unicodedata.unidata_version}, not 14.0.0: Python 3.11 has that")
    old = {c for c in ALL if unicodedata.category(chr(c)) != "Cn"}
    assigned = set(ALL) - members_of(r"\p{Cn}")
    young = assigned - old
    text = "// Written by tools/make_unicode_ages.py. clang-format off\n"
    text += "// Code points that Unicode has since version 15, by general category and by script.\n"
    named = []
    for category in CATEGORIES:
        found = members_of(rf"\p{{{category}}}") & young
        if found:
            text += table(f"kYoung{category}", found)
            named.append((category, f"kYoung{category}"))
    for script in SCRIPTS:
        found = members_of(rf"\p{{{script}}}") & young
        if found:
            text += table(f"kYoung{script}", found)
            named.append((script, f"kYoung{script}"))
    rows = ", ".join(f'{{"{key}", {name}}}' for key, name in named)
    text += f"constexpr YoungClass kYoungClasses[] = {{{rows}}};\n"
    text += "// What a word may consist of beside letters, marks, decimal and letter numbers and joiners (Pc).\n"
    text += table("kMoreOfWords", members_of(r"\w") - members_of(r"[\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}]"))
    text += "// What the pre-tokenizers Punctuation and Digits split at.\n"
    text += table("kPunctuation", removed_by(pre_tokenizers.Punctuation("removed")))
    text += table("kDigits", digits())
    text += "// What NFC neither moves nor joins.\n"
    text += table("kApartInNfc", without_class(members_of(r"\p{M}"), young))
    if "--check" in sys.argv:
        sys.exit(0 if OUT.read_text() == text else f"{OUT} is not what this program writes")
    OUT.write_text(text)


if __name__ == "__main__":
    main()
