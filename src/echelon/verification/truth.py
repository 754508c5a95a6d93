"""The truth: a plain training loop on one device, without any of the code that it verifies.

It shares with a layout only the model, the batches, the counter-based dropout and the parameter groups. Accumulation is
done as a user would write it: gradients of the summed losses add up in `.grad`, and are divided once by the number of
valid targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from echelon import rng
from echelon.models.layers import check_loss_output
from echelon.verification.reference_optimizer import PAPER_RULES, PaperRule, ReferenceOptimizer, filter_names
from echelon.verification.verify_case import VerifyCase


def write_truth(case: VerifyCase, num_sequences: int, accumulate: int, path: Path) -> None:
    """Run the case on one device in float64, and write every value of every step to a safetensors file."""
    save_file(ReferenceTraining(case).run(num_sequences, accumulate), path)


class ReferenceTraining:
    """A case on one device, in float64."""

    device = torch.device("cpu")

    def __init__(self, case: VerifyCase):
        torch.manual_seed(case.seed)
        self.case, self.model = case, self.build(case)
        self.stream = rng.RandomStream(case.seed)
        rng.attach_stream(self.model, self.stream)
        self.model.train()
        self.params: dict[str, nn.Parameter] = self.master_params()
        """what the optimizer updates"""
        trainable = {name: p for name, p in self.params.items() if p.requires_grad}
        self.trainable = trainable
        self.optimizer = ReferenceOptimizer(
            case.optimizer, trainable, filter_names(self.model), paper_rules=self.paper_rules()
        )
        self.record: dict[str, Tensor] = {}

    def build(self, case: VerifyCase) -> nn.Module:
        return case.build("cpu")

    def master_params(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def paper_rules(self) -> Mapping[str, PaperRule]:
        """The update rules that torch does not have."""
        return PAPER_RULES

    def forward_backward(self, inputs: dict[str, Tensor]) -> tuple[float, int]:
        """Add the gradients of the summed loss to the parameters'; return (sum of losses, number of valid targets)."""
        total, valid = check_loss_output(self.model(**inputs))
        if total.requires_grad:
            total.backward()
        return total.item(), int(valid)

    def complete_gradients(self, step: int) -> None:
        """Called with the gradients of a step, after they are recorded."""

    def update(self, lr: float) -> None:
        self.optimizer.step(lr)

    def complete_update(self, step: int) -> None:
        """Called with the weights of a step, after they are recorded."""

    def run(self, num_sequences: int, accumulate: int) -> dict[str, Tensor]:
        """Train, and return every value of every step by "step/kind/name"."""
        self._record(-1, "parameter", self.params)
        self._record(-1, "average", self.optimizer.averages)
        for step in range(self.case.steps):
            self._train_step(step, num_sequences, num_sequences // accumulate)
        return self.record

    def _train_step(self, step: int, num_sequences: int, size: int) -> None:
        batch = self.case.batch(step, num_sequences)
        loss, count = 0.0, 0
        for start in range(0, num_sequences, size):
            self.stream.samples = torch.arange(start, start + size, device=self.device) + step * num_sequences
            inputs = {key: value[start : start + size].to(self.device) for key, value in batch.items()}
            total, valid = self.forward_backward(inputs)
            loss, count = loss + total, count + valid
        for p in self.trainable.values():
            # Unused in this step: a gradient of zero, in every layout alike.
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.div_(max(count, 1))
        # Before clipping: one wrong gradient makes the norm wrong, and clipping would spread it to all of them.
        gradients = {name: p.grad.clone() for name, p in self.trainable.items() if p.grad is not None}
        self.complete_gradients(step)
        norms = [gradient.norm() for gradient in gradients.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        if self.case.clip:
            torch.nn.utils.clip_grad_norm_(self.trainable.values(), self.case.clip)
        if count:
            self.update(self.case.learning_rate(step))
        self._record(step, "parameter", self.params)
        self.complete_update(step)
        for module in self.model.modules():
            layer: Any = module
            if getattr(module, "expert_load", None) is not None:  # an MoE layer, whose gate may balance by a bias
                layer.end_step(layer.expert_load[:-1] * bool(count))
        for p in self.trainable.values():
            p.grad = None
        self._record(step, "loss", {"": torch.tensor(loss / max(count, 1), dtype=torch.float64)})
        self._record(step, "norm", {"": norm})
        self._record(step, "gradient", gradients)
        self._record(step, "average", self.optimizer.averages)
        self._record(step, "buffer", dict(self.model.named_buffers()))

    def _record(self, step: int, kind: str, tensors: dict[str, Any]) -> None:
        for name, value in tensors.items():
            key = f"{step}/{kind}/{name}" if name else f"{step}/{kind}"
            self.record[key] = value.detach().to("cpu", torch.float64).clone()
