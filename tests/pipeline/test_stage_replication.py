"""PipeDream's optimizer against every split there is."""

import itertools
import math
import random
from fractions import Fraction

import pytest
from cpu_clock import cpu_seconds
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.pipeline.layer_profile import LayerProfile, PipelineProfile
from echelon.pipeline.schedule import looped_placement, v_placement
from echelon.pipeline.stage_replication import NetworkLevel, ReplicatedPipeline, replicate, split_by_profile


def profile_of(seconds, sent, weights, names=None) -> PipelineProfile:
    names = names or [f"layers.{i}" for i in range(len(seconds))]
    return PipelineProfile(
        links=tuple(
            LayerProfile(name=n, forward_s=t / 4, input_s=t / 4, weight_s=t / 2, activation_bytes=a, parameter_bytes=w)
            for n, t, a, w in zip(names, seconds, sent, weights, strict=True)
        ),
        source="measured",
    )


@st.composite
def profiles(draw, most: int) -> PipelineProfile:
    links = draw(st.integers(1, most))
    numbers = st.lists(st.integers(0, 40), min_size=links, max_size=links)
    names = draw(st.sampled_from([None, ["embed", *(f"blocks.{i}" for i in range(links - 2)), "head"][:links]]))
    return profile_of(draw(numbers), draw(numbers), draw(numbers), names if links > 2 else None)


def layers_of(profile: PipelineProfile) -> list[tuple[float, int, int]]:
    """(T, a, w) of every layer; embed and head are part of one."""
    rows = [(link.seconds, link.activation_bytes, link.parameter_bytes) for link in profile.links]
    if profile.names[0] == "embed":
        (t, _, w), (u, a, x) = rows[:2]
        rows[:2] = [(t + u, a, w + x)]
    if profile.names[-1] == "head":
        (t, _, w), (u, a, x) = rows[-2:]
        rows[-2:] = [(t + u, a, w + x)]
    return rows


def compositions(total: int, parts: int):
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def every_pace(layers, levels):
    """The pace of every pipeline that uses all ranks of the levels: each is built and priced on its own."""
    if not levels:
        yield sum(t for t, _, _ in layers)
        return
    *inside, level = levels
    for stages in range(1, min(len(layers), level.components) + 1):
        for counts in compositions(len(layers), stages):
            bounds = [0, *itertools.accumulate(counts)]
            parts = [layers[a:b] for a, b in itertools.pairwise(bounds)]
            sends = [2 * part[-1][1] / level.bandwidth for part in parts[:-1]]
            for replicas in compositions(level.components, stages):
                shares = [
                    2 * (m - 1) * sum(w for _, _, w in part) / level.bandwidth
                    for m, part in zip(replicas, parts, strict=True)
                ]
                for inner in itertools.product(*(every_pace(part, inside) for part in parts)):
                    times = [max(a, b) / m for a, b, m in zip(inner, shares, replicas, strict=True)]
                    yield max([*times, *sends])


def pace_of(found: ReplicatedPipeline, profile: PipelineProfile, bandwidth: float) -> float:
    """The pace of an answer of one level, from its own record."""
    links = {link.name: link for link in profile.links}
    times = []
    for names, ranks in zip(found.split.layers, found.split.ranks, strict=True):
        weights = sum(links[name].parameter_bytes for name in names)
        compute = sum(links[name].seconds for name in names)
        times.append(max(compute, 2 * (len(ranks) - 1) * weights / bandwidth) / len(ranks))
    sends = [2 * links[names[-1]].activation_bytes / bandwidth for names in found.split.layers[:-1]]
    return max([*times, *sends])


def check_whole(found: ReplicatedPipeline, profile: PipelineProfile, world: int) -> None:
    assert [name for links in found.split.layers for name in links] == list(profile.names)
    assert sorted(rank for ranks in found.split.ranks for rank in ranks) == list(range(world))
    assert found.in_flight == math.ceil(world / found.replicas[0])


