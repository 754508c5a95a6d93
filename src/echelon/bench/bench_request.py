"""From the options of `echelon bench` to the measurements to make. Reports all invalid options at once. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from echelon.bench import peers
from echelon.bench.bench_device import BenchDevice
from echelon.bench.measurement import ECHELON, Measurement
from echelon.bench.peers import PEERS, Peer
from echelon.bench.reference_shapes import CPU_SHAPES, CUDA_SHAPES, REFERENCE_SHAPES, ReferenceShape
from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean

PRECISIONS = ("fp32", "bf16", "fp8", "fp8-row")
STATE_DTYPES = {"float32": 16, "bfloat16": 12}
"""dtypes of the optimizer's moments, with the minimum bytes per parameter: weights, gradient, two moments"""
SECTIONS = ("devices", "steps")
NO_PEER = "none"
RECOMPUTE = ("none", "ops", "selective", "full", "sqrt")
"""the options to compare; `budget` chooses among them, and `every:N` recomputes as `full` does"""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of `echelon bench`; empty ones take the defaults."""

    only: str = ""
    out: Path | None = None
    cluster: str = ""
    """a cluster file that describes the devices of this machine"""
    shapes: str = ""
    precision: str = ""
    peers: str = ""
    against: str = ""
    steps: int | None = None
    states: str = ""
    recompute: str = ""
    batch: int | None = None
    seq_len: int | None = None
    profile: Path | None = None

    @property
    def with_devices(self) -> bool:
        return self.only != "steps" and self.profile is None

    @property
    def with_steps(self) -> bool:
        return self.only != "devices" and self.profile is None

    @property
    def peer_folder(self) -> str:
        """Where the peers' wheels are unpacked, or ""."""
        return self.peers or (str(peers.PEER_FOLDER) if peers.PEER_FOLDER.is_dir() else "")


