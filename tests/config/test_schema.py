from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from echelon.config import schema
from echelon.config.schema import OnlyWith, Range


@dataclass(frozen=True, kw_only=True)
class Inner:
    kind: Literal["round", "square"] = "round"
    """Shape."""
    radius: Annotated[float, Range(low=0, low_open=True), OnlyWith("kind", ("round",))] = 1.0
    """Of a round one."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    count: int | None = None
    """How many."""
    names: tuple[str, ...] = ()


def test_a_dataclass_is_a_table_of_dotted_keys():
    table = schema.key_table(Outer, with_meanings=True)
    assert list(table) == ["inner.kind", "inner.radius", "count", "names"]
    assert [key.meaning for key in table.values()] == ["Shape.", "Of a round one.", "How many.", ""]
    assert table["inner.radius"].legal == "a number, > 0"


def test_parse_build_and_write_are_inverse():
    given = {"inner.radius": 2, "count": 3, "names": ["a", "b"]}
    values, faults = schema.parse_values(Outer, given)
    outer = schema.build(Outer, values)
    assert not faults
    assert outer == Outer(inner=Inner(radius=2.0), count=3, names=("a", "b"))
    assert schema.to_toml(schema.effective_values(outer)) == (
        'count = 3\nnames = ["a", "b"]\n\n[inner]\nkind = "round"\nradius = 2.0\n'
    )


def test_a_key_without_effect_is_refused_and_not_written():
    _, (fault,) = schema.parse_values(Outer, {"inner.kind": "square", "inner.radius": 2.0})
    assert fault.message == "has no effect with inner.kind=square"
    assert "inner.radius" not in schema.effective_values(Outer(inner=Inner(kind="square")))


@pytest.mark.parametrize(
    ("bounds", "text", "inside", "outside"),
    [
        (Range(low=1), ">= 1", 1, 0),
        (Range(low=0, low_open=True), "> 0", 0.1, 0),
        (Range(low=0, high=1, high_open=True), ">= 0 and < 1", 0.5, 1),
        (Range(high=3), "<= 3", 3, 4),
    ],
)
def test_ranges(bounds, text, inside, outside):
    assert str(bounds) == text
    assert inside in bounds
    assert outside not in bounds
