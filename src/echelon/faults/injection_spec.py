"""Injected faults as text, e.g. `kill:rank=2,step=7`, parsed strictly: all errors are reported at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from echelon.layout import ValidationError, ValidationIssue
from echelon.layout.validation_error import did_you_mean

PHASES = ("data", "forward", "backward", "update", "save", "evaluation")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGABRT", "SIGSEGV", "SIGSTOP")


@dataclass(frozen=True)
class InjectionOption:
    """One option of an injected fault."""

    parse: Callable[[str], Any]
    legal: str
    default: Any = None
    """None: the option is required, unless `is_optional`"""
    is_optional: bool = False


def _choice(choices: Sequence[str], default: str) -> InjectionOption:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(did_you_mean(text, choices))
        return text

    return InjectionOption(read, ", ".join(choices), default)


def _number(low: float, legal: str = "", default: float | None = None, **options: bool) -> InjectionOption:
    """A number of at least `low`: a float if the default is one."""
    convert = float if isinstance(default, float) else int

    def read(text: str) -> float:
        value = convert(text)
        if not low <= value < float("inf"):
            raise ValueError
        return value

    return InjectionOption(read, legal or f"{low:g} or more", default, **options)


STEP = _number(1, "a step of the run, from 1", 1)
RANK = _number(0, "a rank of the run, from 0")
ANY_RANK = replace(RANK, is_optional=True)
NAME = InjectionOption(str, "a pattern of file names", "*")
_AT = {"rank": RANK, "step": STEP}

FAULT_KINDS: dict[str, dict[str, InjectionOption]] = {
    "kill": {**_AT, "phase": _choice(PHASES, "forward"), "signal": _choice(SIGNALS, "SIGKILL")},
    "gone": {**_AT, "of": _number(1, "the number of ranks it belongs to", is_optional=True)},
    "raise": {**_AT, "phase": _choice(PHASES, "forward")},
    "sleep": {**_AT, "phase": _choice(PHASES, "data"), "seconds": _number(0, default=3600.0)},
    "skip-collective": {
        **_AT,
        "axis": InjectionOption(str, "an axis of the layout, as a diagnosis names it", ""),
        "op": _choice(OPS, ""),
    },
    "slow-rank": {**_AT, "factor": _number(1, default=2.0)},
    "corrupt-file": {"rank": ANY_RANK, "step": STEP, "name": NAME, "byte": _number(0, is_optional=True)},
    "full-disk": {"rank": ANY_RANK, "step": STEP, "name": NAME},
    "spike": {"step": STEP},
    "flip": {**_AT, "layer": InjectionOption(str, "a pattern of module names of the model", "*")},
}
"""the kinds of faults and their options"""


@dataclass(frozen=True)
class Injection:
    """A fault to inject: its kind, and the values of its options, which are attributes too."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.__dict__.get("options", {}):
            raise AttributeError(name)
        return self.options[name]

    def __str__(self) -> str:
        given = ",".join(f"{name}={value}" for name, value in self.options.items() if value not in ("", None))
        return f"{self.kind}:{given}"

    @property
    def signal_number(self) -> int:
        return int(signal.Signals[self.signal])


def injections_of_later_attempt(
    injections: Sequence[Injection], world_size: int, *, first_world_size: int
) -> tuple[Injection, ...]:
    """The injections that strike again in a later attempt: `gone` kills its rank at the start of every attempt that has
    as many ranks as it names."""
    gone = [fault for fault in injections if fault.kind == "gone" and world_size == (fault.of or first_world_size)]
    return tuple(replace(fault, options={**fault.options, "step": 0}) for fault in gone)


def parse_injections(
    texts: Sequence[str], *, world_size: int | None = None, steps: int | None = None
) -> tuple[Injection, ...]:
    """Parse all injections, or raise a ValidationError with all of their errors."""
    parsed = [_parse_one(text, world_size, steps) for text in texts]
    if issues := [issue for _, wrong in parsed for issue in wrong]:
        raise ValidationError(issues)
    return tuple(injection for injection, _ in parsed)


def _parse_one(text: str, world_size: int | None, steps: int | None) -> tuple[Injection, list[ValidationIssue]]:
    issues: list[ValidationIssue] = []

    def refuse(message: str, legal: str, hint: str = "") -> None:
        issues.append(ValidationIssue(key="inject", value=text, message=message, legal=legal, hint=hint))

    kind, colon, rest = text.partition(":")
    if kind not in FAULT_KINDS:
        refuse("is not a known fault", ", ".join(FAULT_KINDS), did_you_mean(kind, FAULT_KINDS))
        return Injection(kind), issues
    known = FAULT_KINDS[kind]
    values: dict[str, Any] = {name: option.default for name, option in known.items()}
    given: set[str] = set()
    for part in rest.split(",") if colon else []:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in known:
            legal = ", ".join(f"{option}=" for option in known)
            refuse(f'has an unknown option ("{part.strip()}")', legal, did_you_mean(name, known) if name else "")
            continue
        if name in given:
            refuse(f"gives {name} twice", f"{name} once")
        given.add(name)
        try:
            values[name] = known[name].parse(value)
        except ValueError as error:
            hint = str(error) if str(error).startswith("did you mean") else ""
            refuse(f"has {name}={value}", known[name].legal, hint)
            values[name] = None
    for name, option in known.items():
        if option.default is None and not option.is_optional and name not in given:
            refuse(f"is missing {name}", option.legal, f"e.g. {kind}:{name}=1")
    for name, first, count in (("rank", 0, world_size), ("step", 1, steps)):
        if count is not None and values.get(name) is not None and values[name] >= first + count:
            message = f"names a {name} that the run does not have ({name}={values[name]} of {count})"
            refuse(message, f"{first} to {first + count - 1}")
    return Injection(kind, values), issues
