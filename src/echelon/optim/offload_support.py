"""Where states on the host are updated, and what is incompatible with them. No torch: validation uses this too.

The host's thread updates one parameter group at a time, by itself: it issues no collectives, and it starts when the
gradient norm is known (host_optimizer.py). Rules with statistics of full matrices update on the device, through which
their states pass (paged_optimizer.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.layout import ValidationIssue
from echelon.memory.offload.cost import offloads_optimizer
from echelon.optim.update_rule import UpdateRule

HOST_UPDATED_RULES = ("adamw", "sgd", "lion")
"""elementwise optimizers"""


def updates_on_device(rule: UpdateRule) -> bool:
    """Return whether the device updates states that live on the host."""
    return rule.name not in HOST_UPDATED_RULES


def offload_faults(rule: UpdateRule, offload: str, *, master: str = "float32") -> Iterator[ValidationIssue]:
    """Yield what is incompatible with an offload: updates in backward, averages, and no master weights."""
    if not offloads_optimizer(offload):
        return
    if master == "none":
        why = f"has no effect with offload={offload}, which keeps master weights on the host"
        yield _issue("precision.master", "none", why, "float32, or offload=activations")
    if rule.in_backward:
        why = f"is incompatible with offload={offload}, whose update starts when all gradients are reduced"
        yield _issue("optimizer.in_backward", "true", why, "false, or offload=activations")
    if rule.ema and "disk" in offload.split("+"):
        why = f"is incompatible with offload={offload}: it would read and write the weights on disk once more"
        yield _issue("optimizer.ema", f"{rule.ema:g}", why, "0, or an offload without disk")


def _issue(key: str, value: str, message: str, legal: str) -> ValidationIssue:
    return ValidationIssue(key=key, value=value, message=message, legal=legal)


def check_offload(rule: UpdateRule, offload: str, *, master: str = "float32") -> None:
    faults = [str(fault) for fault in offload_faults(rule, offload, master=master)]
    if faults:
        raise ValueError("; ".join(faults))
