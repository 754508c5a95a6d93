"""Every rule, with the legal values it reports; scenario S12."""

from dataclasses import dataclass

import pytest
from cpu_clock import cpu_seconds
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.layout import Layout, ValidationError, check_layout, rules


@dataclass(frozen=True)
class Tiny:
    name: str = "llama-tiny"
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    ffn: int = 192
    vocab: int = 257


TINY = Tiny()


def faults_of(text, **facts):
    started = cpu_seconds()
    with pytest.raises(ValidationError) as caught:
        check_layout(text, **facts)
    assert cpu_seconds() - started < 2
    return caught.value.issues


def legal(fault):
    return [int(value) if value.isdigit() else value for value in fault.legal.split(", ")]


def test_error_of_more_tensor_ranks_than_heads():
    (fault,) = faults_of("tp=8", world=8, batch=8, model=TINY)
    assert (fault.key, fault.value, legal(fault)) == ("tp", "8", [1, 2, 4])
    assert "4 heads (llama-tiny)" in fault.message


def test_error_of_a_world_that_does_not_divide():
    (fault,) = faults_of("tp=4", world=6)
    assert (fault.key, fault.value, legal(fault)) == ("tp", "4", [1, 2, 3, 6])
    assert "world 6" in fault.message
    (fault,) = faults_of("tp=4", world=6, model=TINY)
    assert legal(fault) == [1, 2], "legal values satisfy the model too"


def test_error_of_a_batch_that_does_not_divide():
    (fault,) = faults_of("dp=4", world=4, batch=10)
    assert (fault.key, fault.value, legal(fault)) == ("batch", "10", [8, 12])


@pytest.mark.parametrize("text", ["dp=2,zero=2", "cp=2,zero=3"])
def test_error_of_versions_of_weights_that_are_sharded(text):
    """Ranks of dp and of cp shard the weights, of which an asynchronous schedule holds several versions."""
    (fault,) = faults_of(f"{text},pp=2,schedule=pipedream,accumulate=4")
    assert (fault.key, "several unsharded versions of the weights" in fault.message) == ("zero", True)


def test_error_of_a_misspelt_key():
    (fault,) = faults_of("tensor_paralel=2", world=4, batch=8, model=TINY)
    assert fault.key == "tensor_paralel"
    assert fault.hint == 'did you mean "tp"?'


def test_error_with_several_issues_at_once():
    faults = faults_of("dp=4,tensor_paralel=8,zero=5,shard=3", world=6, batch=10, model=TINY)
    assert [fault.key for fault in faults] == ["tensor_paralel", "zero", "tp", "batch", "shard", "tp"]
    for fault in faults:
        assert fault.message
        assert fault.legal
        assert str(fault) in str(ValidationError(faults))


