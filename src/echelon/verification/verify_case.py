"""`VerifyCase`: what one device and a layout both run, as data that travels to every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from echelon.config.lr_schedule import lr_factor
from echelon.config.run_config import Config
from echelon.config.sections import LRScheduleConfig, OptimizerConfig
from echelon.models.foreign.hf_source import is_hf_model, read_hf_source
from echelon.models.model_config import IGNORE_INDEX, ModelConfig
from echelon.models.user_model import load_factory

if TYPE_CHECKING:
    from torch import Tensor, nn


DEFAULT_ADAMW = OptimizerConfig(lr=1e-2, eps=1e-6)
"""the default optimizer. AdamW turns a difference d of a gradient near 0 into one of lr·d/eps of the parameter: with
the usual eps, rounding alone can come near the tolerance where gradients are not compared (asynchronous schedules)"""
FLOAT64 = Config(dtype="float64", schedule=LRScheduleConfig(name="constant", warmup=0))
"""the default configuration: exact"""


@dataclass(frozen=True, kw_only=True)
class VerifyCase:
    """A model and a few steps of its training, in float64 or as configured."""

    model: ModelConfig | str
    """a named model, or `file.py:factory` of a custom model"""
    batch_function: str = ""
    """`file.py:function` that makes the batches of a custom model: (sequences, seed) to a dict of tensors"""
    optimizer: OptimizerConfig = DEFAULT_ADAMW
    clip: float = 1.0
    steps: int = 5
    seq_len: int = 33
    """odd on purpose: no tp divides it"""
    packed: bool = False
    """several documents per sequence"""
    seed: int = 1234
    reduce: bool = False
    """whether each layout gets a model that is reduced for it (layout_case.py)"""
    max_ranks: int = 0
    """ranks to which a layout is folded (fold_layout.py); 0: as many as it has"""
    config: Config = FLOAT64
    """everything else that a run reads: precision, kernels, compression, learning-rate schedule, sharding, memory and
    pipeline options; with the optimizer, clipping and seed from above"""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"verify needs a step to compare (steps={self.steps}); use 1 or more")
        config = replace(self.config, optimizer=self.optimizer, clip=self.clip, seed=self.seed)
        object.__setattr__(self, "config", config)

    @property
    def is_float64(self) -> bool:
        """Whether nothing is rounded but in float64: else the case runs as configured."""
        return self.config.dtype == "float64"

    def learning_rate(self, step: int) -> float:
        """The schedule's rate, over the few steps of the case and with a warm-up of at most two of them."""
        schedule = replace(self.config.schedule, warmup=min(self.config.schedule.warmup, 2))
        return self.optimizer.lr * lr_factor(step, self.steps, schedule)

    def build(self, device: str, *, double: bool = True) -> nn.Module:
        """The one-device model, in float64 or float32; on "meta" with shapes only, or as the user's factory builds it.

        A built-in model has the same initial values in both, rounded in the second. B of an adapter starts at random:
        from zero, the first step would not show a wrong gradient of A.
        """
        from echelon.models.lora.add_lora import add_adapters

        model: nn.Module = add_adapters(
            self.build_base(device, double=double), self.config.lora, seed=self.seed, zero_b=False
        )
        return model

    def build_base(self, device: str, *, double: bool = True) -> nn.Module:
        """The model without adapters."""
        import torch

        from echelon import models
        from echelon.models.foreign.float64_casts import widen_casts

        dtype = torch.float64 if double else torch.float32
        if isinstance(self.model, ModelConfig):
            return models.build(self.model, device, dtype=dtype, seed=self.seed)
        if is_hf_model(self.model):
            from echelon.models.foreign.causal_lm import build_causal_lm

            foreign: nn.Module = build_causal_lm(read_hf_source(self.model), device, dtype=dtype, seed=self.seed)
            return foreign
        torch.manual_seed(self.seed)
        model: nn.Module = load_factory(self.model)()
        return widen_casts(model.double()) if double else model

    def batch(self, step: int, num_sequences: int) -> dict[str, Tensor]:
        """The global batch of a step, the same on every rank, with floats in float64."""
        import torch

        if self.batch_function:
            from echelon.training.batch_sharding import count_rows

            tensors: dict[str, Any] = load_factory(self.batch_function)(num_sequences, self.seed + step)
            count_rows(tensors)
            return {key: value.double() if value.is_floating_point() else value for key, value in tensors.items()}
        generator = torch.Generator().manual_seed(self.seed + step)
        own = self.model if isinstance(self.model, ModelConfig) else None
        vocab = own.vocab if own else read_hf_source(str(self.model)).vocab
        if own and own.family == "conv":
            images = torch.randn(num_sequences, 3, 16, 16, generator=generator, dtype=torch.float64)
            return {"images": images, "labels": torch.randint(0, 10, (num_sequences,), generator=generator)}
        tokens = torch.randint(0, vocab, (num_sequences, self.seq_len + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        # Different numbers of valid targets per rank and microbatch distinguish a mean of means from the mean.
        targets[torch.rand(targets.shape, generator=generator) < 0.3] = IGNORE_INDEX
        targets[::3, : self.seq_len // 2] = IGNORE_INDEX
        batch = {"tokens": tokens[:, :-1], "targets": targets}
        if self.packed:
            ends = torch.rand(targets.shape, generator=generator) < 3 / self.seq_len
            batch["documents"] = ends.cumsum(dim=1)
        return batch
