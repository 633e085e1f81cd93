"""Turns text, JSON Lines or Parquet into token files for `moiety train`, as `moiety prepare` does,
byte for byte where both can. For what the program does not read: Parquet (package pyarrow), any
tokenizer.json (package tokenizers), and conversations by the model's own Jinja template (package
jinja2). Needs numpy; no torch.

Inputs are files, directories (all files below, sorted by path, without hidden and .tok files) and -
(standard input); gzip and zstd are recognized by their content. A name that ends in .jsonl is JSON
Lines, one in .parquet a table; other files are UTF-8 text, one document a file or, with --split,
what stands between the separators. Every document ends in eos; empty ones are left out."""

import argparse
import os
import re
import sys
from typing import Any

from .prepare_errors import DataError, DiskError, UsageError

BATCH_BYTES = 4 << 20


def parse_arguments(arguments: Any) -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m moiety.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("inputs", metavar="INPUT", nargs="+", help="files, directories, or -")
    add("--tokenizer", default="bytes", help="bytes, or the path of a tokenizer.json or of its folder")
    add("--out", required=True, help="PREFIX of the files to write")
    add("--valid-fraction", type=float, default=0.0, help="share of the documents for PREFIX.valid.tok")
    add("--format", choices=["auto", "text", "jsonl", "parquet"], default="auto", help="auto: by name")
    add("--text-key", default="text", help="key, or column, of the text; of several, a,b, the texts stand below each other")
    add("--split", default="", help=r"separator of documents in text files; \n, \t, \r, \\ are understood")
    add("--chat", action="store_true", help="the inputs are conversations: messages, or prompt and completion")
    add("--chat-template", metavar="FILE", help="a Jinja template instead of the one beside the tokenizer")
    add("--force", action="store_true", help="overwrite token files")
    add("--bos", action="store_true", help="begin every document with bos")
    add("--parse-special", action="store_true", help="special tokens that a text spells become their ids")
    add("--skip-bad", action="store_true", help="leave out bad documents, and count them")
    add("--workers", type=int, default=0, help="threads; 0 is one per core; the output does not depend on it")
    add("--quiet", action="store_true", help="warnings and errors alone")
    a = parser.parse_args(arguments)
    if not 0 <= a.valid_fraction < 1:
        raise UsageError(f"--valid-fraction {a.valid_fraction}: must be in [0, 1)")
    if a.workers < 0:
        raise UsageError(f"--workers {a.workers}: must not be negative")
    if a.chat and (a.bos or a.parse_special):
        raise UsageError("--chat: the template says what begins a conversation and what is special")
    if a.chat_template and not a.chat:
        raise UsageError("--chat-template: needs --chat")
    if not os.path.basename(a.out):
        raise UsageError(f"--out {a.out}: is a directory; the PREFIX of the files in it is missing")
    a.text_key = a.text_key.split(",")
    a.split = re.sub(r"\\([ntr\\])", lambda m: {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}[m[1]], a.split)
    return a


