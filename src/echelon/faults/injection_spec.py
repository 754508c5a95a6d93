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


def _parse_choice(choices: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(did_you_mean(text, choices))
        return text

    return read


def _parse_number(low: float, convert: type = int) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = convert(text)
        if not low <= value < float("inf"):
            raise ValueError
        return value

    return read


RANK = InjectionOption(_parse_number(0), "a rank of the run, from 0")
STEP = InjectionOption(_parse_number(1), "a step of the run, from 1", 1)
ANY_RANK = InjectionOption(_parse_number(0), "a rank of the run, from 0", is_optional=True)
NAME = InjectionOption(str, "a pattern of file names", "*")


def _phase(default: str) -> InjectionOption:
    return InjectionOption(_parse_choice(PHASES), ", ".join(PHASES), default)


FAULT_KINDS: dict[str, dict[str, InjectionOption]] = {
    "kill": {
        "rank": RANK,
        "step": STEP,
        "phase": _phase("forward"),
        "signal": InjectionOption(_parse_choice(SIGNALS), ", ".join(SIGNALS), "SIGKILL"),
    },
    "gone": {
        "rank": RANK,
        "step": STEP,
        "of": InjectionOption(_parse_number(1), "the number of ranks it belongs to", is_optional=True),
    },
    "raise": {"rank": RANK, "step": STEP, "phase": _phase("forward")},
    "sleep": {
        "rank": RANK,
        "step": STEP,
        "phase": _phase("data"),
        "seconds": InjectionOption(_parse_number(0, float), "0 or more", 3600.0),
    },
    "skip-collective": {
        "rank": RANK,
        "step": STEP,
        "axis": InjectionOption(str, "an axis of the layout, as a diagnosis names it", ""),
        "op": InjectionOption(_parse_choice(OPS), ", ".join(OPS), ""),
    },
    "slow-rank": {
        "rank": RANK,
        "step": STEP,
        "factor": InjectionOption(_parse_number(1, float), "1 or more", 2.0),
    },
    "corrupt-file": {
        "rank": ANY_RANK,
        "step": STEP,
        "name": NAME,
        "byte": InjectionOption(_parse_number(0), "0 or more", is_optional=True),
    },
    "full-disk": {"rank": ANY_RANK, "step": STEP, "name": NAME},
    "spike": {"step": STEP},
    "flip": {"rank": RANK, "step": STEP, "layer": InjectionOption(str, "a pattern of module names of the model", "*")},
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
        """The number of its signal."""
        return int(signal.Signals[self.signal])


def injections_of_later_attempt(
    injections: Sequence[Injection], world_size: int, *, first_world_size: int
) -> tuple[Injection, ...]:
    """The injections that strike again in a later attempt: `gone` kills its rank at the start of every attempt that has
    as many ranks as it names."""
    gone = [one for one in injections if one.kind == "gone" and world_size == (one.of or first_world_size)]
    return tuple(replace(one, options={**one.options, "step": 0}) for one in gone)


def parse_injections(
    texts: Sequence[str], *, world_size: int | None = None, steps: int | None = None
) -> tuple[Injection, ...]:
    """Parse all injections, or raise a ValidationError with all of their errors."""
    parsed, faults = [], []
    for text in texts:
        injection, wrong = _parse_one(text, world_size, steps)
        faults += wrong
        parsed += [injection] if not wrong else []
    if faults:
        raise ValidationError(faults)
    return tuple(parsed)


def _parse_one(text: str, world_size: int | None, steps: int | None) -> tuple[Injection, list[ValidationIssue]]:
    kind, colon, rest = text.partition(":")
    if kind not in FAULT_KINDS:
        rule, hint = "is not a known fault", did_you_mean(kind, FAULT_KINDS)
        return Injection(kind), [
            ValidationIssue(key="inject", value=text, message=rule, legal=", ".join(FAULT_KINDS), hint=hint)
        ]
    known, faults = FAULT_KINDS[kind], []
    values: dict[str, Any] = {name: option.default for name, option in known.items()}
    given: set[str] = set()
    for part in rest.split(",") if colon else []:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in known:
            rule = f'has an unknown option ("{part.strip()}")'
            legal = ", ".join(f"{option}=" for option in known)
            faults.append(
                ValidationIssue(
                    key="inject", value=text, message=rule, legal=legal, hint=did_you_mean(name, known) if name else ""
                )
            )
            continue
        if name in given:
            faults.append(
                ValidationIssue(key="inject", value=text, message=f"gives {name} twice", legal=f"{name} once")
            )
        given.add(name)
        try:
            values[name] = known[name].parse(value)
        except ValueError as error:
            hint = str(error) if str(error).startswith("did you mean") else ""
            faults.append(
                ValidationIssue(
                    key="inject", value=text, message=f"has {name}={value}", legal=known[name].legal, hint=hint
                )
            )
            values[name] = None
    faults += [
        ValidationIssue(
            key="inject", value=text, message=f"is missing {name}", legal=option.legal, hint=f"e.g. {kind}:{name}=1"
        )
        for name, option in known.items()
        if option.default is None and not option.is_optional and name not in given
    ]
    faults += _out_of_range(text, values, world_size, steps)
    return Injection(kind, values), faults


def _out_of_range(
    text: str, values: dict[str, Any], world_size: int | None, steps: int | None
) -> list[ValidationIssue]:
    """Errors of ranks and steps that the run does not have."""
    rank, step, issues = values.get("rank"), values.get("step"), []
    if world_size is not None and rank is not None and rank >= world_size:
        rule = f"names a rank that the run does not have (rank={rank} of {world_size})"
        issues.append(ValidationIssue(key="inject", value=text, message=rule, legal=f"0 to {world_size - 1}"))
    if steps is not None and step is not None and step > steps:
        rule = f"names a step that the run does not have (step={step} of {steps})"
        issues.append(ValidationIssue(key="inject", value=text, message=rule, legal=f"1 to {steps}"))
    return issues
