"""What PipeDream's optimizer would choose in place of a planned pipeline: stages on different numbers of ranks.

The planner's seconds and bytes of each layer are its profile (pipeline/stage_replication.py), and the links inside and
between nodes are its levels. A rank is a group of tp x cp devices. It knows nothing of memory, as in the paper.

A result whose stages have equally many replicas is a layout, and runs. Any other is planned only: meshes, placement and
checkpoints divide the world evenly, so that no layout can ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.pipeline.layer_profile import LayerProfile, PipelineProfile
from echelon.pipeline.stage_replication import NetworkLevel, ReplicatedPipeline, replicate
from echelon.planning.calibrate.calibration import constants_for
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.reached_rates import ReachedRates, reached_rates
from echelon.planning.cost.step_time import microbatch_time, recompute_time
from echelon.planning.priced_plan import Plan
from echelon.planning.scenario import Scenario

SCHEDULES = ("pipedream", "pipedream-vsync")
MAX_LAYERS, MAX_COMPONENTS = 256, 64
"""beyond which the dynamic programme takes too long: it grows with layers^3 and components^2"""
MAX_LISTED = 8
"""stages whose replicas a sentence lists"""
NOT_RUN = "train runs every stage on equally many ranks"


@dataclass(frozen=True, kw_only=True)
class ReplicatedStages:
    """PipeDream's choice for the model and the ranks of a plan."""

    pipeline: ReplicatedPipeline
    schedule: str

    @property
    def layout(self) -> str:
        """The layout that runs it, tp and cp aside; empty if none does."""
        replicas = self.pipeline.replicas
        stages = f",pp={len(replicas)},schedule={self.schedule}" if len(replicas) > 1 else ""
        return f"dp={replicas[0]}{stages}" if self.pipeline.is_uniform else ""

    def to_json(self) -> dict[str, object]:
        return {
            "replicas": list(self.pipeline.replicas),
            "layers": [len(names) for names in self.pipeline.split.layers],
            "microbatch_s": self.pipeline.seconds,
            "layout": self.layout or None,
            "runnable": self.pipeline.is_uniform,
            "reasons": [] if self.pipeline.is_uniform else [NOT_RUN],
        }

    def __str__(self) -> str:
        replicas, pace = self.pipeline.replicas, f"a microbatch every {self.pipeline.seconds:.3g} s at best"
        if self.pipeline.is_uniform:
            return f"PipeDream's optimizer would choose {self.layout}, memory aside: {pace}."
        each = ", ".join(map(str, replicas)) if len(replicas) <= MAX_LISTED else f"{min(replicas)} to {max(replicas)}"
        stages = f"{len(replicas)} stages on {each} ranks"
        return f"PipeDream's optimizer would put {stages}: {pace}. Plan only: {NOT_RUN}."


def replicated_stages(plan: Plan, c: Constants = FITTED_CONSTANTS) -> ReplicatedStages | None:
    """PipeDream's choice; none for other schedules, and where the search would take too long."""
    scenario, layout = plan.scenario, plan.layout
    if layout.schedule not in SCHEDULES or layout.pp == 1 or scenario.shape.num_layers > MAX_LAYERS:
        return None
    c = constants_for(scenario, c)
    rates = reached_rates(count_work(scenario).microbatch.device, c)
    levels = _levels(scenario, rates)
    if any(level.components > MAX_COMPONENTS for level in levels):
        return None
    chosen = replicate(predicted_profile(scenario, c), levels)
    return ReplicatedStages(pipeline=chosen, schedule=layout.schedule)


def _levels(scenario: Scenario, rates: ReachedRates) -> list[NetworkLevel]:
    """The ranks of a node, and the nodes; one level if the ranks do not fill whole nodes."""
    layout, per_node = scenario.layout, scenario.cluster.per_node
    ranks, inner = layout.dp * layout.pp, max(1, per_node // (layout.tp * layout.cp))
    inside, outside = float(rates.intra_node_bandwidth), float(rates.inter_node_bandwidth)
    if ranks <= inner:
        return [NetworkLevel(components=ranks, bandwidth=inside)]
    if inner == 1 or ranks % inner:
        return [NetworkLevel(components=ranks, bandwidth=outside)]
    return [
        NetworkLevel(components=inner, bandwidth=inside),
        NetworkLevel(components=ranks // inner, bandwidth=outside * inner),
    ]


def predicted_profile(scenario: Scenario, c: Constants = FITTED_CONSTANTS) -> PipelineProfile:
    """Seconds and bytes of the embedding, every layer and the head, for a microbatch on a group of tp x cp devices.

    The constants become those of the scenario, as in `price`: in a small microbatch, launches of our kernels are most
    of a layer's time.
    """
    c = constants_for(scenario, c)
    shape, size, ranks = scenario.shape, scenario.element_bytes, scenario.layout.tp
    work = count_work(scenario)
    m, correction = microbatch_time(work, c), scenario.correction / shape.num_layers
    forward, weight = float(m.forward) * correction, float(m.weight_grad) * correction
    backward = float(m.backward + m.communication + recompute_time(work, m)) * correction
    head = float(m.head) * scenario.correction
    sent = int(scenario.tokens * shape.width * size / scenario.sp_degree)

    def link(name: str, seconds: tuple[float, float, float], parameters: int) -> LayerProfile:
        forward_s, input_s, weight_s = seconds
        return LayerProfile(
            name=name,
            forward_s=forward_s,
            input_s=input_s,
            weight_s=weight_s,
            activation_bytes=sent,
            parameter_bytes=size * parameters // ranks,
        )

    each = (forward, backward - weight, weight)
    layers = [layer for layer, count in shape.layers for _ in range(round(count))]
    links = [link("embed", (0.0, 0.0, 0.0), shape.embedding_parameters)]
    links += [link(f"blocks.{index}", each, layer.parameters) for index, layer in enumerate(layers)]
    links.append(link("head", (head, head, head), shape.head_parameters))
    return PipelineProfile(links=tuple(links), source="predicted")