def is_validation_document(number: int, fraction: Any) -> bool:
    """The choice of moiety/data/prepare.h: Philox4x32-10 of the document's number in domain 4."""
    mask = 0xFFFFFFFF
    key = [0, 4 * 0x9E3779B9 & mask]
    c = [number & mask, number >> 32, 0, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & mask, (a >> 32) ^ c[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return c[0] < fraction * 2.0**32


class Outputs:
    def __init__(self, a: Any, tokenizer: Any, flags: Any) -> None:
        from .token_file import TokenFileWriter

        self.fraction, self.documents, self.files = a.valid_fraction, 0, []
        paths = [a.out + (".train.tok" if a.valid_fraction > 0 else ".tok")]
        if a.valid_fraction > 0:
            paths.append(a.out + ".valid.tok")
        for path in paths:
            self._check(path, a)
        try:
            os.makedirs(os.path.dirname(a.out) or ".", exist_ok=True)
            for path in paths:
                self.files.append(TokenFileWriter(path, tokenizer, flags))
        except OSError as e:
            self.discard()
            raise DiskError(f"{path}: cannot create: {e.strerror}") from None

    @staticmethod
    def _check(path: Any, a: Any) -> None:
        if not os.path.exists(path):
            return
        if not os.path.isfile(path):
            raise UsageError(f"{path}: is not a regular file")
        if any(i != "-" and os.path.exists(i) and os.path.samefile(i, path) for i in a.inputs):
            raise UsageError(f"{path}: is an input too")
        if not a.force:
            raise UsageError(f"{path}: is there already; --force overwrites")

    def add(self, ids: Any, source_bytes: Any, targets: Any = None) -> None:
        valid = self.fraction > 0 and is_validation_document(self.documents, self.fraction)
        self.files[1 if valid else 0].add(ids, source_bytes, targets)
        self.documents += 1

    def publish(self) -> None:
        for file in self.files:
            if file.documents == 0:
                raise DataError(f"{file.path}: none of {self.documents} documents would be in it")
        for file in self.files:
            file.finish()
        for file in self.files:
            file.publish()

    def discard(self) -> None:
        for file in self.files:
            file.discard()


class Work:
    """The documents on their way: collected into batches, encoded, written."""

    def __init__(self, a: Any, tokenizer: Any, outputs: Any, chat: Any) -> None:
        self.a, self.tokenizer, self.outputs, self.chat = a, tokenizer, outputs, chat
        self.batch: list[Any] = []
        self.batch_bytes, self.bad, self.empty = 0, 0, 0

    def take(self, place: Any, record: Any) -> None:
        from .inputs import BadDocument

        try:
            self._collect(place, record)
        except BadDocument as e:
            if not self.a.skip_bad:
                self.flush()
                raise DataError(f"{place}: {e}") from None
            self.bad += 1
        if self.batch_bytes >= BATCH_BYTES:
            self.flush()

    def _collect(self, place: Any, record: Any) -> None:
        from .chat import messages_of
        from .inputs import BadDocument, text_of

        text, spans = text_of(record, self.a.text_key) if not self.chat else None, None
        if self.chat:
            text, spans = self.chat.text_and_spans(messages_of(record))
        if self.chat and not spans:
            raise BadDocument("a conversation without a message of the assistant: nothing to learn")
        if not text:
            self.empty += 1
            return
        self.batch.append((place, text, spans))
        self.batch_bytes += len(text)

    def flush(self) -> None:
        texts = [text for _, text, _ in self.batch]
        if self.chat:
            for (_, text, spans), e in zip(self.batch, self.tokenizer.encodings(texts, True)):
                targets, said = self.chat.targets(e, text, spans)
                self.outputs.add(e.ids, said, targets)
        else:
            before = [self.tokenizer.bos] if self.a.bos else []
            for text, ids in zip(texts, self.tokenizer.encode_batch(texts, self.a.parse_special)):
                self.outputs.add(before + ids + [self.tokenizer.eos], len(text.encode()))
        self.batch, self.batch_bytes = [], 0


def check_tokens(a: Any, tokenizer: Any) -> None:
    from .token_file import NO_TOKEN

    if tokenizer.eos == NO_TOKEN and not a.chat:
        raise UsageError(
            f"--tokenizer {tokenizer.name}: has no eos, in which documents end; a tokenizer_config.json beside "
            'its tokenizer.json may name it: {"eos_token": "..."}'
        )
    if a.bos and tokenizer.bos == NO_TOKEN:
        raise UsageError(f"--bos: the tokenizer {tokenizer.name} has no bos")


def load_tokenizer(a: Any) -> Any:
    from . import tokenizer, tokenizer_identity

    found = tokenizer.load(a.tokenizer)
    check_tokens(a, found)
    if found.folder is not None:
        is_read, why = tokenizer_identity.is_read(found.root)
        if not is_read and not a.quiet:
            say(f"the program does not read {found.name} ({why}): data.tokenizer of a training is the token file")
    return found


def say(sentence: Any) -> None:
    print(f"moiety.prepare: {sentence}", file=sys.stderr)


def prepare(a: Any) -> None:
    try:
        import numpy  # noqa: F401
    except ImportError:
        raise UsageError("moiety.prepare needs the package numpy: pip install numpy") from None
    if a.workers:
        os.environ["RAYON_NUM_THREADS"] = str(a.workers)
    from . import chat as conversations
    from . import inputs, token_file

    tokenizer = load_tokenizer(a)
    chat = conversations.Renderer(tokenizer, a.chat_template) if a.chat else None
    paths, repeated = inputs.list_inputs(a.inputs)
    keys = conversations.keys_of if a.chat else lambda names: a.text_key
    flags = token_file.HAS_LOSS_MASK if a.chat else token_file.END_IN_EOS
    outputs = Outputs(a, tokenizer, flags | (token_file.START_WITH_BOS if a.bos else 0))
    try:
        work = Work(a, tokenizer, outputs, chat)
        for path in paths:
            for place, record in inputs.records(path, a.format, keys, a.split.encode()):
                work.take(place, record)
        work.flush()
        outputs.publish()
    except OSError as e:
        raise DiskError(f"{a.out}: {e}") from None
    finally:
        outputs.discard()
    for count, what in [(work.bad, "bad documents left out"), (repeated, "repeated inputs left out")]:
        if count:
            say(f"{count} {what}")
    for file in outputs.files:
        print(f"{file.path}: {file.documents} documents, {file.tokens} tokens, {file.source_bytes} bytes of text")


def main(arguments: Any = None) -> Any:
    try:
        prepare(parse_arguments(arguments))
    except (UsageError, DataError, DiskError) as e:
        print(f"moiety.prepare: error: {e}", file=sys.stderr)
        return e.code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
