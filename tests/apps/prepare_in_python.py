#!/usr/bin/env python3
"""Compares `python -m moiety.prepare` with `moiety prepare`, byte by byte: inputs, options and the
tokenizers of tests/golden. Parquet and Jinja templates are compared with their JSON Lines and with
what is written here. What needs a package that is absent is skipped by name; exit code 77 without
numpy.

    prepare_in_python.py PROGRAM
"""

import gzip
import importlib.util
import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
if importlib.util.find_spec("numpy") is None:
    print("skipped: the Python package numpy is not installed")
    sys.exit(77)
PROGRAM = sys.argv.pop(1)


def needs(module):
    return unittest.skipIf(importlib.util.find_spec(module) is None, f"the package {module} is not installed")


TEXTS = ["Hello world", "", "zwei \u00fc\u00df, \U0001f600!", "a\tb\r\nc", "don't  stop   12345 67", "<|im_end|> </s> <s>"]


def golden_tokenizers():
    for path in sorted((ROOT / "tests/golden/tokenizers").glob("*.json")):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and "tokenizer" in content:
            yield path.stem, content["tokenizer"]


def read_tokens(path):
    """Ids and loss mask of the documents of a token file."""
    data = path.read_bytes()
    (width,), (flags,) = struct.unpack_from("<I", data, 12), struct.unpack_from("<I", data, 60)
    tokens, documents, at, table = struct.unpack_from("<QQQQ", data, 16)
    ids = memoryview(data)[at : at + tokens * width].cast("H" if width == 2 else "I").tolist()
    starts = struct.unpack_from(f"<{documents + 1}Q", data, table)
    (mask,) = struct.unpack_from("<Q", data, 120)
    bits = [data[mask + t // 8] >> t % 8 & 1 for t in range(tokens)] if flags & 4 else None
    return [ids[a:b] for a, b in zip(starts, starts[1:])], bits and [bits[a:b] for a, b in zip(starts, starts[1:])]


class Base(unittest.TestCase):
    def setUp(self):
        self.kept = tempfile.TemporaryDirectory()
        self.dir = pathlib.Path(self.kept.name)
        self.addCleanup(self.kept.cleanup)

    def write(self, name, content):
        path = self.dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def jsonl(self, name, texts, key="text"):
        return self.write(name, "".join(json.dumps({key: t}) + "\n" for t in texts))

    def python(self, *arguments):
        command = [sys.executable, "-m", "moiety.prepare", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT / "python")

    def program(self, *arguments):
        command = [PROGRAM, "prepare", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    def same(self, *arguments, files=(".tok",)):
        theirs = self.program(*arguments, "--out", self.dir / "program", "--force", "--quiet")
        ours = self.python(*arguments, "--out", self.dir / "python", "--force")
        self.assertEqual(theirs.returncode, 0, theirs.stderr)
        self.assertEqual(ours.returncode, 0, ours.stderr)
        for file in files:
            a, b = self.dir / f"program{file}", self.dir / f"python{file}"
            self.assertTrue(a.read_bytes() == b.read_bytes(), f"{arguments} {file}")

    def both_refuse(self, code, *arguments):
        for run in (self.program, self.python):
            result = run(*arguments, "--out", self.dir / "x")
            self.assertEqual(result.returncode, code, f"{arguments}: {result.stderr}")
            self.assertEqual([p.name for p in self.dir.glob("x*")], [])


class Prepare(Base):
    def test_inputs_and_options(self):
        self.jsonl("in/a.jsonl", TEXTS)
        self.write("in/b.jsonl.gz", gzip.compress(self.jsonl("b.jsonl", TEXTS * 7).read_bytes()))
        self.write("in/.hidden", "no")
        self.write("in/z/c.txt", "one\n\ntwo\n\n\n\nthree")
        self.write("crlf.jsonl", b'{"text": "a"}\r\n \t\r\n\xef\xbb\xbf{"text": "\\u00e4\\ud83d\\ude00"}\n')
        for more in ([], ["--bos"], ["--split", r"\n\n"], ["--valid-fraction", "0.25"]):
            split = more[:1] == ["--valid-fraction"]
            self.same(self.dir / "in", self.dir / "crlf.jsonl", self.dir / "in/a.jsonl", *more,
                      files=(".train.tok", ".valid.tok") if split else (".tok",))  # fmt: skip
        self.jsonl("key.txt", TEXTS, key="body")
        self.same(self.dir / "key.txt", "--format", "jsonl", "--text-key", "body")
        self.write("two.jsonl", "".join(json.dumps({"title": t, "body": t * 2}) + "\n" for t in TEXTS))
        self.same(self.dir / "two.jsonl", "--text-key", "title,body")

    def test_bad_documents(self):
        lines = [
            b'{"text": "good"}', b'{"text": 1}', b'{"body": "x"}', b'{"text": "a", "text": "b"}', b"[1]", b"{",
            b'{"text": NaN}', b'{"text": "\xff"}', b'{"text": "\\ud800"}', b'{"text": "x", "n": 1e999}',
            b'{"text": "tab\there"}', b'{"text": "last"}',
        ]  # fmt: skip
        for i, line in enumerate(lines[1:-1]):
            self.both_refuse(3, self.write(f"bad{i}.jsonl", line + b"\n"))
        self.same(self.write("all.jsonl", b"\n".join(lines)), "--skip-bad")
        self.both_refuse(3, self.write("latin1.txt", b"\xe4"))
        self.both_refuse(3, self.dir / "none.txt")
        self.both_refuse(3, self.write("empty.txt", b""))
        self.both_refuse(2, self.dir / "latin1.txt", "--tokenizer", self.dir / "none.json")

    def test_many_pieces(self):
        # More than two pieces of checksums, and documents of random sizes.
        draw = random.Random(1)
        self.write("big.txt", "|".join("ab c" * draw.randrange(1, 40000) for _ in range(230)))
        self.same(self.dir / "big.txt", "--split", "|")
        self.assertGreater((self.dir / "python.tok").stat().st_size, 33 << 20)

    @needs("tokenizers")
    def test_tokenizers(self):
        self.jsonl("t.jsonl", TEXTS)
        count = 0
        for name, content in golden_tokenizers():
            with self.subTest(name):
                path = self.write(f"{name}/tokenizer.json", json.dumps(content))
                eos = next(iter(content["model"]["vocab"]))
                self.write(f"{name}/tokenizer_config.json", json.dumps({"eos_token": eos, "bos_token": {"content": eos}}))
                self.same(self.dir / "t.jsonl", "--tokenizer", path)
                self.same(self.dir / "t.jsonl", "--tokenizer", path.parent, "--parse-special", "--bos")
                count += 1
        self.assertGreater(count, 9)

    @needs("tokenizers")
    def test_a_tokenizer_that_the_program_refuses(self):
        import tokenizers
        from tokenizers import models, pre_tokenizers

        t = tokenizers.Tokenizer(models.WordLevel({"<eos>": 0, "hello": 1, "world": 2, "?": 3}, unk_token="?"))
        t.pre_tokenizer = pre_tokenizers.Whitespace()
        t.save(str(self.dir / "tokenizer.json"))
        self.jsonl("t.jsonl", ["hello world", "hello moon"])
        self.assertNotEqual(self.program(self.dir / "t.jsonl", "--tokenizer", self.dir, "--out", self.dir / "a").returncode, 0)
        done = self.python(self.dir / "t.jsonl", "--tokenizer", self.dir, "--out", self.dir / "a")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("model WordLevel", done.stderr)
        self.assertEqual(read_tokens(self.dir / "a.tok")[0], [[1, 2, 0], [1, 3, 0]])
        self.trains_on(self.dir / "a.tok")

    def trains_on(self, tokens):
        """The token file is the tokenizer of a training, which knows no text."""
        run = [f"--run.dir={self.dir / 'run'}", "--run.ranks=1", f"--data.tokenizer={tokens}", f"--data.train=['{tokens}']",
               "--data.seq_len=4", "--model.preset=tiny", "--train.steps=1", "--train.micro_batch=1",
               "--train.global_batch=1", "--log.peak_tflops=1", "--moe.experts=2", "--moe.top_k=1"]  # fmt: skip
        trained = subprocess.run([PROGRAM, "train", *run], capture_output=True, text=True, timeout=300)
        self.assertEqual(trained.returncode, 0, trained.stderr)
        words = subprocess.run([PROGRAM, "generate", self.dir / "run", "--prompt", "x"], capture_output=True, text=True)
        self.assertIn("a token file knows ids and no text", words.stderr)

    @needs("pyarrow")
    def test_parquet(self):
        import pyarrow
        from pyarrow import parquet

        texts = [f"{t} {i}" for i in range(500) for t in TEXTS]
        table = pyarrow.table({"n": list(range(len(texts))), "text": texts})
        parquet.write_table(table, self.dir / "t.parquet", row_group_size=700)
        done = self.python(self.dir / "t.parquet", "--out", self.dir / "a")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.program(self.jsonl("t.jsonl", texts), "--out", self.dir / "b")
        self.assertEqual((self.dir / "a.tok").read_bytes(), (self.dir / "b.tok").read_bytes())
        missing = self.python(self.dir / "t.parquet", "--text-key", "body", "--out", self.dir / "c")
        self.assertEqual(missing.returncode, 3)
        self.assertIn("'body'", missing.stderr)
        self.write("bad.parquet", b"PAR1 no PAR1")
        self.assertEqual(self.python(self.dir / "bad.parquet", "--out", self.dir / "c").returncode, 3)

    def test_absent_packages_are_named(self):
        for module, arguments in [("pyarrow", ["t.parquet"]), ("tokenizers", ["t.txt", "--tokenizer", "."]),
                                  ("numpy", ["t.txt"])]:  # fmt: skip
            self.write("t.parquet", b"")
            self.write("t.txt", "x")
            hide = f"import sys; sys.modules['{module}'] = None; from moiety.prepare import main; sys.exit(main(sys.argv[1:]))"
            inputs = [str(self.dir / a) if a.startswith("t.") else a for a in arguments]
            done = subprocess.run([sys.executable, "-c", hide, *inputs, "--out", str(self.dir / "x")],
                                  capture_output=True, text=True, cwd=ROOT / "python")  # fmt: skip
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(f"pip install {module}", done.stderr)


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}"
)
CHAT = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"},
                  {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": ""}]},
    {"prompt": "zwei \u00fc", "completion": "\U0001f600!"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "a\n"}]},
]  # fmt: skip


