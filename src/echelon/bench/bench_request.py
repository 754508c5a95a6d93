"""From what a person asks to the measurements to make. All that is wrong is told at once, without torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.bench import peers
from echelon.bench.bench_device import Machine
from echelon.bench.measurement import US, Request
from echelon.bench.peers import PEERS, Peer
from echelon.bench.reference_shapes import ON_CPU, ON_CUDA, SHAPES, Shape
from echelon.layout.validation_error import Fault, FaultError, did_you_mean

PRECISIONS = ("fp32", "bf16", "fp8", "fp8-row")
STATES = {"float32": 16, "bfloat16": 12}
"""the types of the optimizer's means, with the fewest bytes that a parameter then takes: copies, gradient, two means"""
PARTS = ("devices", "steps")
NOBODY = "none"
RECOMPUTE = ("none", "ops", "selective", "full", "sqrt")
"""what is compared; `budget` chooses among them, and `every:N` repeats what `full` does"""
OF_STEPS = ("shapes", "precision", "peers", "against", "steps", "states", "recompute", "batch", "seq_len", "profile")
"""options that say nothing about devices"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a person may say; empty and 0 leave the choice to us."""

    only: str = ""
    out: Path | None = None
    profile: Path | None = None
    shapes: str = ""
    precision: str = ""
    peers: str = ""
    against: str = ""
    steps: int | None = None
    states: str = ""
    recompute: str = ""
    batch: int | None = None
    seq_len: int | None = None

    @property
    def with_devices(self) -> bool:
        return self.only != "steps" and self.profile is None

    @property
    def with_steps(self) -> bool:
        return self.only != "devices" and self.profile is None

    @property
    def folder(self) -> str:
        """of peers; empty where there is none"""
        return self.peers or (str(peers.FOLDER) if peers.FOLDER.is_dir() else "")


@dataclass(frozen=True, kw_only=True)
class Todo:
    """What will be measured, and what will not."""

    requests: tuple[Request, ...]
    left_out: dict[str, str]
    """shapes and peers, each with why"""


# -- what can be wrong ------------------------------------------------------------------------------------------------


def check(options: Options) -> None:
    """Raises with everything that is wrong."""
    found = [*_names(options), *_numbers(options), *_files(options), *_together(options)]
    if found:
        raise FaultError(found)


def _names(options: Options) -> Iterator[Fault]:
    lists = {"shapes": SHAPES, "precision": PRECISIONS, "against": (*peers.NAMES, NOBODY)}
    for key, legal in lists.items():
        for word in _words(getattr(options, key)):
            if word not in legal:
                yield _unknown(key, word, legal)
    for key, legal in {"only": PARTS, "states": STATES, "recompute": RECOMPUTE}.items():
        word = getattr(options, key)
        if word and word not in legal:
            yield _unknown(key, word, legal)


def _unknown(key: str, word: str, legal: Iterable[str]) -> Fault:
    names = list(legal)
    return _fault(key, word, "is not known", legal=", ".join(names), hint=did_you_mean(word, names))


def _numbers(options: Options) -> Iterator[Fault]:
    for key in ("steps", "batch", "seq_len"):
        value = getattr(options, key)
        if value is not None and value < 1:
            yield _fault(key, value, "is too small", legal="1 or more")


def _files(options: Options) -> Iterator[Fault]:
    if options.peers and not Path(options.peers).is_dir():
        yield _fault("peers", options.peers, "is no folder", legal="one that holds unpacked wheels")
    if options.out is not None and (rule := _unwritable(options.out, (".toml",))):
        hint = "`echelon plan --cluster` knows a file by its ending" if "end" in rule else ""
        yield _fault("out", options.out, rule, legal="a file such as mine.toml", hint=hint)
    if options.profile is not None and (rule := _unwritable(options.profile, (".json", ".svg"))):
        yield _fault("profile", options.profile, rule, legal="a file such as step.json or step.svg")


def _unwritable(path: Path, endings: tuple[str, ...]) -> str:
    """Why the file cannot be written, or will not be read, said before minutes are spent; or ""."""
    if path.suffix not in endings:
        return f"does not end in {' or '.join(endings)}"
    if path.is_dir():
        return "is a folder"
    if not path.parent.is_dir():
        return f"lies in a folder that does not exist ({path.parent})"
    return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "cannot be written"


def _together(options: Options) -> Iterator[Fault]:
    if options.out is not None and not options.with_devices:
        why = "--only steps" if options.only else "--profile"
        yield _fault("out", options.out, f"needs the devices, which {why} leaves out", hint="leave one of them out")
    if options.only and options.profile is not None:
        yield _fault("only", options.only, "has no effect with --profile", hint="leave it out")
    elif options.only == "devices":
        for key in OF_STEPS:
            if (value := getattr(options, key)) not in ("", None):
                yield _fault(key, value, "has no effect with --only devices", hint="leave it out")
    if options.profile is not None:
        for key in ("peers", "against"):
            if value := getattr(options, key):
                yield _fault(key, value, "has no effect with --profile, which is of our own step", hint="leave it out")


