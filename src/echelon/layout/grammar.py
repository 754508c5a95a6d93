"""The layout's grammar: one row per key, and how a line of text becomes values.

A new strategy is one row of `KEYS` and one field of `Layout`. rules.py holds the rules between keys.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from textwrap import wrap

from echelon.layout.validation_error import ValidationIssue, closest_word, did_you_mean

Value = int | str


class ValueSyntax(ABC):
    """The legal values of a key."""

    words: tuple[str, ...]
    """the fixed words among the legal values, for "did you mean\""""

    @property
    @abstractmethod
    def legal(self) -> str:
        """The legal values, as text."""

    @abstractmethod
    def parse(self, text: str) -> Value | None:
        """Return the value in its canonical form, or None if the text is invalid."""

    def is_legal(self, value: object) -> bool:
        """Whether a key may have this value, in its canonical form."""
        return self.parse(str(value)) == value

    def candidates(self, numbers: Iterable[int]) -> list[Value]:
        """Return values to try in the search for a legal one; `numbers` are the integers worth trying."""
        return list(self.words)


@dataclass(frozen=True, kw_only=True)
class IntegerSyntax(ValueSyntax):
    """An integer in a range."""

    low: int = 1
    high: int = 10**9
    words: tuple[str, ...] = ()

    @property
    def legal(self) -> str:
        few = self.high - self.low < 10
        return ", ".join(str(n) for n in range(self.low, self.high + 1)) if few else f">= {self.low}"

    def parse(self, text: str) -> Value | None:
        if not re.fullmatch(r"[0-9]{1,10}", text):
            return None
        return int(text) if self.low <= int(text) <= self.high else None

    def is_legal(self, value: object) -> bool:
        # The planner's search creates layouts by the hundred thousand.
        return (type(value) is int and self.low <= value <= self.high) or super().is_legal(value)

    def candidates(self, numbers: Iterable[int]) -> list[Value]:
        return sorted({n for n in (self.low, *numbers) if self.low <= n <= self.high})


@dataclass(frozen=True, kw_only=True)
class ParameterizedWord:
    """A word with an argument, such as `every:N`."""

    notation: str
    """how it is written"""
    prefix: str
    suffix: str = ""
    number_format: str = ""
    """"integer" or "decimal" if the argument is a number above zero; empty if it is any text"""

    def parse(self, text: str) -> str | None:
        if not (text.startswith(self.prefix) and text.endswith(self.suffix)):
            return None
        part = text[len(self.prefix) : len(text) - len(self.suffix)].strip()
        if self.number_format:
            pattern = r"[0-9]{1,9}" if self.number_format == "integer" else r"[0-9]{1,9}(\.[0-9]{1,9})?"
            if not re.fullmatch(pattern, part) or not Decimal(part):
                return None
            part = format(Decimal(part).normalize(), "f")
        return f"{self.prefix}{part}{self.suffix}" if part and not set(part) & set(",;\n\r") else None


@dataclass(frozen=True, kw_only=True)
class WordSyntax(ValueSyntax):
    """One of several words."""

    words: tuple[str, ...]
    parameterized: tuple[ParameterizedWord, ...] = ()

    @property
    def legal(self) -> str:
        return ", ".join((*self.words, *(form.notation for form in self.parameterized)))

    def parse(self, text: str) -> Value | None:
        if text in self.words:
            return text
        return next((value for form in self.parameterized if (value := form.parse(text)) is not None), None)


@dataclass(frozen=True, kw_only=True)
class JoinedWordsSyntax(ValueSyntax):
    """`none`, or several words joined by `+`."""

    words: tuple[str, ...]
    """`none` first"""

    @property
    def legal(self) -> str:
        return f"none, or some of {', '.join(self.words[1:])} joined by +"

    def parse(self, text: str) -> Value | None:
        given = [part.strip() for part in text.split("+")]
        if given == ["none"]:
            return "none"
        if len(set(given)) < len(given) or not set(given) <= set(self.words[1:]):
            return None
        return "+".join(word for word in self.words if word in given)


