"""Known curves give known constants back; what was not measured stays; better curves make quicker plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.layout import Layout
from echelon.layout.collective import wire_bytes
from echelon.planning.calibrate.calibration import CPU_CONSTANTS, calibrate
from echelon.planning.calibrate.constants import FITTED_CONSTANTS
from echelon.planning.cluster.cluster import MeasuredCurves, parse_cluster
from echelon.planning.cluster.device_kinds import DEVICE_KINDS
from echelon.planning.cluster.link_time import COLLECTIVES, intra_node_latency
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.step_time import NARROW_HEAD_SPEED, microbatch_time
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.priced_plan import price, step_timeline
from echelon.planning.scenario import PlanRequest, Scenario
from echelon.planning.search.layout_search import search_plans

SHAPES = [(512, 512, 512), (1024, 4096, 512), (4096, 4096, 4096), (8192, 2048, 16384)]


def products(share: float, edge: float, kind: str = "h100") -> tuple[tuple[int, int, int, float], ...]:
    """A curve of devices that do what the formula says."""
    rate = share * DEVICE_KINDS[kind].peak("bf16")
    return tuple((m, k, n, rate / (1 + edge * (1 / m + 1 / k + 1 / n))) for m, k, n in SHAPES)


def messages(latency: float, bandwidth: float, ranks: int) -> dict[str, tuple[tuple[int, float], ...]]:
    return {
        kind: tuple((1 << n, latency + wire_bytes(kind, 1 << n, ranks) / bandwidth) for n in range(16, 27, 2))
        for kind in COLLECTIVES
    }


def case(cluster: str = "8xh100", layout: str = "tp=8,microbatch=2", model: str = "llama-8b", **curves) -> Scenario:
    found = replace(parse_cluster(cluster), curves=MeasuredCurves(**curves) if curves else None)
    return Scenario(shape=resolve_shape(model), cluster=found, layout=Layout.parse(layout), seq_len=1024)


def test_without_curves_nothing_changes():
    assert calibrate(parse_cluster("8xh100")) is FITTED_CONSTANTS


@pytest.mark.parametrize(
    ("kind", "generation"),
    [
        ("h100", "hopper"),
        ("a100-80", "ampere"),
        ("cpu", "cpu"),
        ("tpu-v5p", "tpu"),
        ("mi300x", "accelerator"),
        ("gaudi3", "accelerator"),
    ],
)
def test_products_give_the_share_and_the_edge_back(kind, generation):
    found = calibrate(case(f"8x{kind}", matmul=products(0.83, 61, kind)).cluster)
    assert getattr(found, generation) == pytest.approx(0.83)
    assert found.edge == pytest.approx(61)
    others = {
        generation: getattr(FITTED_CONSTANTS, generation),
        "edge": FITTED_CONSTANTS.edge,
        "context_gib": FITTED_CONSTANTS.context_gib,
    }
    overhead = FITTED_CONSTANTS.step_overhead  # 0 on a CPU
    assert replace(found, **others, step_overhead=overhead) == FITTED_CONSTANTS


def test_products_that_differ_too_little_keep_the_usual_edge():
    rate = 0.5 * DEVICE_KINDS["h100"].peak("bf16")
    found = calibrate(case(matmul=((4096, 4096, 4096, rate),)).cluster)
    assert found.edge == FITTED_CONSTANTS.edge
    assert found.hopper == pytest.approx(0.5 * (1 + FITTED_CONSTANTS.edge * 3 / 4096))


def test_products_that_are_slower_when_larger_have_no_edge():
    found = calibrate(case(matmul=((512, 512, 512, 4e14), (8192, 8192, 8192, 3e14))).cluster)
    assert found.edge == 0
    assert 3e14 <= found.hopper * DEVICE_KINDS["h100"].peak("bf16") <= 4e14


def test_attention_is_a_share_of_the_peak_and_narrow_heads_are_slower():
    rate = 0.55 * DEVICE_KINDS["h100"].peak("bf16")
    found = calibrate(case(attention=((4096, 128, rate), (8192, 64, NARROW_HEAD_SPEED * rate))).cluster)
    assert found.best_attention == found.blackwell_attention == pytest.approx(0.55)


def test_the_time_of_attention_is_what_was_measured():
    """A layer's forward and backward take the FLOPs that the curve counts, over its rate."""
    rate = 3e14
    priced = case(layout="dp=8", attention=((1024, 128, rate),))
    shape, work = priced.shape, count_work(priced)
    attention = microbatch_time(work, calibrate(priced.cluster)).attention
    causal = sum(n * layer.attention.flops(1024) for layer, n in shape.layers) * 1024
    assert price(priced).times["attention"] == pytest.approx(3.5 * causal / rate)
    assert attention == pytest.approx(causal / rate)


def test_memory_is_a_share_of_the_bandwidth():
    assert calibrate(case(memory=0.8 * DEVICE_KINDS["h100"].bandwidth).cluster).memory_bandwidth == pytest.approx(0.8)


