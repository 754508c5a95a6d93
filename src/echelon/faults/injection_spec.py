"""A fault on purpose, as text: `kill:rank=2,step=7`. Read strictly, with every fault of every one at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from echelon.layout import Fault, FaultError
from echelon.layout.validation_error import did_you_mean

PHASES = ("data", "forward", "backward", "update", "save", "evaluation")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGABRT", "SIGSEGV", "SIGSTOP")


@dataclass(frozen=True)
class Option:
    read: Callable[[str], Any]
    legal: str
    default: Any = None
    """none: it must be given"""
    may_miss: bool = False


def _one_of(words: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(did_you_mean(text, words))
        return text

    return read


def _at_least(low: float, kind: type = int) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = kind(text)
        if not low <= value < float("inf"):
            raise ValueError
        return value

    return read


RANK = Option(_at_least(0), "a rank of the run, from 0")
STEP = Option(_at_least(1), "a step of the run, from 1", 1)
ANY_RANK = Option(_at_least(0), "a rank of the run, from 0", may_miss=True)
NAME = Option(str, "a pattern of file names", "*")


def _phase(default: str) -> Option:
    return Option(_one_of(PHASES), ", ".join(PHASES), default)


KINDS: dict[str, dict[str, Option]] = {
    "kill": {
        "rank": RANK,
        "step": STEP,
        "phase": _phase("forward"),
        "signal": Option(_one_of(SIGNALS), ", ".join(SIGNALS), "SIGKILL"),
    },
    "gone": {
        "rank": RANK,
        "step": STEP,
        "of": Option(_at_least(1), "the number of ranks it belongs to", may_miss=True),
    },
    "raise": {"rank": RANK, "step": STEP, "phase": _phase("forward")},
    "sleep": {
        "rank": RANK,
        "step": STEP,
        "phase": _phase("data"),
        "seconds": Option(_at_least(0, float), "0 or more", 3600.0),
    },
    "skip-collective": {
        "rank": RANK,
        "step": STEP,
        "axis": Option(str, "an axis of the layout, as a diagnosis names it", ""),
        "op": Option(_one_of(OPS), ", ".join(OPS), ""),
    },
    "slow-rank": {
        "rank": RANK,
        "step": STEP,
        "factor": Option(_at_least(1, float), "1 or more", 2.0),
    },
    "corrupt-file": {
        "rank": ANY_RANK,
        "step": STEP,
        "name": NAME,
        "byte": Option(_at_least(0), "0 or more", may_miss=True),
    },
    "full-disk": {"rank": ANY_RANK, "step": STEP, "name": NAME},
    "spike": {"step": STEP},
    "flip": {"rank": RANK, "step": STEP, "layer": Option(str, "a pattern of module names of the model", "*")},
}
"""what may be asked for, and how"""


@dataclass(frozen=True)
class Injection:
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
    def number(self) -> int:
        """Of its signal."""
        return int(signal.Signals[self.signal])


def later(injections: Sequence[Injection], world: int, *, began: int) -> tuple[Injection, ...]:
    """Those of a later attempt of a run that `began` with so many ranks.

    A rank that is gone dies at its start wherever there are as many ranks as it belongs to.
    """
    gone = [one for one in injections if one.kind == "gone" and world == (one.of or began)]
    return tuple(replace(one, options={**one.options, "step": 0}) for one in gone)


def read(texts: Sequence[str], *, world: int | None = None, steps: int | None = None) -> tuple[Injection, ...]:
    """All of them, or a FaultError with all that is wrong with them."""
    found, faults = [], []
    for text in texts:
        injection, wrong = _read_one(text, world, steps)
        faults += wrong
        found += [injection] if not wrong else []
    if faults:
        raise FaultError(faults)
    return tuple(found)


def _read_one(text: str, world: int | None, steps: int | None) -> tuple[Injection, list[Fault]]:
    kind, colon, rest = text.partition(":")
    if kind not in KINDS:
        rule, hint = "is no fault that can be injected", did_you_mean(kind, KINDS)
        return Injection(kind), [Fault(key="inject", value=text, rule=rule, legal=", ".join(KINDS), hint=hint)]
    known, faults = KINDS[kind], []
    values: dict[str, Any] = {name: option.default for name, option in known.items()}
    given: set[str] = set()
    for part in rest.split(",") if colon else []:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in known:
            rule = f'has an option that {kind} does not know ("{part.strip()}")'
            legal = ", ".join(f"{option}=" for option in known)
            faults.append(
                Fault(key="inject", value=text, rule=rule, legal=legal, hint=did_you_mean(name, known) if name else "")
            )
            continue
        if name in given:
            faults.append(Fault(key="inject", value=text, rule=f"gives {name} twice", legal=f"{name} once"))
        given.add(name)
        try:
            values[name] = known[name].read(value)
        except ValueError as error:
            hint = str(error) if str(error).startswith("did you mean") else ""
            faults.append(
                Fault(key="inject", value=text, rule=f"has {name}={value}", legal=known[name].legal, hint=hint)
            )
            values[name] = None
    faults += [
        Fault(key="inject", value=text, rule=f"does not say {name}", legal=option.legal, hint=f"e.g. {kind}:{name}=1")
        for name, option in known.items()
        if option.default is None and not option.may_miss and name not in given
    ]
    faults += _beyond(text, values, world, steps)
    return Injection(kind, values), faults


def _beyond(text: str, values: dict[str, Any], world: int | None, steps: int | None) -> list[Fault]:
    """What does not exist in this run."""
    rank, step, found = values.get("rank"), values.get("step"), []
    if world is not None and rank is not None and rank >= world:
        rule = f"names a rank that the run does not have (rank={rank} of {world})"
        found.append(Fault(key="inject", value=text, rule=rule, legal=f"0 to {world - 1}"))
    if steps is not None and step is not None and step > steps:
        rule = f"names a step that the run does not have (step={step} of {steps})"
        found.append(Fault(key="inject", value=text, rule=rule, legal=f"1 to {steps}"))
    return found
