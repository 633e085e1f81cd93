"""Tokenizers for moiety.prepare: bytes, and all that the package `tokenizers` reads."""

import hashlib
import json
import pathlib
from typing import Any

from . import tokenizer_identity
from .prepare_errors import DataError, UsageError
from .token_file import NO_TOKEN

USUAL_EOS = ["<|endoftext|>", "</s>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<eos>"]


class Bytes:
    name, vocab, eos, bos, folder = "bytes", 264, 256, 257, None
    identity = hashlib.sha256(tokenizer_identity.BYTES).digest()

    def encode_batch(self, texts: Any, special: Any) -> Any:
        return [list(text.encode()) for text in texts]


class Published:
    """A tokenizer.json. eos and bos are named as in docs/tokenizers.md."""

    def __init__(self, path: Any) -> None:
        try:
            import tokenizers
        except ImportError:
            raise UsageError("--tokenizer needs the package tokenizers: pip install tokenizers") from None
        path = pathlib.Path(path)
        if path.is_dir():
            path /= "tokenizer.json"
        if not path.is_file():
            raise UsageError(f"--tokenizer {path}: there is no such file")
        self.name, self.folder = str(path), path.parent
        try:
            self.root = json.loads(path.read_text(encoding="utf-8"))
            self.package = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the package raises plain Exceptions
            raise DataError(f"{path}: {e}") from None
        self.package.no_truncation()
        self.package.no_padding()
        self.vocab = max(self.package.get_vocab(with_added_tokens=True).values()) + 1
        self.words = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            words = self._words(path.parent / name)
            self.words.update({key: value for key, value in words.items() if value is not None})
        self.eos, self.bos = self._special("eos_token"), self._special("bos_token")
        before, after = self._template()
        if self.bos == NO_TOKEN and before:
            self.bos = before[0]
        if self.eos == NO_TOKEN and after:
            self.eos = after[-1]
        for usual in USUAL_EOS:
            if self.eos == NO_TOKEN and self.package.token_to_id(usual) is not None:
                self.eos = self.package.token_to_id(usual)
        self.identity = tokenizer_identity.identity(self.root, self.eos, self.bos)

    def encode_batch(self, texts: Any, special: Any) -> Any:
        return [e.ids for e in self.encodings(texts, special)]

    def encodings(self, texts: Any, special: Any) -> Any:
        self.package.encode_special_tokens = not special
        return self.package.encode_batch(texts, add_special_tokens=False)

    def special_ids(self) -> Any:
        added = self.package.get_added_tokens_decoder()
        return {i for i, token in added.items() if token.special}

    @staticmethod
    def _words(path: Any) -> Any:
        if not path.is_file():
            return {}
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as e:
            raise DataError(f"{path}: not JSON: {e}") from None

    def word(self, key: Any) -> Any:
        """The text of a token that the files beside tokenizer.json name; None if they do not."""
        value = self.words.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None

    def _special(self, key: Any) -> Any:
        word = self.word(key)
        if word is None:
            return NO_TOKEN
        found = self.package.token_to_id(word)
        if found is None:
            raise DataError(f"{self.name}: {key} is {word!r}, which is no token")
        return found

    def _template(self) -> Any:
        before: list[Any] = []
        after: list[Any] = []
        behind = False
        step = self.root.get("post_processor") or {}
        for one in step.get("processors", [step]):
            for piece in one.get("single", []) if one.get("type") == "TemplateProcessing" else []:
                if "Sequence" in piece:
                    behind = True
                else:
                    ids = one["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
                    (after if behind else before).extend(ids)
        return before, after


def load(name: str) -> Any:
    return Bytes() if name == "bytes" else Published(name)