@pytest.mark.parametrize("cluster", ["8xh100", "4xa100-80", "2xcpu"])
def test_collectives_give_the_link_back(cluster):
    plain = parse_cluster(cluster)
    share, latency = 0.6, 2.5e-5
    measured = messages(latency, share * plain.intra_node.bandwidth, plain.per_node)
    found = case(cluster, "dp=1", model="llama-tiny", **measured)
    constants = calibrate(found.cluster)
    assert constants.intra_node == pytest.approx(share)
    assert intra_node_latency(found.cluster) == count_work(found).microbatch.device.latency == pytest.approx(latency)


def test_collectives_without_latency_fit_zero():
    found = case(**messages(-1e-6, 1e11, 8))
    assert intra_node_latency(found.cluster) == 0
    assert calibrate(found.cluster).intra_node > 0


def test_one_message_says_too_little():
    found = case(all_reduce=((1 << 20, 1e-4),))
    assert calibrate(found.cluster) == FITTED_CONSTANTS
    assert intra_node_latency(found.cluster) == found.cluster.intra_node.latency


def test_calibrating_twice_is_calibrating_once():
    curves = {"matmul": products(0.8, 50), "memory": 3e12, "attention": ((4096, 128, 4e14),)}
    cluster = case(**curves, **messages(1e-5, 3e11, 8)).cluster
    once = calibrate(cluster)
    assert once != FITTED_CONSTANTS
    assert calibrate(cluster, once) == once


def test_a_cpu_has_its_measured_peaks():
    """It took Blackwell's, and 4 GiB for the context of a device that it does not have."""
    plain = case("2xcpu", "dp=2", model="llama-tiny")
    fast = replace(FITTED_CONSTANTS, blackwell=0.99)
    assert price(plain, fast).seconds == price(plain).seconds
    assert calibrate(plain.cluster) == replace(FITTED_CONSTANTS, **CPU_CONSTANTS, step_overhead=0.0)
    assert price(plain).memory.total < 1 << 30


@pytest.mark.parametrize("layout", ["dp=4", "dp=4,zero=2,accumulate=2", "dp=4,zero=3", "cp=4", "dp=2,cp=2"])
def test_a_cpu_hides_no_communication(layout):
    """Its cores send, too. Gradients were reduced beside backward, and dp=4 with ZeRO-1 ranked above pipelines of pp=2
    and 3: of llama-tiny with 8 sequences of 32 tokens, on two busy cores, it takes 111 to 144 ms a step (medians of two
    runs), they take 48 to 84."""

    def sent(flops: float) -> float:
        """Communication of a step, with cores that compute so fast."""
        plain = case("4xcpu", layout, model="llama-tiny")
        cpu = plain.cluster.device
        cpu = replace(cpu, flops=dict.fromkeys(cpu.flops, flops))
        priced = price(replace(plain, cluster=plain.cluster.with_devices(lambda _: cpu)))
        return priced.times.get("dp", 0.0) + priced.times.get("cp", 0.0)

    assert sent(5e10) == pytest.approx(sent(5e14), rel=1e-6)


BETTER = {
    "products": ({"matmul": products(0.4, 100)}, {"matmul": products(0.8, 100)}),
    "edges": ({"matmul": products(0.6, 300)}, {"matmul": products(0.6, 30)}),
    "attention": ({"attention": ((1024, 128, 1e14),)}, {"attention": ((1024, 128, 5e14),)}),
    "memory": ({"memory": 1e12}, {"memory": 3e12}),
    "bandwidth": (messages(1e-5, 1e11, 8), messages(1e-5, 4e11, 8)),
    "latency": (messages(1e-4, 3e11, 8), messages(1e-5, 3e11, 8)),
}


@pytest.mark.parametrize("name", BETTER)
def test_better_curves_make_quicker_plans(name):
    slow, fast = (price(case(**curves)).seconds for curves in BETTER[name])
    assert fast < slow


def test_a_search_prices_with_what_was_measured():
    slow = case(matmul=products(0.2, 100)).cluster
    best = search_plans(PlanRequest(shape=resolve_shape("llama-8b"), cluster=slow, batch=64, seq_len=1024), top=1)[0]
    again = price(best.scenario)
    assert best.seconds == again.seconds
    plain = price(replace(best.scenario, cluster=parse_cluster("8xh100")))
    assert best.seconds > 2 * plain.seconds


def test_a_correction_multiplies_every_time():
    plain = case(layout="pp=4,dp=2,microbatch=1,accumulate=8")
    slower = replace(plain, correction=1.5)
    assert price(slower).times == pytest.approx({name: 1.5 * s for name, s in price(plain).times.items()})
    assert price(slower).memory == price(plain).memory
    assert step_timeline(slower).duration == pytest.approx(1.5 * step_timeline(plain).duration)
