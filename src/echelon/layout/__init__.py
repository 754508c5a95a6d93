"""How a one-device model is laid out over many ranks: `Layout`, its grammar, its rules, `Mesh`. No torch."""

from echelon.layout.grammar import KEYS
from echelon.layout.layout import Layout
from echelon.layout.mesh import Mesh
from echelon.layout.parse import check_layout, check_layouts
from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean

__all__ = [
    "KEYS",
    "Layout",
    "Mesh",
    "ValidationError",
    "ValidationIssue",
    "check_layout",
    "check_layouts",
    "did_you_mean",
]
