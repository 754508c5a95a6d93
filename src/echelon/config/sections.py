"""Sections of the configuration: one dataclass per table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from echelon.config.schema import OnlyWith, Range
from echelon.models.lora.lora_options import LoRAOptions
from echelon.optim.update_rule import ADAMW_PATTERNS, UpdateRule

ABOVE_ZERO = Range(low=0, low_open=True)
AT_LEAST_0 = Range(low=0)
AT_LEAST_1 = Range(low=1)
FRACTION = Range(low=0, high=1)
BELOW_ONE = Range(low=0, high=1, high_open=True)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    path: tuple[str, ...] = ()
    """Text, JSONL, Parquet or token files, or folders of them. Empty: text that exists on every machine with Python."""
    weights: Annotated[tuple[float, ...], ABOVE_ZERO] = ()
    """Sampling weight of each path, in any unit. Empty: the paths are one long source."""
    tokenizer: str = "bytes"
    """"bytes", a tokenizers JSON file, or a Hugging Face directory with a tokenizer.json."""
    text_field: str = "text"
    """Field of JSONL and Parquet with the text of a document; empty: no record is a text."""
    chat_field: str = "messages"
    """Field of JSONL and Parquet with the messages of a conversation; empty: no record is a conversation."""
    chat_template: str = ""
    """Jinja file that renders conversations, or "chatml". Empty: that of the tokenizer's directory, else ChatML."""
    train_on: Literal["assistant", "all"] = "assistant"
    """Targets of a conversation: the turns of the assistant, or all tokens."""
    mask_documents: bool = False
    """Mask attention between documents that are packed into one sequence."""
    eval_fraction: Annotated[float, BELOW_ONE] = 0.02
    """Fraction of each source that is held out for evaluation."""
    skip_batches: Annotated[tuple[int, ...], AT_LEAST_1] = ()
    """Batches to skip, counted from 1: step s trains on the s-th batch that is not skipped."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(UpdateRule):
    name: Literal["adamw", "sgd", "lion", "lamb", "adafactor", "sm3", "muon"] = "adamw"
    """The update rule."""
    lr: Annotated[float, ABOVE_ZERO] = 3e-3
    """Peak learning rate."""
    betas: Annotated[tuple[float, float] | None, BELOW_ONE, OnlyWith("name", ("adamw", "lion", "lamb", "muon"))] = None
    """Decay of the first and second moment. Not set: 0.9 and 0.95, with lion 0.99, with lamb 0.999."""
    eps: Annotated[float, ABOVE_ZERO, OnlyWith("name", ("adamw", "lamb", "muon"))] = 1e-8
    """Added to the denominator of AdamW and LAMB."""
    weight_decay: Annotated[float, AT_LEAST_0] = 0.1
    """Weight decay."""
    momentum: Annotated[float | None, BELOW_ONE, OnlyWith("name", ("sgd", "adafactor", "sm3", "muon"))] = None
    """Momentum. Not set: none, with muon 0.95."""
    states: Annotated[Literal["float32", "bfloat16", "int8"], OnlyWith("name", ("adamw",))] = "float32"
    """Dtype of AdamW's moments: float32, bfloat16 with stochastic rounding, or int8 with blockwise scales."""
    by_adamw: Annotated[tuple[str, ...], OnlyWith("name", ("muon",))] = ADAMW_PATTERNS
    """Patterns of the matrices that AdamW updates instead of Muon, as it does all vectors."""
    groups: tuple[str, ...] = ()
    """Parameter groups with their own learning rate and decay, e.g. ["embed*:lr=0.5", "*norm*:weight_decay=0"]."""
    ema: Annotated[float, BELOW_ONE] = 0.0
    """Decay of an exponential moving average of the weights, which evaluation uses; 0: none."""
    in_backward: bool = False
    """Update each layer as soon as its gradients are reduced, and free them; requires clip = 0."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(LoRAOptions):
    rank: Annotated[int, AT_LEAST_0] = 0
    """Rank of LoRA adapters beside the linears of the frozen model; 0: none, and all weights are trained."""
    alpha: Annotated[float, ABOVE_ZERO] = 16.0
    """The adapters' outputs are multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Patterns of linears with adapters, e.g. "q_proj,v_proj" or ["*.attn.*"]. Empty: all linears of the layers."""
    dropout: Annotated[float, BELOW_ONE] = 0.0
    """Dropout of the adapters' inputs."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (rank-stabilised LoRA)."""
    train: tuple[str, ...] = ()
    """Patterns of modules that are trained in full beside the adapters, e.g. ["*norm*"]; PEFT's modules_to_save."""
    init: str = ""
    """Directory of a PEFT adapter to start from. Empty: A at random, B zero."""


@dataclass(frozen=True, kw_only=True)
class LRScheduleConfig:
    name: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after the warm-up: half a cosine, constant then linear decay (wsd), or constant."""
    warmup: Annotated[int, AT_LEAST_0] = 20
    """Steps of linear warm-up."""
    final: Annotated[float, FRACTION, OnlyWith("name", ("cosine", "wsd"))] = 0.1
    """Learning rate of the last step, as a fraction of the peak."""
    decay: Annotated[float, FRACTION, OnlyWith("name", ("wsd",))] = 0.2
    """Fraction of all steps in the decay."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: Annotated[int, AT_LEAST_0] = 100
    """Steps between evaluations; 0 turns them off."""
    batches: Annotated[int, AT_LEAST_1] = 4
    """Batches per evaluation."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: Annotated[int, AT_LEAST_0] = 0
    """Steps between checkpoints, with one after the last step; 0: none."""
    keep: Annotated[int, AT_LEAST_0] = 2
    """Number of newest checkpoints to retain; 0: all."""
    keep_every: Annotated[int, AT_LEAST_0] = 0
    """Also retain checkpoints of steps that this divides; 0: none."""
    path: str = ""
    """Directory of the checkpoints, or an address that fsspec supports. Empty: checkpoints in the run's directory."""


