"""How a one-device model is laid out over many ranks: `Layout`, its grammar, its rules, `Mesh`. No torch."""

from echelon.layout.grammar import KEYS, LayoutKey, describe_grammar
from echelon.layout.layout import Layout
from echelon.layout.mesh import Mesh
from echelon.layout.parse import check_layout, check_layouts
from echelon.layout.rank_order import LinkSpeeds, StepTraffic, choose_rank_order, exposed_comm_s
from echelon.layout.rules import ModelDimensions
from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean

__all__ = [
    "KEYS",
    "Layout",
    "LayoutKey",
    "LinkSpeeds",
    "Mesh",
    "ModelDimensions",
    "StepTraffic",
    "ValidationError",
    "ValidationIssue",
    "check_layout",
    "check_layouts",
    "choose_rank_order",
    "describe_grammar",
    "did_you_mean",
    "exposed_comm_s",
]
