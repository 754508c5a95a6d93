"""The sections of a run's configuration: what belongs together under one name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from echelon.config.schema import OnlyWith, Range
from echelon.optim.update_rule import ADAMW_PATTERNS

ABOVE_ZERO = Range(low=0, low_open=True)
AT_LEAST_0 = Range(low=0)
AT_LEAST_1 = Range(low=1)
FRACTION = Range(low=0, high=1)
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
    skip_batches: Annotated[tuple[int, ...], AT_LEAST_1] = ()
    """Batches that no step trains on, counted from 1 as steps are: step s has the s-th batch that is not skipped."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Literal["adamw", "sgd", "lion", "lamb", "adafactor", "sm3", "muon"] = "adamw"
    """The update rule."""
    lr: Annotated[float, ABOVE_ZERO] = 3e-3
    """Peak learning rate."""
    betas: Annotated[tuple[float, float] | None, BELOW_ONE, OnlyWith("name", ("adamw", "lion", "lamb", "muon"))] = None
    """Decay of the two running means. Not set: 0.9 and 0.95, with lion 0.99, with lamb 0.999."""
    eps: Annotated[float, ABOVE_ZERO, OnlyWith("name", ("adamw", "lamb", "muon"))] = 1e-8
    """Added to the denominator of AdamW and LAMB."""
    weight_decay: Annotated[float, AT_LEAST_0] = 0.1
    """Weight decay."""
    momentum: Annotated[float | None, BELOW_ONE, OnlyWith("name", ("sgd", "adafactor", "sm3", "muon"))] = None
    """Momentum. Not set: none, with muon 0.95."""
    states: Annotated[Literal["float32", "bfloat16", "int8"], OnlyWith("name", ("adamw",))] = "float32"
    """Type of AdamW's moments; bfloat16 is rounded by chance, so that small changes add up, int8 has scales."""
    by_adamw: Annotated[tuple[str, ...], OnlyWith("name", ("muon",))] = ADAMW_PATTERNS
    """Patterns of the matrices that Muon leaves to AdamW, as it does all vectors."""
    groups: tuple[str, ...] = ()
    """Parameters with a rate and a decay of their own, e.g. ["embed*:lr=0.5", "*norm*:weight_decay=0"]."""
    ema: Annotated[float, BELOW_ONE] = 0.0
    """Decay of a moving average of the weights, which evaluation uses; 0 keeps none."""
    in_backward: bool = False
    """Each layer's update runs as soon as its gradients are there, which are then let go; needs clip = 0."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    name: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after the warm-up: half a cosine, flat then a linear decay, or flat."""
    warmup: Annotated[int, AT_LEAST_0] = 20
    """Steps of linear warm-up."""
    final: Annotated[float, FRACTION, OnlyWith("name", ("cosine", "wsd"))] = 0.1
    """Learning rate of the last step, as a share of the peak."""
    decay: Annotated[float, FRACTION, OnlyWith("name", ("wsd",))] = 0.2
    """Share of all steps that decay."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: Annotated[int, AT_LEAST_0] = 100
    """Steps between evaluations; 0 turns them off."""
    batches: Annotated[int, AT_LEAST_1] = 4
    """Batches per evaluation."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: Annotated[int, AT_LEAST_0] = 0
    """Steps between checkpoints, with one after the last step; 0 writes none."""
    keep: Annotated[int, AT_LEAST_0] = 2
    """The newest checkpoints that stay; 0 keeps all."""
    keep_every: Annotated[int, AT_LEAST_0] = 0
    """Checkpoints of steps that this divides stay too; 0: none."""
    path: str = ""
    """Where they are written: a folder, or an address that fsspec knows. Empty: checkpoints in the run's directory."""


