"""The layout's grammar: one row per key, and how a line of text becomes values.

A later strategy is one row of `KEYS` (and one field of `Layout`). The rules between keys live in rules.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from textwrap import wrap
from typing import Protocol

from echelon.layout.validation_error import Fault, closest, did_you_mean

Value = int | str


class Kind(Protocol):
    """What may stand behind a key's equals sign."""

    @property
    def legal(self) -> str:
        """The legal values, for people."""

    @property
    def words(self) -> tuple[str, ...]:
        """The fixed words among them, for "did you mean"."""

    def read(self, text: str) -> Value | None:
        """The value in its canonical form, or None where the text is not one."""

    def candidates(self, numbers: Iterable[int]) -> list[Value]:
        """Values to try when looking for one that works; `numbers` are those worth trying."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """A whole number in a range."""

    low: int = 1
    high: int = 10**9

    words: tuple[str, ...] = ()

    @property
    def legal(self) -> str:
        few = self.high - self.low < 10
        return ", ".join(str(n) for n in range(self.low, self.high + 1)) if few else f">= {self.low}"

    def read(self, text: str) -> Value | None:
        if not re.fullmatch(r"[0-9]{1,10}", text):
            return None
        return int(text) if self.low <= int(text) <= self.high else None

    def candidates(self, numbers: Iterable[int]) -> list[Value]:
        return sorted({n for n in (self.low, *numbers) if self.low <= n <= self.high})


@dataclass(frozen=True, kw_only=True)
class Form:
    """A word with a part that the user fills in, such as `every:N`."""

    shape: str
    """how it is written, for people"""
    before: str
    after: str = ""
    number: str = ""
    """"whole" or "decimal" where the part is a number above zero; empty where it is any text"""

    def read(self, text: str) -> str | None:
        if not (text.startswith(self.before) and text.endswith(self.after)):
            return None
        part = text[len(self.before) : len(text) - len(self.after)].strip()
        if self.number:
            pattern = r"[0-9]{1,9}" if self.number == "whole" else r"[0-9]{1,9}(\.[0-9]{1,9})?"
            if not re.fullmatch(pattern, part) or not Decimal(part):
                return None
            part = format(Decimal(part).normalize(), "f")
        return f"{self.before}{part}{self.after}" if part and not set(part) & set(",;\n\r") else None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of some words."""

    words: tuple[str, ...]
    forms: tuple[Form, ...] = ()

    @property
    def legal(self) -> str:
        return ", ".join((*self.words, *(form.shape for form in self.forms)))

    def read(self, text: str) -> Value | None:
        if text in self.words:
            return text
        return next((value for form in self.forms if (value := form.read(text)) is not None), None)

    def candidates(self, numbers: Iterable[int]) -> list[Value]:
        return list(self.words)


