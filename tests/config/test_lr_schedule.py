from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.config.lr_schedule import learning_rate, lr_factor
from echelon.config.run_config import Config
from echelon.config.sections import LRScheduleConfig, OptimizerConfig

SHAPES = ("cosine", "wsd", "constant")


def test_warm_up_is_linear_and_peaks_at_its_end():
    schedule = LRScheduleConfig(name="constant", warmup=4)
    assert [lr_factor(step, 100, schedule) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_cosine_ends_at_the_final_fraction():
    schedule = LRScheduleConfig(name="cosine", warmup=10, final=0.1)
    assert lr_factor(10, 111, schedule) == 1.0
    assert lr_factor(60, 111, schedule) == pytest.approx(0.55)
    assert lr_factor(110, 111, schedule) == pytest.approx(0.1)


def test_wsd_is_constant_then_linear():
    schedule = LRScheduleConfig(name="wsd", warmup=0, final=0.0, decay=0.2)
    values = [lr_factor(step, 100, schedule) for step in range(100)]
    assert set(values[:80]) == {1.0}
    assert values[80:] == pytest.approx([left / 20 for left in range(19, -1, -1)])


def test_wsd_decays_over_a_share_of_all_steps_also_after_a_warm_up():
    schedule = LRScheduleConfig(name="wsd", warmup=50, final=0.0, decay=0.2)
    values = [lr_factor(step, 100, schedule) for step in range(50, 100)]
    assert set(values[:30]) == {1.0}
    assert values[30:] == pytest.approx([left / 20 for left in range(19, -1, -1)])


def test_wsd_ends_at_the_final_fraction():
    schedule = LRScheduleConfig(name="wsd", warmup=0, final=0.1, decay=0.2)
    assert lr_factor(99, 100, schedule) == pytest.approx(0.1)
    assert lr_factor(89, 100, schedule) == pytest.approx(0.1 + 0.9 / 2)


def test_learning_rate_scales_the_peak():
    config = Config(optimizer=OptimizerConfig(lr=0.5), schedule=LRScheduleConfig(name="constant", warmup=0))
    assert learning_rate(3, 10, config) == 0.5


@pytest.mark.parametrize("name", SHAPES)
def test_a_run_shorter_than_its_warm_up_ends_before_the_peak(name):
    schedule = LRScheduleConfig(name=name, warmup=1000, decay=0.0)
    values = [lr_factor(step, 5, schedule) for step in range(5)]
    assert values == sorted(values)
    assert 0 < values[0] < values[-1] < 0.01


@given(
    name=st.sampled_from(SHAPES),
    warmup=st.integers(0, 50),
    total=st.integers(1, 80),
    final=st.floats(0, 1),
    decay=st.floats(0, 1),
)
def test_the_factor_falls_only_after_the_warm_up(name, warmup, total, final, decay):
    schedule = LRScheduleConfig(name=name, warmup=warmup, final=final, decay=decay)
    values = [lr_factor(step, total, schedule) for step in range(total + 5)]
    assert all(0 <= value <= 1 for value in values)
    after = values[warmup:]
    assert all(left >= right for left, right in pairwise(after))


def test_steps_are_counted_from_zero():
    with pytest.raises(ValueError, match="counted from 0"):
        lr_factor(-1, 10, LRScheduleConfig())