@dataclass(frozen=True, kw_only=True)
class LayoutKey:
    """One row of the grammar."""

    name: str
    syntax: ValueSyntax
    default: str
    """the value if the key is not given, as text"""
    meaning: str


_SCHEDULE_SYNTAX = WordSyntax(
    words=(
        *("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"),
        *("dualpipe-v", "pipedream", "pipedream-vsync", "2bw", "terapipe"),
    ),
    parameterized=(ParameterizedWord(notation="file:PATH", prefix="file:"),),
)
_RECOMPUTE_SYNTAX = WordSyntax(
    words=("none", "full", "selective", "ops", "sqrt"),
    parameterized=(
        ParameterizedWord(notation="every:N", prefix="every:", number_format="integer"),
        ParameterizedWord(notation="budget:NGiB", prefix="budget:", suffix="GiB", number_format="decimal"),
    ),
)
_OFFLOAD_SYNTAX = JoinedWordsSyntax(words=("none", "optimizer", "params", "activations", "disk"))

# fmt: off
KEYS: tuple[LayoutKey, ...] = (
    LayoutKey(name="dp", syntax=IntegerSyntax(), default="world / (tp x cp x pp)",
        meaning="data-parallel ranks"),
    LayoutKey(name="zero", syntax=IntegerSyntax(low=0, high=3), default="0; 1 under pp; 3 if shard is given",
        meaning="what is sharded over dp: nothing, optimizer states, gradients too, parameters too"),
    LayoutKey(name="shard", syntax=IntegerSyntax(), default="dp",
        meaning="shard inside groups of this size and replicate across them; divides dp"),
    LayoutKey(name="tp", syntax=IntegerSyntax(), default="1",
        meaning="tensor-parallel ranks; kv heads are replicated if tp is a multiple of them"),
    LayoutKey(name="tp_kind", syntax=WordSyntax(words=("1d", "2d", "2.5d", "3d")), default="1d",
        meaning="shape of the tensor-parallel ranks"),
    LayoutKey(name="depth", syntax=IntegerSyntax(), default="1",
        meaning="layers of 2.5d's grid: tp = side x side x depth"),
    LayoutKey(name="sp", syntax=IntegerSyntax(low=0, high=1), default="1 when tp > 1 and tp_kind=1d, else 0",
        meaning="Megatron sequence parallelism: norms and residuals split over tp"),
    LayoutKey(name="cp", syntax=IntegerSyntax(), default="1",
        meaning="context-parallel ranks: each holds a part of every sequence"),
    LayoutKey(name="cp_kind", syntax=WordSyntax(words=("ring", "ulysses", "gather", "ring-ulysses")), default="ring",
        meaning="how attention reaches the other parts of a sequence"),
    LayoutKey(name="ulysses", syntax=IntegerSyntax(), default="cp with cp_kind=ulysses, else 1",
        meaning="ranks of cp that exchange heads; the ring runs over the rest"),
    LayoutKey(name="pp", syntax=IntegerSyntax(), default="1",
        meaning="pipeline ranks"),
    LayoutKey(name="schedule", syntax=_SCHEDULE_SYNTAX, default="1f1b",
        meaning="pipeline schedule"),
    LayoutKey(name="vpp", syntax=IntegerSyntax(), default="2 if the schedule has chunks, else 1",
        meaning="chunks of layers per pipeline rank"),
    LayoutKey(name="ep", syntax=IntegerSyntax(), default="1",
        meaning="expert-parallel ranks, folded into dp x cp x tp"),
    LayoutKey(name="etp", syntax=IntegerSyntax(), default="1",
        meaning="tensor-parallel ranks inside one expert"),
    LayoutKey(name="ep_inner", syntax=IntegerSyntax(), default="1",
        meaning="ranks of ep x etp that share a node: a token crosses to another node once (hierarchical all-to-all)"),
    LayoutKey(name="microbatch", syntax=IntegerSyntax(), default="batch / (dp x accumulate), else 1",
        meaning="sequences per rank and microbatch"),
    LayoutKey(name="accumulate", syntax=IntegerSyntax(), default="batch / (dp x microbatch), else 1",
        meaning="microbatches per step"),
    LayoutKey(name="recompute", syntax=_RECOMPUTE_SYNTAX, default="none",
        meaning="what is recomputed in the backward pass"),
    LayoutKey(name="offload", syntax=_OFFLOAD_SYNTAX, default="none",
        meaning="what is offloaded from the device"),
)
# fmt: on
"""All keys, in the order in which a layout is written."""

