"""Chat templates: conversations as text, in which the turns of the assistant are known.

A template is Jinja, as in the directory of a Hugging Face tokenizer, or the built-in ChatML:

    <|im_start|>user
    Hello<|im_end|>
    <|im_start|>assistant
    Hi!<|im_end|>                 a turn of the assistant begins after its first line: "Hi!<|im_end|>\\n"

A Jinja template may come from a stranger. It is rendered by a process of its own with limits of time and memory; see
template_worker.py.
"""

import hashlib
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from echelon.data import template_worker
from echelon.data.decompression import DATA_EXTRA
from echelon.data.file_format import TextError
from echelon.input_file import MIB, AnyPath, InputFileError, parse_json, read_json, read_text

CHATML_NAME = "chatml"
MAX_TEMPLATE_BYTES = MIB
RENDER_SECONDS = 10.0
"""of CPU time for one conversation"""
RENDER_BYTES = 1 << 30
"""of memory for the process that renders"""
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Message = dict[str, Any]


class RenderedChat(NamedTuple):
    """A conversation as text."""

    text: str
    assistant: list[tuple[int, int]]
    """first character and end of each turn of the assistant"""


class ChatRenderer(Protocol):
    def render(self, messages: Sequence[Message], *, find_turns: bool) -> RenderedChat:
        """Render a conversation; the turns of the assistant are found only where they are asked for."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template; without a source, ChatML."""

    origin: str
    """Where it comes from, for the log and for errors."""
    source: str | None = None
    """Its Jinja text."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Special tokens that it may name."""

    @property
    def key(self) -> str:
        """Templates with equal keys render the same text."""
        if self.source is None:
            return CHATML_NAME
        content = json.dumps([self.source, dict(sorted(self.variables.items()))])
        return f"jinja@{hashlib.sha256(content.encode()).hexdigest()[:16]}"

    @contextmanager
    def open(self) -> Iterator[ChatRenderer]:
        """A renderer, until the end of the block."""
        if self.source is None:
            yield ChatMLRenderer()
            return
        with JinjaRenderer(self.source, self.variables, self.origin) as renderer:
            yield renderer


CHATML = ChatTemplate(origin="built-in ChatML")


class ChatMLRenderer:
    """The built-in ChatML, without Jinja."""

    def render(self, messages: Sequence[Message], *, find_turns: bool) -> RenderedChat:
        text, turns = "", []
        for number, message in enumerate(messages, 1):
            if message.get("tool_calls"):
                raise TextError(f"ChatML has no calls of tools (message {number}); give data.chat_template")
            text += f"<|im_start|>{message['role']}\n"
            start = len(text)
            text += f"{message.get('content', '')}<|im_end|>\n"
            if find_turns and message["role"] == "assistant":
                turns.append((start, len(text)))
        return RenderedChat(text, turns)


class JinjaRenderer:
    """A process that renders a Jinja template; see template_worker.py."""

    def __init__(self, source: str, variables: Mapping[str, str], origin: str) -> None:
        self._origin = origin
        if missing := missing_jinja():
            raise TextError(f"{origin}: the chat template {missing}")
        # As a script and not as a module, so that it imports no more than Jinja. With -P, its directory hides no module
        # of Python.
        command = [sys.executable, "-P", template_worker.__file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            settings = {"source": source, "variables": dict(variables)}
            self._ask({**settings, "seconds": RENDER_SECONDS, "bytes": RENDER_BYTES})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "JinjaRenderer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def render(self, messages: Sequence[Message], *, find_turns: bool) -> RenderedChat:
        answer = self._ask({"messages": messages, "find_turns": find_turns})
        return RenderedChat(answer["text"], [(start, end) for start, end in answer["turns"]])

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise TextError(f"{self._origin}: {self._end()}")
        answer = parse_json(line)
        if "error" in answer:
            raise TextError(f"{self._origin}: {answer['error']}")
        return answer

    def _end(self) -> str:
        """Why the process has ended."""
        status = self._process.wait()
        if status == -signal.SIGPROF:
            return f"the chat template needs more than {RENDER_SECONDS:g} s of CPU time for one conversation"
        return f"the process that renders the chat template ended (exit status {status})"


def missing_jinja() -> str:
    """Return what a Jinja template needs and is not installed, as the end of a sentence; empty if nothing is."""
    return "" if importlib.util.find_spec("jinja2") else f"needs the jinja2 package; {DATA_EXTRA}"


def load_chat_template(spec: AnyPath, tokenizer: AnyPath) -> ChatTemplate:
    """The template of a file, `chatml`, or with an empty `spec` that of the tokenizer's directory, else ChatML."""
    if spec == CHATML_NAME:
        return CHATML
    folder = None if tokenizer == "bytes" else Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    config = _tokenizer_config(folder) if folder is not None else {}
    variables = _special_tokens(config)
    try:
        if spec:
            source = read_text(spec, max_bytes=MAX_TEMPLATE_BYTES)
            return ChatTemplate(origin=str(spec), source=source, variables=variables)
        if folder is not None and (path := folder / "chat_template.jinja").exists():
            source = read_text(path, max_bytes=MAX_TEMPLATE_BYTES)
            return ChatTemplate(origin=str(path), source=source, variables=variables)
    except InputFileError as error:
        raise TextError(f"the chat template {error}; check data.chat_template") from error
    template = config.get("chat_template")
    if template is None or folder is None:
        return CHATML
    path = folder / "tokenizer_config.json"
    if isinstance(template, list):  # several, each with a name
        named = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
        template = named[0].get("template") if named else None
    if not isinstance(template, str):
        raise TextError(f'the chat template {path} is invalid (no text, and no "default" in a list); give another')
    return ChatTemplate(origin=str(path), source=template, variables=variables)


def _tokenizer_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "tokenizer_config.json"
    try:
        config: Any = read_json(path) if path.exists() else {}
    except InputFileError as error:
        raise TextError(f"the tokenizer's {error}; check data.tokenizer, or give data.chat_template") from error
    return config if isinstance(config, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names: texts, or objects with a `content`."""
    tokens = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens
