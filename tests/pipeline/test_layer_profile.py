"""What each link takes, and its JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.pipeline.layer_profile import LayerProfile, PipelineProfile

SECONDS = st.floats(0, 1e6)
BYTES = st.integers(0, 2**62)
LINKS = st.builds(
    LayerProfile,
    name=st.text(max_size=8),
    forward_s=SECONDS,
    input_s=SECONDS,
    weight_s=SECONDS,
    activation_bytes=BYTES,
    parameter_bytes=BYTES,
)
PROFILES = st.builds(
    PipelineProfile,
    links=st.lists(LINKS, min_size=1, max_size=5, unique_by=lambda link: link.name).map(tuple),
    source=st.sampled_from(["measured", "predicted"]),
)


def link(**changes) -> LayerProfile:
    numbers = {"forward_s": 1.0, "input_s": 2.0, "weight_s": 3.0, "activation_bytes": 4, "parameter_bytes": 5}
    return LayerProfile(**{"name": "embed", **numbers, **changes})


@given(PROFILES)
def test_json_round_trip(profile):
    assert PipelineProfile.from_json(profile.to_json()) == profile


def test_seconds_are_forward_and_backward():
    profile = PipelineProfile(links=(link(), link(name="head", input_s=0.0)), source="measured")
    assert profile.layer_seconds == (6.0, 4.0)
    assert profile.names == ("embed", "head")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_s": float("nan")}, r"forward_s is out of range \(embed: nan\); give 0 or more"),
        ({"weight_s": -1.0}, r"weight_s is out of range \(embed: -1.0\)"),
        ({"input_s": "1"}, r"input_s is not a number \(embed: '1'\); give a number"),
        ({"activation_bytes": 1.5}, r"activation_bytes is not an integer \(embed: 1.5\)"),
        ({"parameter_bytes": True}, r"parameter_bytes is not an integer \(embed: True\)"),
    ],
)
def test_numbers_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        link(**changes)


def test_a_profile_lists_every_layer_once():
    with pytest.raises(ValueError, match=r"names twice: embed\); give every layer once"):
        PipelineProfile(links=(link(), link()), source="measured")
    with pytest.raises(ValueError, match="no layers"):
        PipelineProfile(links=(), source="measured")
    with pytest.raises(ValueError, match=r"unknown source of a profile \('guessed'\); use measured or predicted"):
        PipelineProfile(links=(link(),), source="guessed")


def test_invalid_json_is_rejected():
    good = json.loads(PipelineProfile(links=(link(),), source="measured").to_json())
    with pytest.raises(ValueError, match="a profile is not JSON"):
        PipelineProfile.from_json("{")
    with pytest.raises(ValueError, match=r"a profile has the wrong keys \(\[\]\); give links, source"):
        PipelineProfile.from_json("[]")
    with pytest.raises(ValueError, match=r"a profile has the wrong keys \(keys source\)"):
        PipelineProfile.from_json('{"source": "measured"}')
    with pytest.raises(ValueError, match="links are not a list"):
        PipelineProfile.from_json('{"source": "measured", "links": {}}')
    del good["links"][0]["input_s"]
    with pytest.raises(ValueError, match=r"a link of a profile has the wrong keys .*; give activation_bytes, "):
        PipelineProfile.from_json(json.dumps(good))
