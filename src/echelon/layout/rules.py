"""The rules between keys, and between a layout and its world, its batch and its model.

A rule only reports the violation and the keys that could repair it. remedy.py finds the legal values of an issue by
trying, so they satisfy every rule at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from echelon.layout.grammar import KEYS_BY_NAME, Value
from echelon.layout.layout import ASYNC_SCHEDULES, MULTI_CHUNK_SCHEDULES, Layout
from echelon.layout.remedy import RemedySearch, Violation
from echelon.layout.validation_error import ValidationIssue


class ModelDimensions(Protocol):
    """The dimensions of a model that the rules read; 0 if the model has no such dimension."""

    @property
    def name(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def vocab(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class LayoutConstraints:
    """What a layout must fit. None if it is not known yet: its rules are then not checked."""

    world: int | None = None
    batch: int | None = None
    seq_len: int | None = None
    model: ModelDimensions | None = None

    @property
    def moe(self) -> Any:
        """The MoE layers of the model; None if it has none, or is not known."""
        return getattr(self.model, "moe", None)


LayoutRule = Callable[[Layout, LayoutConstraints], Iterator[Violation]]


def layout_fills_world(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    if constraints.world is None or layout.world == constraints.world:
        return
    rule = f"does not fill the world (world {constraints.world}, dp x tp x cp x pp = {layout.world})"
    # The user hardly wrote a degree of 1: report another one first.
    keys = sorted(("tp", "cp", "pp", "dp"), key=lambda key: getattr(layout, key) == 1)
    yield Violation(tuple(keys), rule, f"or start {layout.world} ranks")


def layout_fills_batch(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    batch, dp = constraints.batch, layout.dp
    if batch is None or layout.batch == batch:
        return
    if batch % dp:
        yield Violation(("batch",), f"is not a multiple of dp ({dp})", f"or a dp that divides {batch}")
    else:
        product = f"dp x microbatch x accumulate = {dp} x {layout.microbatch} x {layout.accumulate} = {layout.batch}"
        yield Violation(("microbatch", "accumulate"), f"does not give the batch (batch {batch}, {product})")


def shard_divides_dp(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    if layout.dp % layout.shard:
        yield Violation(("shard",), f"does not divide dp ({layout.dp})")
    elif layout.shard != layout.dp and not layout.zero:
        yield Violation(("shard", "zero"), "requires zero >= 1 (zero 0)")


def tp_matches_grid_shape(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    shapes = {"2d": "a square", "2.5d": f"a square times the depth ({layout.depth})", "3d": "a cube"}
    if layout.tp_kind == "1d":
        return
    if layout.tp == 1:
        yield Violation(("tp_kind", "tp"), "requires tp > 1 (tp 1)")
    elif head_parallel_size(layout) is None:
        keys = ("depth", "tp") if layout.tp_kind == "2.5d" else ("tp",)
        shape = f"tp {layout.tp}, tp_kind {layout.tp_kind}: {shapes[layout.tp_kind]}"
        yield Violation(keys, f"does not match the grid shape of tp ({shape})", "or tp_kind=1d")


def depth_requires_2_5d(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    if layout.depth > 1 and layout.tp_kind != "2.5d":
        yield Violation(("depth",), f"requires tp_kind=2.5d (tp_kind {layout.tp_kind})")


def sp_requires_1d_tp(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    if layout.sp and layout.tp == 1:
        yield Violation(("sp",), "requires tp > 1 (tp 1)")
    elif layout.sp and layout.tp_kind != "1d":
        rule = f"is incompatible with a grid, which shards all activations over tp (tp_kind {layout.tp_kind})"
        yield Violation(("sp",), rule, "or tp_kind=1d")


def tp_divides_model(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    model, side = constraints.model, head_parallel_size(layout)
    if model is None or side is None:
        return
    if model.heads and model.heads % side:
        yield Violation(("tp",), f"does not divide {model.heads} heads ({model.name})")
    elif not kv_heads_divide(model, side):
        yield Violation(("tp",), f"neither divides {model.kv_heads} kv heads nor is a multiple of them ({model.name})")
    elif model.ffn % side and layout.tp_kind == "1d":  # a grid pads it
        yield Violation(("tp",), f"does not divide the feed-forward width {model.ffn} ({model.name})")


def cp_kind_requires_cp(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    if layout.cp_kind != "ring" and layout.cp == 1:
        yield Violation(("cp_kind",), "requires cp > 1 (cp 1)")


def cp_requires_tokens(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    model = constraints.model
    if layout.cp > 1 and model is not None and getattr(model, "family", "") == "conv":
        yield Violation(("cp",), f"shards sequences of tokens, and {model.name} has none")


def ulysses_fits_cp(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    cp, kind, degree = layout.cp, layout.cp_kind, layout.ulysses
    if kind in ("ring", "gather") and degree > 1:
        yield Violation(("ulysses",), f"requires cp_kind=ulysses or ring-ulysses (cp_kind {kind})")
    elif kind == "ulysses" and degree != cp:
        yield Violation(("ulysses",), f"is not cp (cp {cp})", "or cp_kind=ring-ulysses")
    elif kind == "ring-ulysses" and cp > 1 and (degree == 1 or cp % degree):
        yield Violation(("ulysses",), f"is not a divisor above 1 of cp (cp {cp})", "or cp_kind=ring")


def ulysses_divides_heads(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    model, side = constraints.model, head_parallel_size(layout)
    if model is None or side is None or layout.ulysses == 1 or not model.heads or model.heads % side:
        return
    key = "cp" if layout.cp_kind == "ulysses" else "ulysses"
    if model.heads // side % layout.ulysses:
        heads = f"{model.heads // side} heads per tp rank ({model.name})"
        yield Violation((key,), f"does not divide the {heads}", "or cp_kind=ring")


def cp_fits_sequence(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    if constraints.seq_len is not None and layout.cp > constraints.seq_len:
        yield Violation(("cp",), f"leaves ranks without a token (seq_len {constraints.seq_len})")


def stages_have_layers(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    model, chunks = constraints.model, layout.pp * layout.vpp
    if model is not None and layout.pp > 1 and model.layers and chunks > model.layers:
        sizes = f"{model.name}: {model.layers} layers, pp x vpp = {layout.pp} x {layout.vpp} = {chunks}"
        yield Violation(("pp", "vpp"), f"leaves stages without a layer ({sizes})")


def schedule_requires_pp(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    if layout.pp == 1 and layout.schedule != "1f1b":
        yield Violation(("schedule",), "requires pp > 1 (pp 1)")


def terapipe_excludes_sp(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    if _is_terapipe(layout) and layout.sp:
        rule = "is incompatible with schedule=terapipe, which slices sequences itself"
        yield Violation(("sp",), rule, "or schedule=1f1b")


def terapipe_excludes_cp(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    if _is_terapipe(layout) and layout.cp > 1:
        rule = "is incompatible with schedule=terapipe, which runs a sequence's first tokens before its last ones"
        yield Violation(("cp",), rule, "or schedule=1f1b")


def terapipe_excludes_moe(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    if _is_terapipe(layout) and _has_moe(layout, constraints):
        yield Violation(("schedule",), "slices sequences, and MoE gates route full ones")


def async_schedule_excludes_zero_2(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    ranks = layout.dp * layout.cp
    if constraints.moe is not None:
        ranks = max(ranks, ranks * layout.tp // (layout.ep * layout.etp))  # that shard experts
    if _is_async(layout) and layout.zero > 1 and ranks > 1:
        rule = f"is incompatible with schedule={layout.schedule}, which holds several unsharded versions of the weights"
        yield Violation(("zero",), rule, "or schedule=1f1b")


def async_schedule_excludes_tied_weights(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    model = constraints.model
    if _is_async(layout) and model is not None and getattr(model, "tied", False):
        rule = f"updates every stage independently, and the embedding of {model.name} is tied to its last stage"
        yield Violation(("schedule",), rule, "or tied=false")


def async_schedule_excludes_load_bias(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    moe = constraints.moe
    if _is_async(layout) and moe is not None and moe.balances_by_load:
        rule = f"has stages at different steps, and the gate balances by the expert load of a step ({moe.gate})"
        yield Violation(("schedule",), rule, "or a gate with a load-balance loss")


def vpp_fits_schedule(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    schedule, vpp = layout.schedule, layout.vpp
    if schedule.startswith("file:"):
        return  # the file sets the number of chunks
    if schedule == "interleaved" and vpp < 2:
        yield Violation(("vpp",), "is too few for schedule=interleaved (2 or more chunks per rank)", "or schedule=1f1b")
    elif schedule in MULTI_CHUNK_SCHEDULES and schedule != "interleaved" and vpp != 2:
        yield Violation(("vpp",), f"is not what schedule={schedule} has (2 chunks per rank)")
    elif schedule not in MULTI_CHUNK_SCHEDULES and vpp > 1:
        yield Violation(("vpp",), f"is not what schedule={schedule} has (1 chunk per rank)", "or schedule=interleaved")


def async_schedule_excludes_state_offload(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    if _is_async(layout) and {"optimizer", "params", "disk"} & set(layout.offload.split("+")):
        rule = f"is incompatible with schedule={layout.schedule}, which updates while older weights are in use"
        yield Violation(("offload",), rule, "or schedule=1f1b")


def budget_excludes_activation_offload(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    if layout.recompute.startswith("budget") and "activations" in layout.offload.split("+"):
        rule = f"offloads the activations that recompute={layout.recompute} chooses from"
        yield Violation(("offload", "recompute"), rule, "or recompute=full")


def expert_ranks_divide_stage(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    ranks, experts = layout.dp * layout.cp * layout.tp, layout.ep * layout.etp
    if ranks % experts:
        sizes = f"ep x etp = {experts}, dp x cp x tp = {ranks}"
        yield Violation(("ep", "etp"), f"does not fold into the ranks of a stage ({sizes})")


def experts_fit_hsdp_groups(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    """A copy of the experts lies in one HSDP group, or in several whole ones."""
    ranks, experts = layout.shard * layout.cp * layout.tp, layout.ep * layout.etp
    if layout.shard != layout.dp and ranks % experts and experts % ranks:
        sizes = f"ep x etp = {experts}, shard x cp x tp = {ranks}"
        yield Violation(("shard", "ep", "etp"), f"lets a copy of the experts cross HSDP groups ({sizes})")


def ep_inner_divides_expert_ranks(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    ranks, inner, etp = layout.ep * layout.etp, layout.ep_inner, layout.etp
    if inner > 1 and (inner >= ranks or ranks % inner or inner % etp):
        sizes = f"ep x etp = {ranks}" + (f", etp {etp}" if etp > 1 else "")
        yield Violation(("ep_inner",), f"does not divide the expert ranks into several nodes of full experts ({sizes})")


def ep_divides_experts(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    moe, model = constraints.moe, constraints.model
    if model is None or layout.ep * layout.etp == 1 or not hasattr(model, "moe"):
        return
    if moe is None:
        yield Violation(("ep", "etp"), f"divides experts, and {model.name} has none")
    elif moe.experts % layout.ep:
        yield Violation(("ep",), f"does not divide the {moe.experts} experts of a layer ({model.name})")


def moe_requires_sp(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    """Every rank dispatches tokens of its own. Models of transformers divide the tokens where they dispatch them."""
    if layout.tp == 1 or not _has_moe(layout, constraints):
        return
    rule = "is incompatible with experts, whose tokens are divided over tp by position"
    if layout.tp_kind != "1d":
        yield Violation(("tp_kind",), rule)
    elif not layout.sp and constraints.moe is not None:
        yield Violation(("sp",), f"{rule} (sp 0)")


def recompute_fits_layers(layout: Layout, constraints: LayoutConstraints) -> Iterator[Violation]:
    model, (kind, _, number) = constraints.model, layout.recompute.partition(":")
    if model is not None and kind == "every" and model.layers and int(number) > model.layers:
        legal = f"every:1 to every:{model.layers}"
        yield Violation(("recompute",), f"exceeds the model's layers ({model.name}: {model.layers})", legal=legal)
    if kind == "budget" and _is_terapipe(layout):
        rule = "counts the saved activations of full microbatches, and schedule=terapipe slices them"
        yield Violation(("recompute",), rule, "or schedule=1f1b", legal="none, full, selective, ops, sqrt, every:N")


SIZE_RULES: tuple[LayoutRule, ...] = (layout_fills_world, layout_fills_batch)
"""Rules about the world and the batch alone."""

RULES: tuple[LayoutRule, ...] = (
    *SIZE_RULES,
    shard_divides_dp,
    tp_matches_grid_shape,
    depth_requires_2_5d,
    sp_requires_1d_tp,
    tp_divides_model,
    cp_kind_requires_cp,
    cp_requires_tokens,
    ulysses_fits_cp,
    ulysses_divides_heads,
    cp_fits_sequence,
    stages_have_layers,
    schedule_requires_pp,
    vpp_fits_schedule,
    terapipe_excludes_sp,
    terapipe_excludes_cp,
    terapipe_excludes_moe,
    async_schedule_excludes_load_bias,
    async_schedule_excludes_zero_2,
    async_schedule_excludes_tied_weights,
    async_schedule_excludes_state_offload,
    budget_excludes_activation_offload,
    expert_ranks_divide_stage,
    experts_fit_hsdp_groups,
    ep_inner_divides_expert_ranks,
    ep_divides_experts,
    moe_requires_sp,
    recompute_fits_layers,
)
"""Every rule, in the order of the issues."""


def _is_async(layout: Layout) -> bool:
    return layout.pp > 1 and layout.schedule in ASYNC_SCHEDULES


def _is_terapipe(layout: Layout) -> bool:
    return layout.pp > 1 and layout.schedule == "terapipe"


def _has_moe(layout: Layout, constraints: LayoutConstraints) -> bool:
    return layout.ep * layout.etp > 1 or constraints.moe is not None


def head_parallel_size(layout: Layout) -> int | None:
    """Return the tp ranks that divide heads: all of 1d's, one side of a grid; None if tp does not match the grid."""
    tp, kind = layout.tp, layout.tp_kind
    if kind == "1d":
        return tp
    if kind == "3d":
        side = round(tp ** (1 / 3))
        return side if side**3 == tp else None
    area, left = divmod(tp, layout.depth if kind == "2.5d" else 1)
    side = math.isqrt(area)
    fits = not left and side**2 == area and (side > 1 or tp == 1)  # a side of 1 would shard nothing
    return side if fits else None


