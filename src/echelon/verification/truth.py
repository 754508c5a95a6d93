"""The truth: a plain training loop on one device, without any of the code that it verifies.

It shares with a layout only the model, the batches, the counter-based dropout and torch's optimizer. Accumulation is
done as a user would write it: gradients of the summed losses add up in `.grad`, and are divided once by the number of
valid targets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from echelon import rng
from echelon.models.layers import check_loss_output
from echelon.optim.torch_rules import build_torch_optimizer
from echelon.verification.verify_case import VerifyCase


def write_truth(case: VerifyCase, num_sequences: int, accumulate: int, path: Path) -> None:
    """Run the case on one device, and write every value of every step to a safetensors file."""
    torch.manual_seed(case.seed)
    model = case.build("cpu")
    stream = rng.RandomStream(case.seed)
    rng.attach_stream(model, stream)
    model.train()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = build_torch_optimizer(case.optimizer, trainable)
    record: dict[str, Tensor] = {}
    size = num_sequences // accumulate
    for step in range(case.steps):
        batch = case.batch(step, num_sequences)
        optimizer.zero_grad()
        loss, count = 0.0, 0
        for start in range(0, num_sequences, size):
            stream.samples = torch.arange(start, start + size) + step * num_sequences
            inputs = {key: value[start : start + size] for key, value in batch.items()}
            total, valid = check_loss_output(model(**inputs))
            if total.requires_grad:
                total.backward()
            loss, count = loss + total.item(), count + int(valid)
        for p in trainable.values():
            # Unused in this step: a gradient of zero, in every layout alike.
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.div_(max(count, 1))
        # Before clipping: one wrong gradient makes the norm wrong, and clipping would spread it to all of them.
        before = {name: p.grad.clone() for name, p in trainable.items() if p.grad is not None}
        norms = [gradient.norm() for gradient in before.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        if count:
            optimizer.step()
        for module in model.modules():
            layer: Any = module
            if getattr(module, "expert_load", None) is not None:  # an MoE layer, whose gate may balance by a bias
                layer.end_step(layer.expert_load[:-1] * bool(count))
        record[f"{step}/loss"] = torch.tensor(loss / max(count, 1), dtype=torch.float64)
        record[f"{step}/norm"] = norm.detach().double()
        for name, parameter in model.named_parameters():
            record[f"{step}/parameter/{name}"] = parameter.detach().clone()
            if parameter.requires_grad:
                record[f"{step}/gradient/{name}"] = before[name]
        for name, buffer in model.named_buffers():
            record[f"{step}/buffer/{name}"] = buffer.double().clone()
    save_file(record, path)
