"""The process that renders Jinja chat templates: a stranger's template can neither hang nor fill the machine.

[Note: what a template can do]

Jinja's sandbox keeps a template away from Python's attributes, and leaves it loops, recursion and texts that double.
So it is rendered here, in a process with a limit of memory, in which the CPU time of each conversation is limited by a
timer whose signal ends the process. No clock, no file and no random number is passed to a template: the same
conversation always renders to the same text.

[Note: the turns of the assistant]

1. A template with `{% generation %}` marks them itself, as in transformers.
2. Otherwise they are found by rendering prefixes. The turn of message i is what follows the prompt:

       messages[:i], add_generation_prompt    <|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\n
       messages[:i + 1]                       <|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\nHi!<|im_end|>
                                                                                                      └─── turn ──┘
   A template that renders a message differently once another one follows, or after another prompt, is refused.

The first line of standard input holds the template and the limits, each further line a conversation; each is answered
by one line. This file is run as a script, and imports Jinja and nothing of Echelon.
"""

import itertools
import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

MAX_TEXT = 64 << 20
"""characters of a rendered conversation"""
MAX_REASON = 300
"""characters of an error of the template"""
NONCHARACTERS = [chr(number) for number in range(0xFDD0, 0xFDF0)]
"""which Unicode leaves to programs for marks like these"""
NO_PREFIX = (
    "the chat template does not render a conversation prefix by prefix (message {number}), so that the turn of "
    'the assistant cannot be found; mark it with {{% generation %}} in data.chat_template, or set data.train_on="all"'
)


def unused_marks(text: str) -> tuple[str, str]:
    """Two characters that a text does not have. One cannot be cut in half, so that a lost mark is always noticed."""
    unused = [character for character in NONCHARACTERS if character not in text]
    if len(unused) < 2:
        raise ValueError("the conversation has every character that Unicode leaves for marks")
    return unused[0], unused[1]


def split_at_marks(text: str, marks: tuple[str, str], what: str) -> list[str]:
    """The pieces of a text outside and inside of marks, in turn. Raise ValueError if a template has lost a mark."""
    pieces, inside = [""], False
    for piece in re.split(f"([{marks[0]}{marks[1]}])", text):
        if piece not in marks:
            pieces[-1] += piece
        elif piece != marks[inside]:
            raise ValueError(f"the chat template cuts {what}")
        else:
            pieces.append("")
            inside = not inside
    if inside:
        raise ValueError(f"the chat template cuts {what}")
    return pieces


class TemplateRenderError(Exception):
    """A template that cannot be used for a conversation."""


def parse_template(source: str) -> Any:
    """Return the environment and the syntax tree of a template. Raise ValueError if it is not valid."""
    import jinja2
    from jinja2 import ext, nodes
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(ext.Extension):
        """`{% generation %}` ... `{% endgeneration %}` around what the assistant says."""

        tags = {"generation"}  # noqa: RUF012 - an attribute of Jinja's own class

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Callable[[], str]) -> str:
            first, last = cast(tuple[str, str], self.environment.globals["generation_marks"])
            return first + caller() + last

    def refuse(message: object) -> None:
        raise jinja2.TemplateError(str(message))

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    # As transformers renders chat templates.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    try:
        return environment, environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from error
    except RecursionError:
        raise ValueError("it is nested too deep") from None


class TemplateRenderer:
    """A template in this process."""

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        from jinja2 import nodes

        environment, tree = parse_template(source)
        self._marks_turns = any(True for _ in tree.find_all(nodes.ExtensionAttribute))
        self._source, self._environment = source, environment
        self._template, self._variables = environment.from_string(tree), variables

    def render(self, messages: Sequence[dict[str, Any]], find_turns: bool) -> dict[str, Any]:
        if self._marks_turns:
            text, turns = self._marked_turns(messages)
        else:
            text = self._render(messages)
            turns = self._turns_by_prefix(messages, text) if find_turns else []
        try:
            text.encode()
        except UnicodeEncodeError:
            raise TemplateRenderError("the chat template renders a text that is not valid Unicode") from None
        if find_turns and not any(end > start for start, end in turns):
            raise TemplateRenderError("the chat template renders no turn of the assistant, so nothing is a target")
        return {"text": text, "turns": turns if find_turns else []}

    def _marked_turns(self, messages: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        try:
            marks = unused_marks(self._source + json.dumps(messages, ensure_ascii=False))
            self._environment.globals["generation_marks"] = marks
            pieces = split_at_marks(self._render(messages), marks, "a turn of the assistant, or nests {% generation %}")
        except ValueError as error:
            raise TemplateRenderError(str(error)) from error
        ends = list(itertools.accumulate(map(len, pieces)))
        return "".join(pieces), list(zip(ends[0::2], ends[1::2]))  # noqa: B905 - the last piece is outside

    def _render(self, messages: Sequence[dict[str, Any]], *, prompt: bool = False) -> str:
        variables = {"tools": None, "documents": None, **self._variables}
        text = ""
        for piece in self._template.generate(messages=messages, add_generation_prompt=prompt, **variables):
            text += piece
            if len(text) > MAX_TEXT:
                raise TemplateRenderError(f"the chat template renders more than {MAX_TEXT} characters")
        return text

    def _turns_by_prefix(self, messages: Sequence[dict[str, Any]], text: str) -> list[tuple[int, int]]:
        turns = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], prompt=True)
            until = text if number + 1 == len(messages) else self._render(messages[: number + 1])
            if not (text.startswith(until) and until.startswith(before)):
                raise TemplateRenderError(NO_PREFIX.format(number=number + 1))
            turns.append((len(before), len(until)))
        return turns


def answer(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of an action, or its error as one line."""
    try:
        return action()
    except TemplateRenderError as error:
        return {"error": str(error)}
    except (MemoryError, RecursionError) as error:
        return {
            "error": f"the chat template needs too much {'memory' if isinstance(error, MemoryError) else 'recursion'}"
        }
    except Exception as error:  # whatever the template's expressions raise
        reason = " ".join(str(error).split())[:MAX_REASON]
        return {"error": f"the chat template cannot be rendered ({reason or type(error).__name__})"}


def answer_lines() -> None:
    """Answer the requests of standard input; see the first lines of this file."""
    settings = json.loads(sys.stdin.buffer.readline())
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = settings["bytes"] if hard == resource.RLIM_INFINITY else min(hard, settings["bytes"])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # Neither is reset when a process is started.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    __import__("jinja2.sandbox")  # before the time counts
    renderers: list[TemplateRenderer] = []

    def start() -> dict[str, Any]:
        renderers.append(TemplateRenderer(settings["source"], settings["variables"]))
        return {}

    def render() -> dict[str, Any]:
        request = json.loads(line)
        return renderers[0].render(request["messages"], request["find_turns"])

    action, line = start, b"{}"
    while line:
        signal.setitimer(signal.ITIMER_PROF, settings["seconds"])  # its signal ends the process
        result = answer(action)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        action, line = render, sys.stdin.buffer.readline()


if __name__ == "__main__":
    answer_lines()
