"""Tokenizers and texts on which `moiety prepare` and the `tokenizers` package must agree
(parity.py, make_golden.py). The tokenizers are trained here, in the forms that published models have;
no two of them share all their parts."""

import json
import pathlib
import random
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors, trainers

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = GPT4.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
ODD = r"(?m)\b\w+\W?|[\S&&]+" .replace("[\\S&&]+", r"[^\S\n]{2,}|\H{,3}?x|\d++|(?>ab|a)b|^$|.(?-m:.)|\x{1F600}\u00e9\x41|[\-\]a-c\h]+?")

CORPUS = """The quick brown fox jumps over the lazy dog; it's 12345 o'clock, isn't it? We'll see, they're here.
def main(argc: int, argv: list[str]) -> int:
    for i in range(argc):
\tprint(f"{i}: {argv[i]}\\n")  # tabs and    runs of spaces
    return 0x7fff_ffff
Übermäßig schöne Straße – naïve café, «voilà» c'est déjà l'été. Ελληνικά και русский язык, українська.
中文字符处理和分词，日本語のテキストとカタカナ。한국어 문장입니다. ภาษาไทยไม่มีช่องว่าง हिन्दी में लिखा हुआ पाठ
العربية من اليمين إلى اليسار עברית שלום עולם বাংলা ভাষা தமிழ் మాట ქართული հայերեն አማርኛ 😀👩‍👩‍👧 🏳️‍🌈
http://example.org/path?query=1&other=2 user@example.com 3.14159 1,000,000 50% $9.99 #tag @name
the the and and of of to to in in that that was was with with have have this this from from
"""

SCRIPTS = [line for line in CORPUS.splitlines()] + [
    "Съешь же ещё этих мягких французских булок, да выпей чаю",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "いろはにほへと ちりぬるを 色は匂へど 散りぬるを",
    "天地玄黃宇宙洪荒日月盈昃辰宿列張 3月14日 １２３４",
    "다람쥐 헌 쳇바퀴에 타고파 \u1112\u1161\u11ab",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า ๑๒๓",
    "ऋषियों को सताने वाले दुष्ट राक्षसों १२३ क्षत्रिय",
    "نص حكيم له سر قاطع وذو شأن عظيم ١٢٣",
    "דג סקרן שט בים מאוכזב ולפתע מצא לו חברה",
    "আমার সোনার বাংলা ১২৩", "யாமறிந்த மொழிகளிலே ௧௨௩", "ప్రపంచం ౧౨౩", "ಕನ್ನಡ ೧೨೩", "മലയാളം ൧൨൩",
    "ગુજરાતી ૧૨૩", "ਪੰਜਾਬੀ ੧੨੩", "ქართული ანბანი", "Հայոց լեզու", "ሰላም ለዓለም ፩፪፫", "ភាសាខ្មែរ ១២៣",
    "ພາສາລາວ ໑໒໓", "မြန်မာဘာသာ ၁၂၃", "བོད་སྐད་ ༡༢༣", "ᠮᠣᠩᠭᠣᠯ ᠪᠢᠴᠢᠭ",
]
ODDITIES = [
    "a\r\nb\r\n\r\n  c\rd\n\n\n", "\tx\t\ty  \t z", "   leading and trailing   ", " ", "  ", "\n", "\u00a0\u00a0nbsp\u00a0x",
    "mongolian\u180evowel\u180e separator", "next\u0085line", "line\u2028para\u2029end", "zero\u200bwidth\u200djoin\u200cer\ufeff",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 👍🏽 🇩🇪🇫🇷", "e\u0301 a\u0323\u0301 a\u0301\u0323 \u1e9b\u0323 \u212b \u2126 \ufb01 \u0344",
    "\u0041\u030a\u0327 q\u0307\u0323 \u0928\u093c \u0958 \u1100\u1161\u11a8 \u11935\u0301",
    "\u0378 \ue000 \ufffe \U000e0001 \U0010ffff unassigned", "\U00016ea0\U00016ebb \U0001fae9 \ua7cb\ua7cc \u1c89 \U00010d40\U00010d4a",
    "\U00011de0\U00016ff4 \U0002ebf0\U000323af \u0897 \U00016d63\U00016d67 \U000105d2\u0307 \U000113c2\U000113c5",
    "x\u08ca\u0323\u0301 \u1df6\u0301 \u0c3c\u0334 \U00011930\U00011935 \U00011935\U00011930 y",
    "I'Ll i'LL WE'RE I'M don'T he'S it\u2019s '\u017f '\u212a", "\u017fS\u212ak ſ", "ab" * 40 + " " + "1234567890" * 9,
    "a" * 300, " " * 100 + "x" + "\n" * 50, "!?" * 50 + "...", "_" * 33 + "__init__", "\\n\\t \\\\ \"quoted\" 'single' `tick`",
    "if (x<<2 >= 0x1F && !y) { return *p++ ?: \"\"; } // ok", "<|endoftext|>", "a<|endoftext|>b<|endoftext|>",
    "  <mask>  x <mask>", "x<right>   y<right>\n z", "cat concat cat-s cat's catt cat", "\u00e9cat cat\u00e9 cat\u200dx _cat",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>", "<|im_<|im_start|>|>", "Caf\u00e9 Cafe\u0301 new tok newtok new tok ",
    "▁ ▁▁a ▁b a▁b", "<0x41><0x0A> <unk> <s> </s>", "\u2581 \u2581", "\x00\x01\x7f control", "ﬀ ﬃ ß SS", "x\u0300\u0300\u0300\u0316y",
]