@pytest.mark.parametrize(
    ("text", "facts", "key", "expected"),
    [
        ("dp=2", {"world": 4}, "dp", [4]),
        ("dp=2,tp=4", {"world": 6}, "tp", [3]),
        ("dp=4,tp=8", {"world": 6}, "tp", [1, 2, 3, "6 without dp"]),
        ("pp=3", {"world": 8}, "pp", [1, 2, 4, 8]),
        ("dp=4", {"batch": 3}, "batch", [4]),
        ("dp=4,accumulate=3", {"batch": 30}, "batch", [24, 36]),
        ("dp=4,microbatch=2", {"batch": 30}, "batch", [24, 32]),
        ("dp=4,microbatch=2,accumulate=2", {"batch": 30}, "batch", [16]),
        ("microbatch=3", {"world": 2, "batch": 8}, "microbatch", [1, 2, 4]),
        ("accumulate=3", {"world": 2, "batch": 8}, "accumulate", [1, 2, 4]),
        ("microbatch=2,accumulate=3", {"world": 2, "batch": 8}, "accumulate", [2]),
        ("dp=4,shard=3", {}, "shard", [1, 2, 4]),
        ("dp=2,shard=4", {}, "shard", [1, 2]),
        ("sp=1", {}, "sp", [0]),
        ("tp_kind=2d", {}, "tp_kind", ["1d"]),
        ("tp=8,tp_kind=2d", {"world": 16}, "tp", [4, 16]),
        ("tp=4,tp_kind=3d", {"world": 8}, "tp", [8]),
        ("tp=8,tp_kind=2.5d", {}, "depth", [2]),
        ("depth=2,tp=8", {}, "depth", [1]),
        ("tp=3", {"model": Tiny(heads=6, kv_heads=2)}, "tp", [1, 2, 6]),
        ("tp=4", {"model": Tiny(ffn=6)}, "tp", [1, 2]),
        ("tp=16,tp_kind=2d", {"model": Tiny(heads=6, kv_heads=6), "world": 144}, "tp", [4, 9, 36]),
        ("cp_kind=gather", {}, "cp_kind", ["ring"]),
        ("ulysses=2,cp=4", {}, "ulysses", [1]),
        ("ulysses=2,cp=4,cp_kind=ulysses", {}, "ulysses", [4]),
        ("cp=8,cp_kind=ring-ulysses", {}, "ulysses", [2, 4, 8]),
        ("cp=8,cp_kind=ring-ulysses,ulysses=3", {}, "ulysses", [2, 4, 8]),
        ("cp=8,cp_kind=ulysses", {"model": TINY}, "cp", [2, 4]),
        ("cp=8,cp_kind=ring-ulysses,ulysses=8,tp=2", {"model": TINY}, "ulysses", [2]),
        ("cp=9", {"seq_len": 5}, "cp", [1, 2, 3, 4, 5]),
        ("pp=3", {"model": Tiny(layers=2)}, "pp", [1, 2]),
        ("pp=3,schedule=interleaved", {"model": TINY}, "pp", [2]),
        ("pp=2,schedule=interleaved,vpp=3", {"model": TINY}, "vpp", [2]),
        ("schedule=gpipe", {}, "schedule", ["1f1b"]),
        ("schedule=zb-v", {}, "schedule", ["1f1b"]),
        ("pp=2,vpp=2", {}, "vpp", [1]),
        ("pp=2,schedule=interleaved,vpp=1", {}, "vpp", [">= 2"]),
        ("pp=2,schedule=dualpipe-v,vpp=3", {}, "vpp", [2]),
        ("dp=4,ep=3", {}, "ep", [1, 2, 4]),
        ("dp=2,tp=2,cp=2,pp=2,ep=16", {}, "ep", [1, 2, 4, 8]),
        ("dp=2,etp=3", {}, "etp", [1, 2]),
        ("recompute=every:5", {"model": TINY}, "recompute", ["every:1 to every:4"]),
        (
            "pp=2,schedule=terapipe,recompute=budget:1GiB",
            {},
            "recompute",
            [*["none", "full", "selective", "ops", "sqrt", "every:N"]],
        ),
    ],
)
def test_one_violated_rule(text, facts, key, expected):
    (fault,) = faults_of(text, **facts)
    assert (fault.key, legal(fault)) == (key, expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dp=4,zero=3",
        "dp=4,shard=2",
        "tp=2,zero=1",
        "tp=4",
        "tp=2,sp=0",
        "dp=2,tp=4,zero=2,recompute=full",
        "tp=4,tp_kind=2d",
        "tp=4,tp_kind=2.5d",
        "tp=8,tp_kind=2.5d,depth=2",
        "tp=8,tp_kind=3d",
        "cp=2",
        "cp=4,cp_kind=ulysses",
        "cp=4,cp_kind=ring-ulysses,ulysses=2",
        "cp=3,cp_kind=gather",
        "pp=3",
        "pp=2,schedule=interleaved,vpp=2",
        "pp=2,schedule=zb-v",
        "pp=2,schedule=file:plan.txt,vpp=2",
        "dp=2,tp=2,ep=2,etp=2",
        "recompute=every:4",
        "recompute=budget:4GiB,offload=optimizer+disk",
    ],
)
def test_valid_layouts(text):
    layout = check_layout(text, seq_len=32, model=TINY)
    assert rules.find_issues(layout, world=layout.world, batch=layout.batch, seq_len=32, model=TINY) == []


def test_a_model_without_heads_has_no_rules_about_heads():
    assert check_layout("tp=3,cp=2,cp_kind=ulysses,pp=5", model=Tiny(layers=0, heads=0, kv_heads=0, ffn=0)).tp == 3


def test_a_finished_layout_reports_the_same_issues():
    layout = Layout(dp=4, shard=3, tp=8)
    found = rules.find_issues(layout, world=32, batch=10, model=TINY)
    assert [fault.key for fault in found] == ["batch", "shard", "tp"]


def test_a_rule_that_an_unreadable_value_could_satisfy_is_not_reported():
    assert [fault.key for fault in faults_of("sp=1,tp=x")] == ["tp"]
    assert [fault.key for fault in faults_of("dp=4,tp=x", world=8)] == ["tp"]
    assert [fault.key for fault in faults_of("pp=3,tp=x", world=8)] == ["tp", "pp"], "no tp makes pp=3 fill 8 ranks"


def test_a_misspelt_key_is_checked_as_what_it_means():
    assert [fault.key for fault in faults_of("sp=1,tensor_paralel=2")] == ["tensor_paralel"]
    assert [fault.key for fault in faults_of("tensor_paralel=8", model=TINY)] == ["tensor_paralel", "tp"]


DEGREES = st.integers(1, 12)


@settings(deadline=None, max_examples=40)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(["dp", "shard", "tp", "cp", "pp", "ep"], DEGREES)), DEGREES)
def test_every_legal_value_repairs_its_issue(degrees, world):
    facts = rules.LayoutConstraints(world=world, model=TINY)
    before = rules.find_violations(Layout.resolve(degrees, world=world), facts)
    faults = rules.explain_violations(degrees, facts)
    assert len(faults) == len(before)
    for name, fault in zip(before, faults, strict=True):
        for value in fault.legal.split(", "):
            if value.isdigit() and "without" not in fault.legal:
                repaired = Layout.resolve({**degrees, fault.key: int(value)}, world=world)
                assert name not in rules.find_violations(repaired, facts)