KEYS_BY_NAME: dict[str, LayoutKey] = {key.name: key for key in KEYS}


def describe_grammar() -> str:
    """Return the grammar as text, an entry per key: meaning, legal values, default."""
    lines = []
    for key in KEYS:
        lines.append(f"{key.name:<12}{key.meaning}")
        facts = f"{key.syntax.legal}; default: {key.default}"
        lines += wrap(facts, width=100, initial_indent=" " * 12, subsequent_indent=" " * 12, break_on_hyphens=False)
    return "\n".join(lines)


@dataclass(kw_only=True)
class ParsedPairs:
    """The values and issues of one line of text."""

    values: dict[str, Value] = field(default_factory=dict)
    """values by key; a misspelt key counts as the one it probably means, so that rules check what was meant"""
    issues: list[ValidationIssue] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    """known keys with an invalid value"""

    def report(self, key: str, value: str, message: str, legal: str, hint: str) -> None:
        self.issues.append(ValidationIssue(key=key, value=value, message=message, legal=legal, hint=hint))


def parse_pairs(text: str) -> ParsedPairs:
    """Parse `key=value` pairs between commas. Never raises: issues are collected with the valid values."""
    parsed = ParsedPairs()
    if not text.strip():
        return parsed
    first, semicolon, _ = text.partition(";")
    if semicolon:
        hint = "semicolons separate layouts, commas separate keys"
        parsed.report("layout", text, "is more than one layout", "one layout", hint)
    meant: dict[str, Value] = {}
    for item in first.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not item.strip():
            hint = "leave the extra comma out"
            parsed.report("layout", text, "has an empty place between commas", "key=value", hint)
        elif not equals:
            hint = f"write {name}=VALUE" if name in KEYS_BY_NAME else did_you_mean(name, KEYS_BY_NAME)
            parsed.report(name, "", "is not key=value", "key=value, as in dp=4,tp=2", hint)
        elif name not in KEYS_BY_NAME:
            guess, legal = closest_word(name, KEYS_BY_NAME), ", ".join(KEYS_BY_NAME)
            parsed.report(name, value, "is not a layout key", legal, did_you_mean(name, KEYS_BY_NAME))
            if guess and (known := KEYS_BY_NAME[guess].syntax.parse(value)) is not None:
                meant[guess] = known
        else:
            _parse_value(KEYS_BY_NAME[name], value, parsed)
    parsed.values = meant | parsed.values
    return parsed


def _parse_value(key: LayoutKey, text: str, parsed: ParsedPairs) -> None:
    value = key.syntax.parse(text)
    if key.name in parsed.values or key.name in parsed.unreadable:
        message = f"is given twice (first {key.name}={parsed.values.get(key.name, '?')})"
        parsed.report(key.name, text, message, "once", f"keep one {key.name}")
    elif value is None:
        message = "is not a legal value" if text else "has no value"
        parsed.report(key.name, text, message, key.syntax.legal, did_you_mean(text, key.syntax.words))
        parsed.unreadable.append(key.name)
    else:
        parsed.values[key.name] = value
