"""Faults as text, as data and between processes."""

import pickle

import pytest

from echelon.layout import KEYS, ValidationError, ValidationIssue, did_you_mean
from echelon.layout.aliases import ALIASES

NAMES = [key.name for key in KEYS]


def test_an_issue_is_one_line_with_everything_in_it():
    fault = ValidationIssue(
        key="tp", value="8", message="does not divide 4 heads (llama-tiny)", legal="1, 2, 4", hint="or dp=8"
    )
    assert str(fault) == "tp=8 does not divide 4 heads (llama-tiny); legal: 1, 2, 4; or dp=8"
    assert str(ValidationIssue(key="dp", value="", message="is not key=value")) == "dp is not key=value"
    assert "\n" not in str(ValidationIssue(key="dp", value="1\n2", message="is not a legal value"))


def test_an_error_lists_every_issue_and_survives_pickling():
    faults = [
        ValidationIssue(key="tp", value="x", message="is bad"),
        ValidationIssue(key="dp", value="y", message="is worse"),
    ]
    error = ValidationError(faults)
    assert isinstance(error, ValueError)
    assert str(error).splitlines() == ["tp=x is bad", "dp=y is worse"]
    copy = pickle.loads(pickle.dumps(error))
    assert copy.issues == error.issues == tuple(faults)
    assert str(copy) == str(error)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("tensor_paralel", "tp"),
        ("tensor-parallel", "tp"),
        ("TP", "tp"),
        ("data_parallel", "dp"),
        ("pipeline", "pp"),
        ("fsdp", "zero"),
        ("mbs", "microbatch"),
        ("gradient_accumulation_steps", "accumulate"),
        ("activation_checkpointing", "recompute"),
        ("expert_parallel", "ep"),
        ("context_parallel_size", "cp"),
        ("hsdp", "shard"),
        ("shedule", "schedule"),
        ("microbach", "microbatch"),
    ],
)
def test_did_you_mean(word, meant):
    assert did_you_mean(word, NAMES) == f'did you mean "{meant}"?'


def test_nothing_near_means_no_question():
    assert did_you_mean("banana", NAMES) == ""
    assert did_you_mean("tensor_parallel", ["model", "batch"]) == "", "an alias only leads to a word on offer"


def test_aliases_are_of_keys_and_lead_to_one_key_each():
    assert set(ALIASES) <= set(NAMES)
    every = [alias for aliases in ALIASES.values() for alias in aliases]
    assert len(every) == len(set(every))
    assert not set(every) & set(NAMES)