def _fault(key: str, value: Any, rule: str, *, legal: str = "", hint: str = "") -> Fault:
    return Fault(key=f"--{key.replace('_', '-')}", value=str(value), rule=rule, legal=legal, hint=hint)


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word for part in text.split(",") if (word := part.strip())))


# -- what to do -------------------------------------------------------------------------------------------------------


def todo(options: Options, machine: Machine, *, quick: bool = False) -> Todo:
    """The measurements in order: ours before its peers, shape by shape."""
    narrow = [word for word in _words(options.precision) if family(word) == "fp8"]
    if narrow and not machine.fp8:
        rule = f"cannot be multiplied by {machine.name}"
        raise FaultError([_fault("precision", word, rule, legal="fp32, bf16") for word in narrow])
    left_out: dict[str, str] = {}
    against = list(_peers(options, machine, left_out))
    requests: list[Request] = []
    for shape in _shapes(options, machine, left_out):
        for precision in _precisions(options, machine):
            own = _request(shape, precision, options, machine, quick)
            requests.append(own)
            others = [peer for peer in against if peer.precision == family(precision)]
            again = options.recompute if options.recompute in peers.RECOMPUTE else shape.peer_recompute
            requests += (
                replace(own, who=peer.name, precision=peer.precision, recompute=again, states="float32")
                for peer in others
            )
    return Todo(requests=tuple(dict.fromkeys(requests)), left_out=left_out)


def profiled(options: Options, machine: Machine) -> list[Request]:
    """The steps of ours to be looked into."""
    if machine.kind != "cuda":
        raise FaultError([_fault("profile", options.profile, "needs a GPU, and here is none")])
    return [
        _request(shape, precision, options, machine, False)
        for shape in _shapes(options, machine, {})
        for precision in _words(options.precision) or ["bf16"]
    ]


def family(precision: str) -> str:
    """What a precision is compared by: both ways of 8 bits are one."""
    return precision.partition("-")[0]


def _shapes(options: Options, machine: Machine, left_out: dict[str, str]) -> Iterator[Shape]:
    again = options.recompute or None
    changed = {"batch": options.batch, "seq_len": options.seq_len, "recompute": again, "recompute_fp8": again}
    given: dict[str, Any] = {key: value for key, value in changed.items() if value is not None}
    least = STATES[options.states or "float32"]
    for name in _words(options.shapes) or (ON_CUDA if machine.kind == "cuda" else ON_CPU):
        shape = replace(SHAPES[name], **given)
        needed = least * shape.model.parameters
        # Only where nobody asked for it by name: the reason of a row that failed would say the same, later.
        if not options.shapes and machine.kind == "cuda" and needed > machine.memory:
            left_out[name] = f"needs {needed / 2**30:.0f} GiB, and {machine.name} has {machine.memory / 2**30:.0f}"
        else:
            yield shape


def _precisions(options: Options, machine: Machine) -> list[str]:
    if options.precision:
        return _words(options.precision)
    return ["fp32"] if machine.kind == "cpu" else ["bf16", "fp8"] if machine.fp8 else ["bf16"]


def _peers(options: Options, machine: Machine, left_out: dict[str, str]) -> Iterator[Peer]:
    wanted = _words(options.against) or peers.NAMES
    precisions = {family(precision) for precision in _precisions(options, machine)}
    for peer in PEERS:
        if peer.name not in wanted:
            continue
        if not any(other.kind == machine.kind for other in PEERS if other.name == peer.name):
            left_out[peer.name] = "its recipe runs on CUDA only"
        elif peer.kind != machine.kind or peer.precision not in precisions:
            continue
        elif missing := peer.missing(options.folder):
            words = f"not installed ({', '.join(missing)})"
            left_out[peer.name if "fp8" not in peer.precision else f"{peer.name} in fp8"] = words
        else:
            yield peer


def _request(shape: Shape, precision: str, options: Options, machine: Machine, quick: bool) -> Request:
    return Request(
        who=US,
        shape=shape.name,
        size=shape.size,
        seq_len=shape.seq_len,
        batch=shape.batch,
        precision=precision,
        recompute=shape.recompute_fp8 if precision.startswith("fp8") else shape.recompute,
        states=options.states or "float32",
        device=machine.kind,
        warm=2 if quick else 4,
        repeats=options.steps or (3 if quick else 8),
        packages=str(Path(options.folder).resolve()) if options.folder else "",
    )