DETECTS_SPIKES = OnlyWith("action", ("warn", "rollback"))
ROLLS_BACK = OnlyWith("action", ("rollback",))


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    action: Literal["none", "warn", "rollback"] = "none"
    """On a loss far above its recent history: nothing, a note, or back to the checkpoint before, without its batch."""
    factor: Annotated[float, ABOVE_ZERO, DETECTS_SPIKES] = 8.0
    """A spike lies above the median by so many standard deviations, reckoned from the median deviation."""
    window: Annotated[int, Range(low=4), DETECTS_SPIKES] = 32
    """Losses that make up the recent history; until there are so many nothing is a spike."""
    skip: Annotated[int, AT_LEAST_1, ROLLS_BACK] = 1
    """Batches that are skipped, from the one of the spike on."""
    rollbacks: Annotated[int, AT_LEAST_1, ROLLS_BACK] = 4
    """Times that a run goes back; at the next spike it ends."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    every: Annotated[int, AT_LEAST_0] = 0
    """Steps between checks for silent data corruption, which compute a step twice and compare; 0 makes none."""
    action: Literal["warn", "stop"] = "warn"
    """Where the two differ: a note, and the run goes on with what a third pass confirms; or the run ends."""
    tolerance: Annotated[float, AT_LEAST_0] = 0.0
    """Share by which norms may differ. 0 asks for equal bits, on a GPU of torch's deterministic kernels."""


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    restarts: Annotated[int, AT_LEAST_0] = 0
    """Times that ranks of this machine are started again where one failed; they go on from the newest checkpoint."""
    replan: bool = False
    """Where other ranks are there than the layout is for, go on in the best layout for those. Otherwise: refused."""


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
    partition: bool = False
    """With tp and sp=0, keep 1/tp of each input of recomputed layers on a rank; it is gathered to repeat them."""
    arena: bool = False
    """Keep inputs of recomputed layers in one block of memory that is made once, apart from short-lived tensors."""
    buffer: Annotated[float, AT_LEAST_0] = 0.0
    """MiB of parameters that are gathered or reduced at once, at most: larger layers are cut into modules. 0: any."""
    host: Annotated[float | None, FRACTION] = None
    """With offload, share of the optimizer's states that leave the device. Empty: as few as a GPU's memory asks for."""
    disk: str = ""
    """With offload=disk, a folder for its files, which are gone at the end. Empty: beside the run's directory."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    compute: Literal["same", "fp8", "fp8-row"] = "same"
    """Of products of the layers: in `dtype`, or in 8 bits with a scale for each tensor or each row. The head stays."""
    master: Literal["float32", "none"] = "float32"
    """Weights that the optimizer updates, beside 16-bit ones; none: bfloat16 alone, rounded up or down by chance."""
    reduce: Literal["master", "same", "float32", "bfloat16", "float16"] = "master"
    """Type in which gradients add up and are reduced: float32 (float64 with float64), or `dtype`, or one of these."""
    keep_fp32: tuple[str, ...] = ()
    """Patterns of the module names that compute and are kept in float32 beside 16-bit ones, e.g. ["*norm*"]."""
    loss_scale: Annotated[Literal["auto", "dynamic", "none"] | float, ABOVE_ZERO] = "auto"
    """What the loss is multiplied by before backward; a number is fixed, auto is dynamic with float16 and else none."""
    scale_start: Annotated[float, ABOVE_ZERO] = 65536.0
    """The first dynamic loss scale. It halves after a step whose gradients are not finite, which updates nothing."""
    scale_every: Annotated[int, AT_LEAST_1] = 2000
    """Good steps after which a dynamic loss scale doubles."""
    skips: Annotated[int, AT_LEAST_1] = 16
    """Steps in a row with gradients that are not finite before the run stops."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    layers: Annotated[tuple[int, ...], AT_LEAST_1] = ()
    """Under pp, layers of each stage, e.g. [3, 2, 2]. Empty: balanced, with embedding and head counted."""
    profile: str = ""
    """Under pp, layers are split by their times: `measure`, or RUN/profile.json of such a run. Empty: by parameters."""
    slices: Annotated[tuple[int, ...], AT_LEAST_1] = ()
    """With schedule=terapipe, tokens of each slice of a sequence, e.g. [64, 40, 24]. Empty: chosen."""