DETECTS_SPIKES = OnlyWith("action", ("warn", "rollback"))
ROLLS_BACK = OnlyWith("action", ("rollback",))


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    action: Literal["none", "warn", "rollback"] = "none"
    """On a loss spike: do nothing, print a note, or roll back to the checkpoint before it and skip its batch."""
    factor: Annotated[float, ABOVE_ZERO, DETECTS_SPIKES] = 8.0
    """Standard deviations above the median at which a loss is a spike, estimated from the median deviation."""
    window: Annotated[int, Range(low=4), DETECTS_SPIKES] = 32
    """Number of recent losses to compare with; until there are that many, no loss is a spike."""
    skip: Annotated[int, AT_LEAST_1, ROLLS_BACK] = 1
    """Batches to skip, from that of the spike on."""
    rollbacks: Annotated[int, AT_LEAST_1, ROLLS_BACK] = 4
    """Largest number of rollbacks; the next spike ends the run."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    every: Annotated[int, AT_LEAST_0] = 0
    """Steps between replay checks for silent data corruption, which compute a step twice; 0: none."""
    action: Literal["warn", "stop"] = "warn"
    """If the passes differ: print a note and continue with a third pass, or end the run."""
    tolerance: Annotated[float, AT_LEAST_0] = 0.0
    """Relative difference of norms that is allowed. 0 requires equal bits, on a GPU with deterministic kernels."""


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    restarts: Annotated[int, AT_LEAST_0] = 0
    """Restarts of the ranks of this machine after a failure; they resume from the newest checkpoint."""
    replan: bool = False
    """If the number of ranks does not fit the layout, continue in the planner's best layout for them."""


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    tokens: Annotated[int, Range(low=0, high=1_000_000)] = 160
    """Tokens of text to generate after the last step; 0 turns it off."""
    prompt: str = "def "
    """Prompt of the generated text."""


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    reshard_after_forward: bool = True
    """With zero=3, reshard parameters after forward and all-gather them again for backward."""
    prefetch: Annotated[int, AT_LEAST_0] = 1
    """With zero=3, parameter groups to all-gather ahead of their use."""
    units: tuple[str, ...] = ()
    """Patterns of the modules that form one parameter group each. Empty: chosen automatically."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    partition: bool = False
    """With tp and sp=0, shard the saved inputs of recomputed layers over tp, and all-gather them to recompute."""
    arena: bool = False
    """Save the inputs of recomputed layers in one preallocated block, which avoids fragmentation."""
    buffer: Annotated[float, Range(low=0, high=1e9)] = 0.0
    """Largest parameter group in MiB: larger layers are divided into their modules. 0: no limit."""
    host: Annotated[float | None, FRACTION] = None
    """With offload, fraction of the optimizer states to offload. Empty: as few as the GPU's memory requires."""
    disk: str = ""
    """With offload=disk, directory of its temporary files. Empty: beside the run's directory."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    compute: Literal["same", "fp8", "fp8-row"] = "same"
    """GEMM precision of the layers: `dtype`, or FP8 with a scale per tensor or per row; the LM head keeps `dtype`."""
    master: Literal["float32", "none"] = "float32"
    """Dtype of the master weights; none: bfloat16 weights with stochastic rounding."""
    reduce: Literal["master", "same", "float32", "bfloat16", "float16"] = "master"
    """Dtype of gradient accumulation and reduction: float32 (float64 with float64), `dtype`, or one of these."""
    keep_fp32: tuple[str, ...] = ()
    """Patterns of the modules with float32 weights and compute under a 16-bit dtype, e.g. ["*norm*"]."""
    loss_scale: Annotated[Literal["auto", "dynamic", "none"] | float, ABOVE_ZERO] = "auto"
    """Loss scale: a fixed number, dynamic or none; auto is dynamic with float16, else none."""
    scale_start: Annotated[float, ABOVE_ZERO] = 65536.0
    """Initial dynamic loss scale. It halves after a step with gradients that are not finite, which is skipped."""
    scale_every: Annotated[int, AT_LEAST_1] = 2000
    """Finite steps after which a dynamic loss scale doubles."""
    skips: Annotated[int, AT_LEAST_1] = 16
    """Consecutive steps with gradients that are not finite before the run ends."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    layers: Annotated[tuple[int, ...], AT_LEAST_1] = ()
    """With pp, layers of each stage, e.g. [3, 2, 2]. Empty: balanced, including embedding and LM head."""
    profile: str = ""
    """With pp, balance stages by layer times: `measure`, or RUN/profile.json of such a run. Empty: by parameters."""
    slices: Annotated[tuple[int, ...], AT_LEAST_1] = ()
    """With schedule=terapipe, tokens of each sequence slice, e.g. [64, 40, 24]. Empty: chosen automatically."""