@settings(deadline=None, max_examples=150)
@given(profiles(7), st.integers(1, 5), st.floats(0.5, 20))
def test_one_level_matches_brute_force(profile, ranks, bandwidth):
    levels = [NetworkLevel(components=ranks, bandwidth=bandwidth)]
    found = replicate(profile, levels)
    check_whole(found, profile, ranks)
    assert found.seconds == pytest.approx(min(every_pace(layers_of(profile), levels)), rel=1e-12)
    assert found.seconds == pytest.approx(pace_of(found, profile, bandwidth), rel=1e-12)


@settings(deadline=None, max_examples=100)
@given(profiles(5), *[st.integers(1, 3)] * 2, *[st.floats(0.5, 20)] * 2)
def test_two_levels_match_brute_force(profile, inside, outside, fast, slow):
    levels = [NetworkLevel(components=inside, bandwidth=fast), NetworkLevel(components=outside, bandwidth=slow)]
    found = replicate(profile, levels)
    check_whole(found, profile, inside * outside)
    assert found.seconds == pytest.approx(min(every_pace(layers_of(profile), levels)), rel=1e-12)


def test_three_levels_match_brute_force():
    choose = random.Random(3)
    for _ in range(20):
        profile = profile_of(*([choose.randint(0, 40) for _ in range(4)] for _ in range(3)))
        levels = [NetworkLevel(components=2, bandwidth=choose.uniform(0.5, 20)) for _ in range(3)]
        found = replicate(profile, levels)
        check_whole(found, profile, 8)
        assert found.seconds == pytest.approx(min(every_pace(layers_of(profile), levels)), rel=1e-12)


def test_a_level_of_one_changes_nothing():
    profile = profile_of([3, 1, 4, 1, 5], [1, 1, 1, 1, 1], [2, 7, 1, 8, 2])
    node, alone = NetworkLevel(components=4, bandwidth=2.0), NetworkLevel(components=1, bandwidth=1.0)
    assert replicate(profile, [node]) == replicate(profile, [alone, node]) == replicate(profile, [node, alone])


def test_small_weights_are_replicated():
    found = replicate(profile_of([1.0] * 8, [10**9] * 8, [0] * 8), [NetworkLevel(components=4, bandwidth=1e3)])
    assert (found.replicas, found.in_flight, found.seconds) == ((4,), 1, 2.0)


def test_large_weights_make_a_pipeline():
    found = replicate(profile_of([1.0] * 8, [0] * 8, [10**9] * 8), [NetworkLevel(components=4, bandwidth=1e3)])
    assert (found.replicas, found.in_flight, found.seconds) == ((1, 1, 1, 1), 4, 2.0)
    assert found.split.rank_of_stage == (0, 1, 2, 3)


def test_heavy_weights_at_the_end_alone():
    # As in the paper's VGG-16: convolutions with few weights are replicated, the fully connected layers are not.
    found = replicate(
        profile_of([6.0, 6.0, 6.0, 1.0], [1] * 4, [1, 1, 1, 10**9]), [NetworkLevel(components=4, bandwidth=1e3)]
    )
    assert (found.replicas, found.in_flight) == ((3, 1), 2)
    assert found.seconds == 6.0
    assert str(found) == (
        "stage 0  ranks 0-2  layers.0 .. layers.2  94.7%\n"
        "stage 1  rank 3     layers.3               5.3%\n"
        "2 microbatches in flight per replica of stage 0, one done every 6 s\n"
        "plan only: no layout puts stages on different numbers of ranks\n"
    )


def test_replicas_of_a_node_are_on_every_node():
    # Inside a node two replicas would wait for their gradients, so a node is a pipeline; two nodes would not.
    profile = profile_of([2.0, 2.0], [5, 0], [11, 11])
    found = replicate(profile, [NetworkLevel(components=2, bandwidth=10.0), NetworkLevel(components=2, bandwidth=25.0)])
    assert found.split.ranks == ((0, 2), (1, 3))
    assert found.seconds == 1.0
    assert found.in_flight == 2


