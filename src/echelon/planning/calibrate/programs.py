"""Programs that train models, and what differs between them besides the work that they do.

A profile says what its program reaches, over a common base (constants.py): how fast its kernels are, what its operators
between GEMMs move, what its host takes, what its communication hides. No profile belongs to a source of runs.
"""

from __future__ import annotations

from dataclasses import dataclass

PROGRAMS = (
    "echelon",
    "plain",
    "megatron",
    "megatron-2021",
    "deepspeed",
    "torch",
    "torch-compiled",
    "xla",
    "unknown",
)
"""Echelon, with its kernels if there is a GPU and the model is one of its own; Echelon on torch's operators alone;
Megatron-LM and NeMo with flash attention, and before; DeepSpeed and GPT-NeoX; loops of torch with FSDP or DDP, eager
and compiled; JAX and its compiler; any other"""
OWN_PROGRAMS = ("echelon", "plain")
PLANNED_PROGRAMS = tuple(name for name in PROGRAMS if name != "plain")
"""programs that a plan may be asked for; a run of Echelon without its kernels says so itself"""
UNBALANCED_CP = ("torch", "torch-compiled")
"""programs whose context parallelism gives each rank one slice: the last attends to all others, 2 n / (n + 1) times the
mean"""
STOPS_EARLY = ("torch", "torch-compiled", "xla")
"""programs whose recomputation ends with the last tensor that backward needs, without the last GEMM of a layer:
`early_stop` of torch.utils.checkpoint; XLA drops what jax.checkpoint does not use. Megatron and DeepSpeed checkpoint by
an autograd function of their own, which runs the layer whole"""
UNFUSED_CASTS = ("torch", "torch-compiled")
"""programs that cast the inputs of GEMMs below 16 bits by two kernels, along rows and along columns (torchao);
Transformer Engine and XLA have one for both"""
BUCKETED = ("megatron",)
"""programs that gather and reduce the parameters of a stage in buckets of `bucket_numel`, not layer by layer"""
COMPILED_LOSSES = ("torch-compiled",)
"""programs whose compiler makes the loss a kernel forward and a kernel backward"""
_SCHEDULES = ("gpipe", "1f1b", "interleaved")
_OTHER_SCHEDULES = {
    "deepspeed": ("gpipe", "1f1b"),
    "torch": (*_SCHEDULES, "zb-v", "dualpipe-v"),
    "torch-compiled": (*_SCHEDULES, "zb-v", "dualpipe-v"),
}
LAYOUT_VALUES = {
    program: {
        "tp_kind": ("1d",),
        "schedule": _OTHER_SCHEDULES.get(program, _SCHEDULES),
        "recompute": ("none", "selective", "full", "every", *(("ops",) if program == "megatron" else ())),
    }
    for program in PROGRAMS
    if program not in OWN_PROGRAMS
}
"""values of layout keys that other programs have, where Echelon has more; forks of a program may have more, too"""


def attention_kernel(program: str, generation: str) -> str:
    """The attention kernel of a program on a generation of devices, as in the runs that its profile was fitted to."""
    if program in OWN_PROGRAMS:
        return "best"
    if program == "megatron-2021" or generation == "volta":
        return "fused"
    return "flash2" if generation == "ampere" else "best"


def reduced_gradient_bytes(program: str, generation: str) -> int:
    """Bytes of a gradient that a program reduces: 16 bits in DeepSpeed, and in the recipes of NeMo and Megatron-Bridge
    since Hopper."""
    return 2 if program == "deepspeed" or (program == "megatron" and generation in ("hopper", "blackwell")) else 4


def bucket_numel(ranks: int) -> int:
    """Parameters of a bucket, which Megatron-Core makes larger for many ranks so that a ring's hops take less than its
    bytes: DistributedDataParallel's default for `bucket_size`."""
    return max(40_000_000, 1_000_000 * ranks)


@dataclass(frozen=True, kw_only=True)
class ProgramProfile:
    speed: float = 1.0
    """of GEMMs and attention, over the shares of the peak that constants.py has"""
    traffic: float = 1.0
    """bytes that operators between GEMMs move, over those of fused kernels"""
    overlap: float = 0.4
    """of a microbatch's passes, the share behind which gathers and reductions that happen once a step are hidden"""
    tp_overlap: float = 0.0
    """of the time of tensor parallelism, the share that is hidden behind GEMMs on devices in TP_OVERLAP"""
    host: float = 1.0
    """time of the host to launch a layer's kernels, over that of constants.py, which is Megatron's with Transformer
    Engine: not fitted, but ours with torch's operators (OPERATOR_OVERRIDES), and next to none of a compiled step"""


_PROFILES = {
    "echelon": ProgramProfile(overlap=0.56),
    "plain": ProgramProfile(traffic=1.4, overlap=0.56),
    "megatron": ProgramProfile(overlap=0.67, tp_overlap=0.716),
    "megatron-2021": ProgramProfile(speed=1.02, traffic=1.33, overlap=0.0993),
    "deepspeed": ProgramProfile(speed=0.914, traffic=1.06, overlap=0.589),
    "torch": ProgramProfile(speed=0.981, traffic=0.918, overlap=0.587, host=0.55),
    "torch-compiled": ProgramProfile(speed=1.01, traffic=1.19, overlap=0.671, host=0.55),
    "xla": ProgramProfile(speed=0.959, traffic=1.36, overlap=0.582, host=0.1),
    "unknown": ProgramProfile(speed=0.981, traffic=1.13, overlap=0.456, tp_overlap=0.119, host=0.558),
}
FITTED_PROFILES = tuple(_PROFILES[name] for name in PROGRAMS)
"""`bench/fit.py` fits them. Megatron's speed and traffic are 1: it is the base. An unknown program has the mean of the
others; Echelon's were not measured on several devices, and are assumed"""
