"""Groups of parameters: what can be written, what is refused, and that every pattern must match."""

from __future__ import annotations

import pytest
from tiny_engines import tiny

from echelon import models
from echelon.config.run_config import Config
from echelon.config.sections import OptimizerConfig
from echelon.layout import ValidationError
from echelon.optim import optimizer_groups
from echelon.optim.optimizer_groups import OptimizerGroup, ParamSettings
from echelon.training.engine import Engine

RULE = OptimizerConfig(weight_decay=0.1)


def test_a_group_is_a_pattern_with_settings() -> None:
    assert optimizer_groups.parse("embed*:lr=0.5") == OptimizerGroup(pattern="embed*", lr=0.5)
    assert optimizer_groups.parse("a:b*:lr=2, weight_decay=0") == OptimizerGroup(
        pattern="a:b*", lr=2.0, weight_decay=0.0
    )


def test_the_last_matching_pattern_wins() -> None:
    given = [optimizer_groups.parse(text) for text in ("*:lr=0.5", "*norm*:weight_decay=0.2", "blocks.0.*:lr=0.1")]
    assert optimizer_groups.settings_for(given, RULE, "head.weight", decays=True) == ParamSettings(0.5, 0.1)
    assert optimizer_groups.settings_for(given, RULE, "norm.weight", decays=False) == ParamSettings(0.5, 0.2)
    assert optimizer_groups.settings_for(given, RULE, "blocks.0.norm.weight", decays=False) == ParamSettings(0.1, 0.2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("embed*", "is not a group of parameters"),
        ("embed*:", "is not a group of parameters"),
        ("embed*:rate=1", "has an unknown setting (rate)"),
        ("embed*:lr=fast", "is not a number (lr=fast)"),
        ("embed*:lr=-1", "is out of range (lr=-1)"),
        ("embed*:lr=nan", "is out of range (lr=nan)"),
        ("embed*:lr=1,lr=2", "repeats a setting (lr)"),
    ],
)
def test_an_invalid_group_is_refused_before_a_run(text: str, why: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Config.load(None, [f'optimizer.groups=["{text}"]'])
    (fault,) = caught.value.issues
    assert (fault.key, fault.value) == ("optimizer.groups", text)
    assert why in fault.message


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    for rule in (OptimizerConfig(groups=("embde*:lr=0.5",)), OptimizerConfig(name="muon", by_adamw=("embde*",))):
        with pytest.raises(ValueError, match=r"no parameter matches the pattern .*embde\*.*embed\.weight"):
            Engine(models.build(tiny(), "meta"), "", rule)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["optimizer.in_backward=true"], "optimizer.in_backward"),
        (["optimizer.in_backward=true", "clip=0", "layout=pp=2"], "optimizer.in_backward"),
        (["optimizer.in_backward=true", "clip=0", "dtype=float16"], "optimizer.in_backward"),
        (["optimizer.ema=0.9", "layout=pp=2,schedule=2bw"], "optimizer.ema"),
        (["optimizer.name=sgd", "optimizer.betas=[0.9, 0.9]"], "optimizer.betas"),
        (["optimizer.name=lion", "optimizer.momentum=0.9"], "optimizer.momentum"),
        (["optimizer.name=lion", "optimizer.states=int8"], "optimizer.states"),
        (["optimizer.by_adamw=*"], "optimizer.by_adamw"),
    ],
)
def test_invalid_or_ineffective_options_are_refused(settings: list[str], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Config.load(None, settings)
    assert [fault.key for fault in caught.value.issues] == [key]
