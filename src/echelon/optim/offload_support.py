"""Which update rules may have states on the host. No torch: a configuration is checked by this too.

The host's thread updates one unit at a time, by itself: it sends nothing to other ranks, and it begins when the norm of
all gradients is known.
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.layout import ValidationIssue
from echelon.memory.offload.cost import offloads_optimizer
from echelon.optim.update_rule import UpdateRule

OFFLOADABLE_RULES = ("adamw", "sgd", "lion")
"""element by element"""


def offload_faults(rule: UpdateRule, offload: str, *, master: str = "float32") -> Iterator[ValidationIssue]:
    """What of a rule, and of weights without a master copy, does not go with an offload."""
    if not offloads_optimizer(offload):
        return
    if master == "none":
        why = f"saves nothing on the device, where no master copy is (offload={offload})"
        yield ValidationIssue(
            key="precision.master", value="none", message=why, legal="float32, or offload=activations"
        )
    if rule.name not in OFFLOADABLE_RULES:
        why = f"adds up numbers of whole matrices, which the host's update does not (offload={offload})"
        legal = f"{', '.join(OFFLOADABLE_RULES)}, or offload=activations"
        yield ValidationIssue(key="optimizer.name", value=rule.name, message=why, legal=legal)
    if rule.in_backward:
        why = f"is not for states on the host, where an update begins when all gradients are known (offload={offload})"
        yield ValidationIssue(
            key="optimizer.in_backward", value="true", message=why, legal="false, or offload=activations"
        )
    if rule.ema and "disk" in offload.split("+"):
        why = f"would read and write the weights once more in files (offload={offload})"
        yield ValidationIssue(
            key="optimizer.ema", value=f"{rule.ema:g}", message=why, legal="0, or an offload without disk"
        )


def check_offload(rule: UpdateRule, offload: str, *, master: str = "float32") -> None:
    found = [str(fault) for fault in offload_faults(rule, offload, master=master)]
    if found:
        raise ValueError("; ".join(found))
