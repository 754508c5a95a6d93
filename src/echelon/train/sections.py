"""The sections of a run's configuration: what belongs together under one name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from echelon.train.keys import Only, Range

ABOVE_ZERO = Range(low=0, low_open=True)
AT_LEAST_0 = Range(low=0)
AT_LEAST_1 = Range(low=1)
SHARE = Range(low=0, high=1)
BELOW_ONE = Range(low=0, high=1, high_open=True)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    path: tuple[str, ...] = ()
    """Token files, text files or folders. Empty: text that is already on this machine."""
    weights: Annotated[tuple[float, ...], ABOVE_ZERO] = ()
    """Share of each path in the training data, in any unit. Empty: the paths are one long source."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a Hugging Face tokenizers JSON file."""
    mask_documents: bool = False
    """Keep attention inside a document where several are packed into one sequence."""
    eval_fraction: Annotated[float, BELOW_ONE] = 0.02
    """Share of each source that is held back for evaluation."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Literal["adamw", "sgd"] = "adamw"
    """The update rule."""
    lr: Annotated[float, ABOVE_ZERO] = 3e-3
    """Peak learning rate."""
    betas: Annotated[tuple[float, float], BELOW_ONE, Only("name", ("adamw",))] = (0.9, 0.95)
    """Decay of AdamW's two running means."""
    eps: Annotated[float, ABOVE_ZERO, Only("name", ("adamw",))] = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: Annotated[float, AT_LEAST_0] = 0.1
    """Weight decay."""
    momentum: Annotated[float, BELOW_ONE, Only("name", ("sgd",))] = 0.0
    """Momentum of SGD."""
    states: Annotated[Literal["float32", "bfloat16"], Only("name", ("adamw",))] = "float32"
    """Type of the optimizer's moments; bfloat16 is rounded up or down by chance, so that small changes add up."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    name: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after the warm-up: half a cosine, flat then a linear decay, or flat."""
    warmup: Annotated[int, AT_LEAST_0] = 20
    """Steps of linear warm-up."""
    final: Annotated[float, SHARE, Only("name", ("cosine", "wsd"))] = 0.1
    """Learning rate of the last step, as a share of the peak."""
    decay: Annotated[float, SHARE, Only("name", ("wsd",))] = 0.2
    """Share of all steps that decay."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: Annotated[int, AT_LEAST_0] = 100
    """Steps between evaluations; 0 turns them off."""
    batches: Annotated[int, AT_LEAST_1] = 4
    """Batches per evaluation."""


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    tokens: Annotated[int, AT_LEAST_0] = 160
    """Tokens of text to write after the last step; 0 turns it off."""
    prompt: str = "def "
    """What the text starts with."""


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    reshard_after_forward: bool = True
    """Under zero=3, free gathered parameters after the forward pass and gather them again for the backward pass."""
    prefetch: Annotated[int, AT_LEAST_0] = 1
    """Under zero=3, units whose parameters are gathered ahead of their use."""
    units: tuple[str, ...] = ()
    """Patterns of the module names that are sharded as one unit each. Empty: chosen automatically."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    host: Annotated[float | None, SHARE] = None
    """With offload, share of the optimizer's states that leave the device. Empty: as few as a GPU's memory asks for."""
    disk: str = ""
    """With offload=disk, a folder for its files, which are gone at the end. Empty: beside the run's directory."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    compute: Literal["same", "fp8", "fp8-row"] = "same"
    """Of products of the layers: in `dtype`, or in 8 bits with a scale for each tensor or each row. The head stays."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    layers: Annotated[tuple[int, ...], AT_LEAST_1] = ()
    """Under pp, layers of each stage, e.g. [3, 2, 2]. Empty: balanced, with embedding and head counted."""
    profile: str = ""
    """Under pp, layers are split by their times: `measure`, or RUN/profile.json of such a run. Empty: by parameters."""
    slices: Annotated[tuple[int, ...], AT_LEAST_1] = ()
    """With schedule=terapipe, tokens of each slice of a sequence, e.g. [64, 40, 24]. Empty: chosen."""