def test_a_hundred_layers_on_64_ranks_are_quick():
    choose = random.Random(0)
    profile = profile_of(*([choose.randint(1, 1000) for _ in range(100)] for _ in range(3)))
    start = cpu_seconds()
    replicate(profile, [NetworkLevel(components=64, bandwidth=10.0)])
    replicate(profile, [NetworkLevel(components=8, bandwidth=10.0), NetworkLevel(components=8, bandwidth=1.0)])
    assert cpu_seconds() - start < 5


# -- one rank per stage -----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(st.data(), profiles(8))
def test_split_by_profile_matches_brute_force(data, profile):
    layers = layers_of(profile)
    stages = data.draw(st.integers(1, len(layers)))
    speed = st.floats(0.5, 20)
    bandwidth = data.draw(st.one_of(speed, st.lists(speed, min_size=stages - 1, max_size=stages - 1)))
    homes = data.draw(
        st.sampled_from([looped_placement(stages), *([v_placement(stages // 2)] if stages % 2 == 0 else [])])
    )

    def order(counts):
        bounds = [0, *itertools.accumulate(counts)]
        parts = [layers[a:b] for a, b in itertools.pairwise(bounds)]
        times = [sum((Fraction(t) for t, _, _ in part), Fraction(0)) for part in parts]
        speeds = bandwidth if isinstance(bandwidth, list) else [bandwidth] * (stages - 1)
        sends = [
            Fraction(2 * part[-1][1] / speeds[stage]) if homes[stage] != homes[stage + 1] else Fraction(0)
            for stage, part in enumerate(parts[:-1])
        ]
        return max(times + sends), sum(t**2 for t in times), counts[::-1]

    best = min(compositions(len(layers), stages), key=order)
    split = split_by_profile(profile, stages, bandwidth, rank_of_stage=homes)
    assert [name for links in split.layers for name in links] == list(profile.names)
    glued = [sum(name not in ("embed", "head") for name in links) for links in split.layers]
    assert tuple(glued) == best
    assert split.rank_of_stage == homes


def test_a_large_activation_is_not_cut():
    profile = profile_of([1.0] * 6, [1, 1, 100, 1, 1, 0], [0] * 6)
    assert [len(links) for links in split_by_profile(profile, 2, 10.0).layers] == [4, 2]
    assert [len(links) for links in split_by_profile(profile, 2, math.inf).layers] == [3, 3]
    # Both stages at home on one rank: nothing is sent.
    assert [len(links) for links in split_by_profile(profile, 2, 10.0, rank_of_stage=v_placement(1)).layers] == [3, 3]


def test_invalid_input_is_rejected():
    profile = profile_of([1, 1, 1], [1, 1, 1], [1, 1, 1])
    with pytest.raises(ValueError, match=r"every stage needs a layer \(4 stages, 3 layers\); use 1 to 3 stages"):
        split_by_profile(profile, 4, 1.0)
    with pytest.raises(ValueError, match=r"3 stages, 3 ranks, 1 bandwidths\); give 3 ranks and 2 bandwidths"):
        split_by_profile(profile, 3, [1.0])
    with pytest.raises(ValueError, match=r"a bandwidth is not above 0 \(0.0\); give bytes per second"):
        split_by_profile(profile, 3, 0.0)
    with pytest.raises(ValueError, match=r"a bandwidth is not above 0 \(nan\)"):
        NetworkLevel(components=2, bandwidth=math.nan)
    with pytest.raises(ValueError, match=r"a level has no components \(0\); give 1 or more"):
        NetworkLevel(components=0, bandwidth=1.0)
    with pytest.raises(ValueError, match="a pipeline needs ranks"):
        replicate(profile, [])