@needs("tokenizers")
@needs("jinja2")
class Chat(Base):
    def setUp(self):
        super().setUp()
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        t = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        t.decoder = decoders.ByteLevel()
        t.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        t.save(str(self.dir / "tokenizer.json"))
        self.tokenizer = t
        self.write("chat.jsonl", "".join(json.dumps(c) + "\n" for c in CHAT))

    def words(self, template):
        self.write("tokenizer_config.json", json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
        done = self.python(self.dir / "chat.jsonl", "--chat", "--tokenizer", self.dir, "--out", self.dir / "a", "--force")
        self.assertEqual(done.returncode, 0, done.stderr)
        ids, masks = read_tokens(self.dir / "a.tok")
        return ids, masks

    def test_targets_are_what_the_assistant_says_and_its_end(self):
        ids, masks = self.words(CHATML)
        end = self.tokenizer.token_to_id("<|im_end|>")
        said = []
        for document, mask in zip(ids, masks):
            targets = [i for i, m in zip(document, mask) if m]
            said.append([self.tokenizer.decode([i], skip_special_tokens=False) if i == end else i for i in targets])
        spelled = [[self.tokenizer.encode(t).ids for t in texts] for texts in (["Hello there", ""], ["\U0001f600!"], ["a\n"])]
        expected = [[one for part in texts for one in [*part, "<|im_end|>"]] for texts in spelled]
        self.assertEqual(said, expected)
        # The same of a template that marks what is generated.
        self.assertEqual(self.words(MARKED), (ids, masks))
        header = (self.dir / "a.tok").read_bytes()
        self.assertEqual(struct.unpack_from("<Q", header, 104)[0], len("Hello there\U0001f600!a\n".encode()))

    def test_chatml_is_the_programs(self):
        self.words(CHATML)
        done = self.program(self.dir / "chat.jsonl", "--chat", "--tokenizer", self.dir, "--out", self.dir / "b", "--quiet")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((self.dir / "a.tok").read_bytes(), (self.dir / "b.tok").read_bytes())

    @needs("transformers")
    def test_equals_transformers(self):
        import transformers

        ids, masks = self.words(MARKED)
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(self.dir / "tokenizer.json"), eos_token="<|im_end|>")
        for conversation, document, mask in zip(CHAT, ids, masks):
            messages = conversation.get("messages") or [
                {"role": "user", "content": conversation["prompt"]},
                {"role": "assistant", "content": conversation["completion"]},
            ]
            made = theirs.apply_chat_template(
                messages, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            self.assertEqual(made["input_ids"], document)
            if any(m["role"] == "assistant" for m in messages):
                self.assertEqual(made["assistant_masks"], mask)

    def test_faults(self):
        def fails(code, part, *arguments):
            done = self.python(*arguments, "--tokenizer", self.dir, "--out", self.dir / "x")
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertIn(part, done.stderr)
            self.assertFalse((self.dir / "x.tok").exists())

        self.write("tokenizer_config.json", "{}")
        fails(2, "there is no chat_template", self.dir / "chat.jsonl", "--chat")
        drops = self.write("drops.jinja", "{% for m in messages %}{{ m['content'] if loop.last else 'x' }}{% endfor %}")
        fails(3, "writes it otherwise when more follow", self.dir / "chat.jsonl", "--chat", "--chat-template", drops)
        broken = self.write("broken.jinja", "{% for %}")
        fails(3, "the chat template", self.dir / "chat.jsonl", "--chat", "--chat-template", broken)
        good = self.write("good.jinja", CHATML)
        for line, part in [('{"text": "x"}', "no key 'messages'"), ('{"messages": []}', "is no list, or empty"),
                           ('{"messages": [{"role": "user", "content": "x"}]}', "nothing to learn"),
                           ('{"messages": [{"role": "king", "content": ""}]}', "its role is none of"),
                           ('{"messages": [{"role": "user", "content": 1}]}', "not a string")]:  # fmt: skip
            fails(3, part, self.write("bad.jsonl", line), "--chat", "--chat-template", good)
        fails(2, "needs --chat", self.dir / "chat.jsonl", "--chat-template", good)


if __name__ == "__main__":
    unittest.main()
