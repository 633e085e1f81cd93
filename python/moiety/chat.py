"""Conversations by the model's own Jinja template, and which tokens of them are targets."""

import datetime
import json
import pathlib
import re
from typing import Any

from .prepare_errors import DataError, UsageError
from .inputs import BadDocument, check_text

# Marks around what {% generation %} encloses; nothing else may hold these characters.
BEGIN, END = "\U0010fffe", "\U0010ffff"
ROLES = ("system", "user", "assistant", "tool")


def keys_of(names: Any) -> Any:
    """The values of a record that make a conversation."""
    if "prompt" in names and "completion" in names:
        return ["prompt", "completion"]
    if "messages" in names:
        return ["messages"]
    raise BadDocument("no key 'messages', and not both 'prompt' and 'completion'")


def _plain(value: Any) -> Any:
    """A parsed value in which objects are dicts."""
    if isinstance(value, list):
        if hasattr(value, "value"):
            return {k: _plain(v) for k, v in value}
        return [_plain(v) for v in value]
    return value


def messages_of(record: Any) -> Any:
    if isinstance(record, BadDocument):
        raise record
    if "prompt" in record:
        return [
            {"role": "user", "content": check_text(record["prompt"], "prompt")},
            {"role": "assistant", "content": check_text(record["completion"], "completion")},
        ]
    messages = _plain(record["messages"])
    if not isinstance(messages, list) or not messages:
        raise BadDocument("'messages' is no list, or empty")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise BadDocument(f"message {i + 1}: its role is none of {', '.join(ROLES)}")
        check_text(message.get("content"), f"content of message {i + 1}")
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def _template_text(tokenizer: Any, given: Any) -> Any:
    if given:
        try:
            return pathlib.Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"--chat-template {given}: {e}") from None
    if tokenizer.folder is None:
        raise UsageError("--chat: the tokenizer bytes has no template; --chat-template FILE gives one")
    beside = tokenizer.folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    found = tokenizer.words.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((t["template"] for t in found if t.get("name") == "default"), None)
    if not isinstance(found, str):
        raise UsageError(f"--chat: beside {tokenizer.name} there is no chat_template; --chat-template FILE gives one")
    return found


def _environment() -> Any:
    try:
        import jinja2
        from jinja2 import ext, nodes, sandbox
    except ImportError:
        raise UsageError("--chat needs the package jinja2: pip install jinja2") from None

    class Generation(ext.Extension):
        """{% generation %} ... {% endgeneration %}, which transformers' templates mark targets with."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> Any:
            return BEGIN + caller() + END

    def raise_exception(message: Any) -> None:
        raise jinja2.TemplateError(message)

    # As transformers' apply_chat_template has it.
    made = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made, jinja2.TemplateError


class Renderer:
    def __init__(self, tokenizer: Any, template: Any) -> None:
        environment, self.error = _environment()
        text = _template_text(tokenizer, template)
        try:
            self.template = environment.from_string(text)
        except self.error as e:
            raise DataError(f"the chat template: {e}") from None
        names = [key for key in tokenizer.words if key.endswith("_token")]
        self.words = {name: word for name in names if (word := tokenizer.word(name)) is not None}
        self.special = tokenizer.special_ids()
        self.marks = re.search(r"{%[-+]?\s*generation\b", text) is not None

    def _render(self, messages: Any, prompts: bool = False) -> Any:
        try:
            return self.template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=prompts, **self.words
            )
        except (self.error, TypeError, ValueError) as e:
            raise BadDocument(f"the chat template: {e}") from None

    def text_and_spans(self, messages: Any) -> Any:
        """The text of a conversation, and where in it the assistant speaks."""
        if any(BEGIN in m["content"] or END in m["content"] for m in messages):
            raise BadDocument("a message holds U+10FFFE or U+10FFFF")
        whole = self._render(messages)
        if self.marks:
            return self._marked(whole)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, behind = self._render(messages[:i], prompts=True), self._render(messages[: i + 1])
            if not (whole.startswith(before) and whole.startswith(behind) and len(before) <= len(behind)):
                raise BadDocument(
                    f"message {i + 1}: the template writes it otherwise when more follows; a template whose "
                    "{% generation %} marks what the assistant says works (--chat-template)"
                )
            spans.append((len(before), len(behind)))
        return whole, spans

    @staticmethod
    def _marked(whole: Any) -> Any:
        text, spans = "", []
        for i, part in enumerate(whole.replace(END, BEGIN).split(BEGIN)):
            if i % 2:
                spans.append((len(text), len(text) + len(part)))
            text += part
        return text, spans

    def targets(self, encoding: Any, text: str, spans: Any) -> Any:
        """Of each id whether it is a target, and the bytes of text that the assistant says. What
        the template writes behind the token that ends a message has no loss."""
        targets, said = [0] * len(encoding.ids), 0
        for begin, end in spans:
            inside = [t for t, (a, b) in enumerate(encoding.offsets) if a < end and b > begin]
            ends = [t for t in inside if encoding.ids[t] in self.special]
            if ends:
                inside = [t for t in inside if t <= ends[-1]]
                end = encoding.offsets[ends[-1]][0]
            for t in inside:
                targets[t] = 1
            said += len(text[begin:end].encode())
        return targets, said