def random_texts(count, seed, longest=40):
    """Strings of characters from everywhere, rare and common, and of pieces of the texts above."""
    draw = random.Random(seed)
    common = list("  \n\t'.,-_09azAZ\u00e9\u4e00\u2581<|>") + ["'s", "<mask>", "cat", "<|endoftext|>", "e\u0301", "\r\n"]
    planes = [(0x20, 0x7E)] * 3 + [(0x80, 0x24F), (0x300, 0x36F), (0x370, 0x1FFF), (0x2000, 0x2BFF), (0x3000, 0xD7FF)]
    planes += [(0xE000, 0xFFFF), (0x10000, 0x1FFFF), (0x20000, 0x323AF), (0, 0x10FFFF)]
    texts = []
    for _ in range(count):
        out = []
        for _ in range(draw.randint(1, longest)):
            if draw.random() < 0.5:
                out.append(draw.choice(common))
            else:
                c = draw.randint(*draw.choice(planes))
                out.append(chr(c) if not 0xD800 <= c <= 0xDFFF else " ")
        texts.append("".join(out))
    return texts


def added(tokenizer, *specials):
    tokenizer.add_special_tokens(list(specials))
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True, normalized=False)])
    tokenizer.add_tokens([
        AddedToken("<right>", rstrip=True, normalized=False),
        AddedToken("cat", single_word=True, normalized=True),
        AddedToken("Cafe\u0301", normalized=True),
        AddedToken("new tok", normalized=False, lstrip=True, rstrip=True),
        AddedToken("<|im_", normalized=False),
    ])


def trained(tokenizer, vocab, corpus, **options):
    trainer = trainers.BpeTrainer(vocab_size=vocab, show_progress=False, **options)
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def byte_level(splits, vocab, corpus, normalizer=None, specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), **model):
    t = Tokenizer(models.BPE(**model))
    t.pre_tokenizer = pre_tokenizers.Sequence(splits) if len(splits) > 1 else splits[0]
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    if normalizer:
        t.normalizer = normalizer
    trained(t, vocab, corpus, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    added(t, *specials)
    return t


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def sentence_pieces(vocab, corpus, metaspace=None):
    """As transformers makes them of SentencePiece models: all in the normalizer, or Metaspace."""
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.pre_tokenizer = metaspace or pre_tokenizers.Metaspace(prepend_scheme="always")
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    trained(t, vocab + 256, corpus, special_tokens=tokens, limit_alphabet=300)
    data = json.loads(t.to_str())
    data["added_tokens"] = data["added_tokens"][:3]
    if metaspace is None:
        data["pre_tokenizer"] = None
        data["normalizer"] = {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    data["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    t = Tokenizer.from_str(json.dumps(data))
    t.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    added(t, "<s>", "</s>")
    return t


def without_bytes(pre_tokenizer, vocab, corpus, decoder=None, normalizer=None, **model):
    """Words of characters; those that are not in the vocabulary become <unk>, or nothing."""
    t = Tokenizer(models.BPE(**model))
    t.pre_tokenizer = pre_tokenizer
    if normalizer:
        t.normalizer = normalizer
    trained(t, vocab, corpus, special_tokens=["<unk>"], limit_alphabet=200)
    if decoder:
        t.decoder = decoder
    added(t, "</s>")
    return t


def tokenizers(vocab, corpus):
    """All of them, by name."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = {
        "gpt2": byte_level([gpt2], vocab, corpus),
        "gpt2_prefix": byte_level([pre_tokenizers.ByteLevel(add_prefix_space=True)], vocab, corpus, normalizers.NFC()),
        "qwen3": byte_level([split(QWEN), plain], vocab, corpus, normalizers.NFC()),
        "llama3": byte_level([split(GPT4), plain], vocab, corpus, ignore_merges=True),
        "o200k": byte_level([split(O200K, "removed", True), plain], vocab, corpus),
        "deepseek": byte_level([split(p) for p in DEEPSEEK] + [plain], vocab, corpus, normalizers.Sequence([])),
        "smollm2": byte_level([pre_tokenizers.Digits(True), gpt2], vocab, corpus),
        "odd": byte_level([split(ODD, "contiguous"), plain], vocab, corpus,
                          normalizers.Replace(Regex(r"[ \t]+$|\bq"), "~")),
        "mixtral": sentence_pieces(vocab, corpus),
        "metaspace_first": sentence_pieces(vocab, corpus, pre_tokenizers.Metaspace(prepend_scheme="first", split=True)),
        "metaspace_never": sentence_pieces(vocab, corpus, pre_tokenizers.Metaspace(prepend_scheme="never", split=False)),
        "punctuation": without_bytes(
            pre_tokenizers.Sequence([pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.Digits(False),
                                     pre_tokenizers.Metaspace(replacement="_")]),
            vocab, corpus, decoders.Metaspace(replacement="_"), unk_token="<unk>", fuse_unk=True),
        "no_unknown": without_bytes(pre_tokenizers.Punctuation("merged_with_next"), vocab, corpus),
    }
    llama = made["llama3"]
    bos = llama.token_to_id("<|im_start|>")
    llama.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)])])
    for behavior in ["removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"]:
        for invert in [False, True]:
            made[f"{behavior}{'_inverted' if invert else ''}"] = without_bytes(
                split(r"[\s\p{P}]", behavior, invert), 60, corpus, decoders.Sequence([decoders.Fuse()]),
                unk_token="<unk>", fuse_unk=invert)
    made["of_text"] = without_bytes(pre_tokenizers.Split("th", "merged_with_previous"), 60, corpus,
                                    decoders.Sequence([decoders.Strip("e", 1, 0), decoders.Fuse()]), unk_token="<unk>")
    return made
