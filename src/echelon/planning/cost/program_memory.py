"""What other programs allocate: what their operators save, how many copies of gradients and logits they have.

[Note: per-operator recomputation]

FSDP programs of torch recompute operators, not attention cores (the selective policy of torch.utils.checkpoint, as
torchtitan sets it): they save the output of attention and of every second GEMM of a layer, in the order of execution,
and recompute the other GEMMs and all operators between them:

    GEMM        q        k             v        out           gate     up            down
    output      saved    recomputed    saved    recomputed    saved    recomputed    saved

The last GEMM is never recomputed: its output is no input of the layer's backward.

[Note: projections]

XLA's programs name what they save: `selective` is the outputs of all GEMMs with weights (MaxText's `minimal`, Pax's
SAVE_DOT_WITH_NO_BATCH_DIM). Attention and the operators between GEMMs are recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.parallel.ep.cost import MAX_LOAD_FACTOR
from echelon.planning.calibrate.constants import Constants
from echelon.planning.model.model_shape import COLUMN_PARALLEL, ROW_PARALLEL, LayerShape, MatmulShape
from echelon.planning.scenario import Scenario

PER_OPERATOR_PROGRAMS = ("torch", "torch-compiled")
"""programs whose `selective` is [Note: per-operator recomputation]"""
SAVED_OUTPUT_PROGRAMS = (*PER_OPERATOR_PROGRAMS, "xla")
"""programs whose `selective` saves outputs of GEMMs, by the notes above"""
TORCH_GRADIENT_BYTES = 4
"""of a gradient where parameters are float32 shards, which gradients are too"""
RECOMPUTED_MODULE_PROGRAMS = ("megatron",)
"""programs whose `ops` is the recomputation of norms, activations and up-projections, module by module"""
DEEPSPEED_BF16_PIPELINE_BYTES = 6
"""of a gradient in pipelines of DeepSpeed in bf16, whose optimizer sums gradients in float32 and keeps both"""


@dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """How a program's memory differs from what its operators save."""

    activation_slack: float = 0.0
    """share by which activations take more than is counted: copies, and blocks that are not full"""
    backward_working: float = 2.0
    """times the activations of a layer that its backward needs while it runs: gradients, copies, workspace"""
    logit_bytes: float = 10.0
    """of a logit: in 16 bits, and in 32 bits its softmax and its gradient"""
    context_gib: float | None = None
    """GiB of the device's context and libraries; None: as of GPUs"""
    saves_activation_factor: bool = False
    """a gated activation is two operators: what the first one computes is saved too"""
    gathers_single_gemms: bool = False
    """zero 3 gathers the parameters of a GEMM at once, not those of a layer"""


PROGRAM_MEMORY = {
    "megatron": ProgramMemory(logit_bytes=6.0),
    "megatron-2021": ProgramMemory(backward_working=4.0),
    "deepspeed": ProgramMemory(activation_slack=0.35, backward_working=4.0),
    "torch": ProgramMemory(logit_bytes=6.0, saves_activation_factor=True),
    "torch-compiled": ProgramMemory(),
    "xla": ProgramMemory(backward_working=1.0, logit_bytes=6.0, context_gib=0.5, gathers_single_gemms=True),
}


def program_memory(scenario: Scenario, c: Constants) -> ProgramMemory:
    """How the program of a scenario allocates; an unknown one as the least frugal that was measured."""
    unknown = ProgramMemory(activation_slack=c.activation_slack, backward_working=c.backward_working, logit_bytes=12.0)
    return PROGRAM_MEMORY.get(scenario.program, unknown)


def program_gradient_bytes(scenario: Scenario) -> float:
    """Bytes of a gradient, in all its copies, in the buffers of other programs."""
    if scenario.program == "deepspeed":
        return DEEPSPEED_BF16_PIPELINE_BYTES if _has_bf16_optimizer(scenario) else scenario.element_bytes
    if scenario.program in PER_OPERATOR_PROGRAMS and scenario.sharding_policy.reshards_params:
        return TORCH_GRADIENT_BYTES
    return scenario.gradient_bytes