@dataclass(frozen=True, kw_only=True)
class Joined:
    """`none`, or some words joined by `+`."""

    parts: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        return ("none", *self.parts)

    @property
    def legal(self) -> str:
        return f"none, or some of {', '.join(self.parts)} joined by +"

    def read(self, text: str) -> Value | None:
        given = [part.strip() for part in text.split("+")]
        if given == ["none"]:
            return "none"
        if len(set(given)) < len(given) or not set(given) <= set(self.parts):
            return None
        return "+".join(part for part in self.parts if part in given)

    def candidates(self, numbers: Iterable[int]) -> list[Value]:
        return list(self.words)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One row of the grammar."""

    name: str
    kind: Kind
    default: str
    """what it is when it is not given, for people"""
    meaning: str
    built: tuple[str, ...] | None = None
    """the values that can be run today, or the starts of forms; None for all. The others can only be planned"""
    missing: str = ""
    """what is not built yet, as the start of a sentence"""


_SCHEDULES = Choice(
    words=(
        *("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"),
        *("dualpipe-v", "pipedream", "pipedream-vsync", "2bw", "terapipe"),
    ),
    forms=(Form(shape="file:PATH", before="file:"),),
)
_BUILT_SCHEDULES = (
    *("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"),
    *("pipedream", "pipedream-vsync", "2bw", "terapipe", "file:"),
)
_RECOMPUTE = Choice(
    words=("none", "full", "selective", "ops", "sqrt"),
    forms=(
        Form(shape="every:N", before="every:", number="whole"),
        Form(shape="budget:NGiB", before="budget:", after="GiB", number="decimal"),
    ),
)

# fmt: off
KEYS: tuple[Key, ...] = (
    Key(name="dp", kind=Number(), default="what is left of the world",
        meaning="data-parallel ranks"),
    Key(name="zero", kind=Number(low=0, high=3), default="0; 1 under pp; 3 where shard is given",
        meaning="what is sharded over dp: nothing, optimizer states, gradients too, parameters too"),
    Key(name="shard", kind=Number(), default="dp",
        meaning="shard inside groups of this size and replicate across them; divides dp"),
    Key(name="tp", kind=Number(), default="1",
        meaning="tensor-parallel ranks; kv heads are replicated where tp is a multiple of them"),
    Key(name="tp_kind", kind=Choice(words=("1d", "2d", "2.5d", "3d")), default="1d",
        meaning="shape of the tensor-parallel ranks"),
    Key(name="depth", kind=Number(), default="1",
        meaning="layers of 2.5d's grid: tp = side x side x depth"),
    Key(name="sp", kind=Number(low=0, high=1), default="1 when tp > 1 and tp_kind=1d, else 0",
        meaning="Megatron sequence parallelism: norms and residuals split over tp"),
    Key(name="cp", kind=Number(), default="1",
        meaning="context-parallel ranks: each holds a part of every sequence"),
    Key(name="cp_kind", kind=Choice(words=("ring", "ulysses", "gather", "ring-ulysses")), default="ring",
        meaning="how attention sees the other parts of a sequence"),
    Key(name="ulysses", kind=Number(), default="cp with cp_kind=ulysses, else 1",
        meaning="ranks of cp that exchange heads; the ring runs over the rest"),
    Key(name="pp", kind=Number(), default="1",
        meaning="pipeline ranks"),
    Key(name="schedule", kind=_SCHEDULES, default="1f1b",
        meaning="order of the forward and backward passes of a pipeline", built=_BUILT_SCHEDULES,
        missing="this schedule is"),
    Key(name="vpp", kind=Number(), default="2 where the schedule has chunks, else 1",
        meaning="chunks of layers per pipeline rank"),
    Key(name="ep", kind=Number(), default="1",
        meaning="expert-parallel ranks, folded into dp x cp x tp"),
    Key(name="etp", kind=Number(), default="1",
        meaning="tensor-parallel ranks inside one expert"),
    Key(name="ep_inner", kind=Number(), default="1",
        meaning="ranks of ep x etp that share a node: tokens cross to another node once and are handed on inside"),
    Key(name="microbatch", kind=Number(), default="batch / (dp x accumulate), else 1",
        meaning="sequences per rank and microbatch"),
    Key(name="accumulate", kind=Number(), default="batch / (dp x microbatch), else 1",
        meaning="microbatches per step"),
    Key(name="recompute", kind=_RECOMPUTE, default="none",
        meaning="what is recomputed in the backward pass"),
    Key(name="offload", kind=Joined(parts=("optimizer", "params", "activations", "disk")), default="none",
        meaning="what lives off the device"),
)
# fmt: on
"""The whole grammar, in the order in which a layout is written."""

ROWS: dict[str, Key] = {key.name: key for key in KEYS}


def describe() -> str:
    """The grammar for people, an entry per key: meaning, legal values, default, and what can only be planned."""
    lines = []
    for key in KEYS:
        runs = f"; runs today: {', '.join(key.built)}" if key.built is not None else ""
        lines.append(f"{key.name:<12}{key.meaning}")
        facts = f"{key.kind.legal}; default: {key.default}{runs}"
        lines += wrap(facts, width=100, initial_indent=" " * 12, subsequent_indent=" " * 12, break_on_hyphens=False)
    return "\n".join(lines)


@dataclass(kw_only=True)
class Reading:
    """What one line of text says, as far as it can be read."""

    given: dict[str, Value] = field(default_factory=dict)
    """values by key; a misspelt key counts as the one it probably means, so that the rules see what was meant"""
    faults: list[Fault] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    """known keys whose value could not be read"""


def read(text: str) -> Reading:
    """Reads `key=value` pairs between commas. Never raises: faults are collected beside what could be read."""
    reading = Reading()
    if not text.strip():
        return reading
    first, semicolon, _ = text.partition(";")
    if semicolon:
        rule, hint = "is more than one layout", "semicolons part layouts, commas part keys"
        reading.faults.append(Fault(key="layout", value=text, rule=rule, legal="one layout", hint=hint))
    meant: dict[str, Value] = {}
    for item in first.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not item.strip():
            rule, hint = "has an empty place between commas", "leave the extra comma out"
            reading.faults.append(Fault(key="layout", value=text, rule=rule, legal="key=value", hint=hint))
        elif not equals:
            hint = f"write {name}=VALUE" if name in ROWS else did_you_mean(name, ROWS)
            fault = Fault(key=name, value="", rule="is not key=value", legal="key=value, as in dp=4,tp=2", hint=hint)
            reading.faults.append(fault)
        elif name not in ROWS:
            guess = closest(name, ROWS)
            rule, legal = "is not a layout key", ", ".join(ROWS)
            reading.faults.append(Fault(key=name, value=value, rule=rule, legal=legal, hint=did_you_mean(name, ROWS)))
            if guess and (known := ROWS[guess].kind.read(value)) is not None:
                meant[guess] = known
        else:
            _read_value(ROWS[name], value, reading)
    reading.given = meant | reading.given
    return reading


def _read_value(key: Key, text: str, reading: Reading) -> None:
    value = key.kind.read(text)
    if key.name in reading.given or key.name in reading.unreadable:
        rule = f"is given twice (first {key.name}={reading.given.get(key.name, '?')})"
        reading.faults.append(Fault(key=key.name, value=text, rule=rule, legal="once", hint=f"keep one {key.name}"))
    elif value is None:
        rule = "is not a legal value" if text else "has no value"
        hint = did_you_mean(text, key.kind.words)
        reading.faults.append(Fault(key=key.name, value=text, rule=rule, legal=key.kind.legal, hint=hint))
        reading.unreadable.append(key.name)
    else:
        reading.given[key.name] = value
