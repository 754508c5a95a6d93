"""The table of keys, and text faults one by one."""

from dataclasses import fields

import pytest

from echelon.layout import KEYS, Layout, ValidationError
from echelon.layout.grammar import KEYS_BY_NAME, describe_grammar


def faults_of(text):
    with pytest.raises(ValidationError) as caught:
        Layout.parse(text)
    return caught.value.issues


def test_the_table_and_the_fields_are_the_same_list():
    assert [key.name for key in KEYS] == [field.name for field in fields(Layout)]


def test_every_key_says_what_it_is():
    for key in KEYS:
        assert key.meaning
        assert key.default
        assert key.syntax.legal
    text = describe_grammar()
    assert all(any(line.startswith(key.name) for line in text.splitlines()) for key in KEYS)
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize("key", [key.name for key in KEYS])
def test_a_bad_value_names_key_value_and_legal_values(key):
    (fault,) = faults_of(f"{key}=banana")
    assert (fault.key, fault.value, fault.legal) == (key, "banana", KEYS_BY_NAME[key].syntax.legal)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("dp", value) for value in ("0", "-1", "2.0", "1e3", "", "٣", "9" * 30, "9" * 5000)],
        *[("zero", value) for value in ("4", "-1")],
        ("sp", "2"),
        ("tp_kind", "4d"),
        ("schedule", "file:"),
        *[("recompute", value) for value in ("every:", "every:0", "every:x", "every:1.5", "budget:4", "budget:0GiB")],
        *[("recompute", value) for value in ("budget:GiB", "budget:-1GiB", "every")],
        *[("offload", value) for value in ("none+disk", "params+params", "params+", "+", "cpu")],
    ],
)
def test_refused_values(key, value):
    (fault,) = faults_of(f"{key}={value}")
    assert fault.key == key
    assert fault.legal


@pytest.mark.parametrize(
    ("key", "value", "canonical"),
    [
        ("dp", "007", 7),
        ("schedule", "file:plans/a b=c.txt", "file:plans/a b=c.txt"),
        ("recompute", "every:02", "every:2"),
        ("recompute", "every:100", "every:100"),
        ("recompute", "budget:4GiB", "budget:4GiB"),
        ("recompute", "budget:0.50GiB", "budget:0.5GiB"),
        ("offload", "disk+optimizer", "optimizer+disk"),
        ("offload", "params + activations", "params+activations"),
    ],
)
def test_values_become_canonical(key, value, canonical):
    assert getattr(Layout.parse(f"{key}={value}"), key) == canonical


def test_a_misspelt_word_among_values():
    (fault,) = faults_of("schedule=interleave")
    assert fault.hint == 'did you mean "interleaved"?'


def test_an_unknown_key():
    (fault,) = faults_of("tensor_paralel=2")
    assert (fault.key, fault.value) == ("tensor_paralel", "2")
    assert fault.hint == 'did you mean "tp"?'
    assert "tp" in fault.legal.split(", ")


def test_a_key_given_twice():
    (fault,) = faults_of("tp=2,dp=2,tp=4")
    assert (fault.key, fault.value) == ("tp", "4")
    assert "twice" in fault.message
    assert "tp=2" in fault.message


@pytest.mark.parametrize("text", ["dp=2,", "dp=2,,tp=2", ",tp=2", "dp=2;tp=2", "dp", "=2"])
def test_invalid_punctuation(text):
    (fault,) = faults_of(text)
    assert fault.legal or fault.hint


def test_all_issues_of_a_text_at_once():
    assert [fault.key for fault in faults_of("zero=9,tp=x,mbs=2,schedule=gpip,dp=2,dp=3,pp")] == [
        "zero",
        "tp",
        "mbs",
        "schedule",
        "dp",
        "pp",
    ]
