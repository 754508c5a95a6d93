"""How the work of one device is laid over many ranks: `Layout`, its grammar, its rules, `Mesh`. No torch."""

from echelon.layout.grammar import KEYS, Key, describe
from echelon.layout.layout import Layout
from echelon.layout.mesh import Mesh
from echelon.layout.parse import check, check_many
from echelon.layout.rank_order import Links, Traffic, choose_order, exposed_s
from echelon.layout.rules import ModelFacts
from echelon.layout.validation_error import Fault, FaultError, did_you_mean

__all__ = [
    "KEYS",
    "Fault",
    "FaultError",
    "Key",
    "Layout",
    "Links",
    "Mesh",
    "ModelFacts",
    "Traffic",
    "check",
    "check_many",
    "choose_order",
    "describe",
    "did_you_mean",
    "exposed_s",
]