def kv_heads_divide(model: ModelDimensions, ranks: int) -> bool:
    """Return whether each rank gets full kv heads, or several ranks replicate one."""
    return not model.kv_heads or model.kv_heads % ranks == 0 or ranks % model.kv_heads == 0


def find_violations(
    layout: Layout, constraints: LayoutConstraints, rules: Sequence[LayoutRule] = RULES
) -> dict[str, Violation]:
    """Return the violations by the name of the rule; a rule is violated at most once."""
    return {rule.__name__: violation for rule in rules for violation in rule(layout, constraints)}


def explain_violations(
    given: Mapping[str, Value],
    constraints: LayoutConstraints,
    rules: Sequence[LayoutRule] = RULES,
    unreadable: Sequence[str] = (),
) -> list[ValidationIssue]:
    """Return the issues of the given keys, each with the legal values.

    A rule that some value of an unreadable key would satisfy is not reported: that key has an issue already.
    """

    def resolve(keys: Mapping[str, Value]) -> Layout:
        return Layout.resolve(keys, world=constraints.world, batch=constraints.batch)

    def probe(keys: Mapping[str, Value]) -> dict[str, Violation]:
        return find_violations(resolve(keys), constraints, rules)

    violations = probe(given)
    if not violations:
        return []
    layout, model, issues = resolve(given), constraints.model, []
    model_sizes = (model.heads, model.layers) if model else ()
    sizes = [size for size in (constraints.world, constraints.batch, layout.world, *model_sizes) if size]
    remedies = RemedySearch(given, probe, sizes)
    for name, rule in violations.items():
        if any(remedies.repairs(key, name) for key in unreadable):
            continue
        if rule.keys == ("batch",):  # not a layout key: no values to try
            key, legal = "batch", legal_batches(layout, given, constraints)
        else:
            key, legal = remedies.best_key(name, rule)
        value = getattr(layout, key) if key in KEYS_BY_NAME else getattr(constraints, key)
        issues.append(ValidationIssue(key=key, value=str(value), message=rule.message, legal=legal, hint=rule.hint))
    return issues


def legal_batches(layout: Layout, given: Mapping[str, Value], constraints: LayoutConstraints) -> str:
    """Return the nearest batches that dp and the given microbatch or accumulate can form."""
    batch, unit = constraints.batch or 0, layout.dp
    for key in ("microbatch", "accumulate"):
        unit *= getattr(layout, key) if key in given else 1
    if "microbatch" in given and "accumulate" in given:
        return str(unit)
    below = batch // unit * unit
    return ", ".join(str(size) for size in (below, below + unit) if size > 0)


def find_issues(
    layout: Layout,
    *,
    world: int | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    model: ModelDimensions | None = None,
) -> list[ValidationIssue]:
    """Return every issue of a finished layout; an empty list if it is valid."""
    constraints = LayoutConstraints(world=world, batch=batch, seq_len=seq_len, model=model)
    return explain_violations(layout.explicit, constraints)