STEP_OPTIONS = tuple(field.name for field in fields(BenchOptions) if field.name not in ("only", "out", "cluster"))
"""options that concern steps, not devices"""


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What will be measured, and what will not."""

    measurements: tuple[Measurement, ...]
    left_out: dict[str, str]
    """skipped shapes and peers, with the reason"""


# -- validation ------------------------------------------------------------------------------------------------------


def check_options(options: BenchOptions) -> None:
    """Raise ValidationError with every invalid option."""
    issues = [*_name_errors(options), *_number_errors(options), *_file_errors(options), *_conflict_errors(options)]
    if issues:
        raise ValidationError(issues)


def _name_errors(options: BenchOptions) -> Iterator[ValidationIssue]:
    lists = {"shapes": REFERENCE_SHAPES, "precision": PRECISIONS, "against": (*peers.PEER_NAMES, NO_PEER)}
    choices = {"only": SECTIONS, "states": STATE_DTYPES, "recompute": RECOMPUTE}
    for key, legal in {**lists, **choices}.items():
        given: str = getattr(options, key)
        for word in _split_names(given) if key in lists else [given] if given else []:
            if word not in legal:
                yield _fault(key, word, "is unknown", legal=", ".join(legal), hint=did_you_mean(word, legal))


def _number_errors(options: BenchOptions) -> Iterator[ValidationIssue]:
    for key in ("steps", "batch", "seq_len"):
        value = getattr(options, key)
        if value is not None and value < 1:
            yield _fault(key, value, "is too small", legal="1 or more")


def _file_errors(options: BenchOptions) -> Iterator[ValidationIssue]:
    if options.peers and not Path(options.peers).is_dir():
        yield _fault("peers", options.peers, "is not a folder", legal="one that holds unpacked wheels")
    if options.out is not None and (rule := _path_error(options.out, (".toml",))):
        hint = "`echelon plan --cluster` recognizes a file by its suffix" if "end" in rule else ""
        yield _fault("out", options.out, rule, legal="a file such as mine.toml", hint=hint)
    if options.profile is not None and (rule := _path_error(options.profile, (".json", ".svg"))):
        yield _fault("profile", options.profile, rule, legal="a file such as step.json or step.svg")


def _path_error(path: Path, endings: tuple[str, ...]) -> str:
    """Why the file cannot be written, or its suffix is wrong, or ""; checked before minutes are spent."""
    if path.suffix not in endings:
        return f"does not end in {' or '.join(endings)}"
    if path.is_dir():
        return "is a folder"
    if not path.parent.is_dir():
        return f"is in a folder that does not exist ({path.parent})"
    return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "cannot be written"


def _conflict_errors(options: BenchOptions) -> Iterator[ValidationIssue]:
    for key in ("out", "cluster") if not options.with_devices else ():
        if value := getattr(options, key):
            why = "--only steps" if options.only else "--profile"
            yield _fault(key, value, f"requires the devices, which {why} leaves out", hint="remove one of them")
    if options.only and options.profile is not None:
        yield _fault("only", options.only, "is incompatible with --profile", hint="remove it")
    elif options.only == "devices":
        for key in STEP_OPTIONS:
            if (value := getattr(options, key)) not in ("", None):
                yield _fault(key, value, "is incompatible with --only devices", hint="remove it")
    if options.profile is not None:
        for key in ("peers", "against"):
            if value := getattr(options, key):
                rule = "is incompatible with --profile, which measures echelon alone"
                yield _fault(key, value, rule, hint="remove it")


def _fault(key: str, value: Any, rule: str, *, legal: str = "", hint: str = "") -> ValidationIssue:
    return ValidationIssue(f"--{key.replace('_', '-')}", str(value), rule, legal=legal, hint=hint)


def _split_names(text: str) -> list[str]:
    return list(dict.fromkeys(word for part in text.split(",") if (word := part.strip())))


# -- measurements -----------------------------------------------------------------------------------------------------


def plan_measurements(options: BenchOptions, device: BenchDevice, *, quick: bool = False) -> BenchPlan:
    """The measurements in order: shape by shape, ours before its peers."""
    fp8_precisions = [word for word in _split_names(options.precision) if precision_family(word) == "fp8"]
    if fp8_precisions and not device.fp8:
        rule = f"is not supported by {device.name}"
        raise ValidationError([_fault("precision", word, rule, legal="fp32, bf16") for word in fp8_precisions])
    left_out: dict[str, str] = {}
    against = list(_peers(options, device, left_out))
    measurements: list[Measurement] = []
    for shape in _shapes(options, device, left_out):
        for precision in _precisions(options, device):
            ours = _measurement(shape, precision, options, device, quick)
            recompute = options.recompute if options.recompute in peers.PEER_RECOMPUTE else shape.peer_recompute
            theirs = replace(ours, recompute=recompute, states="float32")
            others = []
            for peer in against:
                if shape.model.family not in peer.families:
                    left_out[f"{peer.name} of {shape.name}"] = f"its recipe has no {shape.model.family} model"
                elif peer.precision == precision_family(precision):
                    others.append(peer)
            measurements += [ours, *(replace(theirs, who=peer.name, precision=peer.precision) for peer in others)]
    return BenchPlan(measurements=tuple(dict.fromkeys(measurements)), left_out=left_out)


def plan_profiles(options: BenchOptions, device: BenchDevice) -> list[Measurement]:
    """The steps of echelon to profile."""
    if device.device_type != "cuda":
        raise ValidationError([_fault("profile", options.profile, "requires a GPU, and this machine has none")])
    return [
        _measurement(shape, precision, options, device, False)
        for shape in _shapes(options, device, {})
        for precision in _split_names(options.precision) or ["bf16"]
    ]


def precision_family(precision: str) -> str:
    """The precision to compare by: fp8 and fp8-row are one family."""
    return precision.partition("-")[0]


def _shapes(options: BenchOptions, device: BenchDevice, left_out: dict[str, str]) -> Iterator[ReferenceShape]:
    recompute = options.recompute or None
    changed = {"batch": options.batch, "seq_len": options.seq_len, "recompute": recompute, "recompute_fp8": recompute}
    given: dict[str, Any] = {key: value for key, value in changed.items() if value is not None}
    min_bytes = STATE_DTYPES[options.states or "float32"]
    for name in _split_names(options.shapes) or (CUDA_SHAPES if device.device_type == "cuda" else CPU_SHAPES):
        shape = replace(REFERENCE_SHAPES[name], **given)
        needed = min_bytes * shape.model.parameters
        # A shape that the user named is measured anyway: its row would fail with the same reason.
        if not options.shapes and device.device_type == "cuda" and needed > device.memory:
            left_out[name] = f"requires {needed / 2**30:.0f} GiB, and {device.name} has {device.memory / 2**30:.0f}"
        else:
            yield shape


def _precisions(options: BenchOptions, device: BenchDevice) -> list[str]:
    if options.precision:
        return _split_names(options.precision)
    return ["fp32"] if device.device_type == "cpu" else ["bf16", "fp8"] if device.fp8 else ["bf16"]


def _peers(options: BenchOptions, device: BenchDevice, left_out: dict[str, str]) -> Iterator[Peer]:
    wanted = _split_names(options.against) or peers.PEER_NAMES
    precisions = {precision_family(precision) for precision in _precisions(options, device)}
    for peer in PEERS:
        if peer.name not in wanted:
            continue
        if not any(other.device_type == device.device_type for other in PEERS if other.name == peer.name):
            left_out[peer.name] = "its recipe runs on CUDA only"
        elif peer.device_type != device.device_type or peer.precision not in precisions:
            continue
        elif missing := peer.missing(options.peer_folder):
            reason = f"not installed ({', '.join(missing)})"
            left_out[peer.name if "fp8" not in peer.precision else f"{peer.name} in fp8"] = reason
        else:
            yield peer


def _measurement(
    shape: ReferenceShape, precision: str, options: BenchOptions, device: BenchDevice, quick: bool
) -> Measurement:
    return Measurement(
        who=ECHELON,
        shape=shape.name,
        size=shape.size,
        seq_len=shape.seq_len,
        batch=shape.batch,
        precision=precision,
        recompute=shape.recompute_fp8 if precision.startswith("fp8") else shape.recompute,
        states=options.states or "float32",
        device=device.device_type,
        warmup_steps=2 if quick else 4,
        timed_steps=options.steps or (3 if quick else 8),
        peer_folder=str(Path(options.peer_folder).resolve()) if options.peer_folder else "",
    )