def shards_states(scenario: Scenario) -> bool:
    """Whether optimizer states are sharded over data-parallel ranks: by DeepSpeed's bf16 optimizer at every stage."""
    return scenario.layout.zero > 0 or _has_bf16_optimizer(scenario)


def _has_bf16_optimizer(scenario: Scenario) -> bool:
    """Whether DeepSpeed uses its optimizer for bf16, as it does in pipelines; otherwise that of ZeRO, in 16 bits."""
    return scenario.program == "deepspeed" and scenario.precision == "bf16" and scenario.layout.pp > 1


def recomputed_gemm_share(layer: LayerShape) -> float:
    """Share of a layer's GEMM FLOPs that per-operator recomputation repeats: every second GEMM but the last."""
    flops = [matmul.inputs * outputs * matmul.token_share for matmul, outputs in _single_gemms(layer)]
    return sum(flops[1:-1:2]) / max(1.0, sum(flops))


def last_gemm_share(layer: LayerShape) -> float:
    """Share of a layer's GEMM FLOPs in its last GEMM."""
    flops = [matmul.inputs * outputs * matmul.token_share for matmul, outputs in _single_gemms(layer)]
    return flops[-1] / max(1.0, sum(flops)) if flops else 0.0


def recomputed_module_elements(scenario: Scenario, layer: LayerShape) -> float:
    """Elements per token that `ops` saves of Megatron's layers, whose `recompute_modules` are norms, activations and
    MLA's up-projections: outputs of both norms, what the last GEMM reads, and queries, keys and values of MLA."""
    layout, attention = scenario.layout, layer.attention
    elements = 2.0 * scenario.shape.width / scenario.sp_degree
    load = min(scenario.expert_load, MAX_LOAD_FACTOR)
    for matmul in layer.matmuls:
        if matmul.split == ROW_PARALLEL and matmul.name == "down":
            elements += matmul.token_share * matmul.inputs * (load if matmul.experts else 1.0) / layout.tp
    if attention is not None and attention.latent_width:
        elements += attention.heads * (2 * attention.head_dim + attention.value_dim) / layout.tp
    return elements


def activation_factor_elements(layer: LayerShape) -> float:
    """Elements per token of the first factor of a dense gated activation: as many as the last GEMM reads."""
    gated = any(len(matmul.fused_outputs) == 2 and not matmul.experts for matmul in layer.matmuls)
    return float(layer.matmuls[-1].inputs) if gated else 0.0


def saved_output_elements(scenario: Scenario, layer: LayerShape) -> float:
    """Elements per token that `selective` saves of a layer: its input, and outputs by the notes above."""
    width, layout, gemms = scenario.shape.width, scenario.layout, _single_gemms(layer)
    per_operator = scenario.program in PER_OPERATOR_PROGRAMS
    elements = width / scenario.sp_degree
    if per_operator and layer.attention is not None:
        elements += layer.attention.heads * layer.attention.value_dim / layout.tp
    if per_operator and layout.tp > 1:  # outputs of row-parallel GEMMs, reduced
        elements += 2 * width / scenario.sp_degree
    for matmul, outputs in gemms[::2] if per_operator else gemms:
        # A row-parallel GEMM's output is a partial sum of full width.
        elements += matmul.token_share * outputs / (layout.tp if matmul.split == COLUMN_PARALLEL else 1)
    return elements


def _single_gemms(layer: LayerShape) -> list[tuple[MatmulShape, int]]:
    """Return (matmul, outputs) of a layer's GEMMs in order; fused parameters are a GEMM each."""
    return [(matmul, outputs) for matmul in layer.matmuls for outputs in matmul.fused_outputs or (matmul.outputs,)]
