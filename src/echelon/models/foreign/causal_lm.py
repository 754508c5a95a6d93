"""A causal language model of transformers under the loss contract, so that the engine, `wrap` and `verify` take it.

`adapt` derives a class from the model's own, of the same name, whose forward also takes `tokens` and `targets` and
returns (sum of losses, number of valid targets). Called in any other way the model is what it was. Nothing of a
family's code is replaced or repeated: its forward runs as written, as a whole or in three parts (layer_stack.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from echelon.models import init_weights
from echelon.models.attention import document_positions
from echelon.models.foreign.float64_casts import float64_casts
from echelon.models.foreign.functional_dropout import add_sites, counter_dropout
from echelon.models.foreign.hf_source import HFSource
from echelon.models.foreign.init_rules import materialize_buffers, record_init
from echelon.models.foreign.layer_stack import LayerCall, LayerStack, find_layer_stack
from echelon.models.layers import loss_sum
from echelon.models.pipeline_model import PipelineLayer, PipelineModel
from echelon.rng import Init

LogitsLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class ForeignLayer(nn.Module):
    """What `adapt` adds to the class of a layer, whose forward backward may recompute alone."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with exact_casts_and_dropout(self):
            return super().forward(*args, **kwargs)


@contextmanager
def exact_casts_and_dropout(module: nn.Module) -> Iterator[None]:
    """Run code of transformers in float64 if the module is, and with dropout that does not depend on the layout."""
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    with float64_casts(dtype), counter_dropout(module):
        yield


class ForeignCausalLM(nn.Module):
    """What `adapt` adds to a class of transformers; it comes before that class in the order of inheritance."""

    layer_stack: LayerStack
    runs_by_layer = False
    """forward runs in parts, so that sequences and layers can be divided; else as written"""
    logits_loss: LogitsLoss = staticmethod(loss_sum)
    """from logits to (sum of losses, number of valid targets); tensor parallelism divides the vocabulary"""

    def forward(  # type: ignore[override]
        self,
        *args: Any,
        tokens: Tensor | None = None,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """(sum of losses, number of valid targets) of `tokens` and `targets`, int64 [B, T]; else as transformers has it.

        `documents` are document indices: tokens attend only within their document.
        """
        if tokens is None:
            return super().forward(*args, **kwargs)
        assert targets is not None
        with self._casts():
            return self.logits_loss(self._logits(tokens, documents, positions), targets)

    def logits(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        with self._casts():
            return self._logits(tokens, documents, positions)

    def _logits(self, tokens: Tensor, documents: Tensor | None, positions: Tensor | None) -> Tensor:
        placed = self._positions(tokens, documents, positions)
        if not self.runs_by_layer:
            whole: Tensor = self.forward_as_written(input_ids=tokens, use_cache=False, **placed).logits
            return whole
        stack = self.layer_stack
        calls = self._layer_calls(tokens, documents, positions)
        hidden = stack.embed(self, input_ids=tokens, **placed)
        for name, call in zip(stack.layer_names, calls, strict=True):
            hidden = call.run(self.get_submodule(name), hidden)
        logits: Tensor = stack.head(self, hidden, **placed).logits
        return logits

    def forward_as_written(self, **kwargs: Any) -> Any:
        """Call transformers' forward without the hooks of the module."""
        return super().forward(**kwargs)

    def _positions(self, tokens: Tensor, documents: Tensor | None, positions: Tensor | None) -> dict[str, Tensor]:
        """`position_ids`, where they are not the usual ones."""
        if positions is None and documents is not None:
            positions = document_positions(tokens, documents)
        return {} if positions is None else {"position_ids": positions.expand(len(tokens), -1)}

    def _layer_calls(
        self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> list[LayerCall]:
        weight = next(parameter for parameter in self.parameters() if parameter.is_floating_point())
        zeros = torch.zeros((), dtype=self.context_dtype or weight.dtype, device=tokens.device)
        like = zeros.expand(*tokens.shape, self.layer_stack.hidden_size)
        return self.layer_stack.contexts(self, like, **self._positions(tokens, documents, positions))

    context_dtype: torch.dtype | None = None
    """dtype of the hidden states, where no parameter of this rank has it"""

    def _casts(self) -> AbstractContextManager[None]:
        return exact_casts_and_dropout(self)

    # -- pipeline layers ----------------------------------------------------------------------------------------------

    def pipeline_model(self) -> PipelineModel:
        """The layers of the model, for pipelines and recomputation."""
        stack = self.layer_stack
        around = (*stack.before, *stack.after)
        inner = stack.layer_names
        others = [
            name
            for name, _ in self.named_parameters(remove_duplicate=False)
            if not any(name.startswith(f"{module}.") for module in (*around, *inner))
        ]  # parameters that no module's call uses: both ends hold them
        return PipelineModel(
            layers=(
                PipelineLayer("embed", (*stack.before, *others, *stack.tables), self._run_embedding),
                *(PipelineLayer(name, (name, *stack.tables), self._layer_runner(i)) for i, name in enumerate(inner)),
                PipelineLayer("head", (*stack.after, *others, *stack.tables), self._run_head),
            ),
            shared=lambda tokens, targets=None, documents=None, positions=None: self._shared(
                tokens, documents, positions
            ),
            logits=lambda hidden, _shared, **inputs: self._head_logits(hidden, **inputs),
        )

    def _shared(self, *inputs: Any) -> list[LayerCall]:
        with self._casts():
            return self._layer_calls(*inputs)

    def _run_embedding(
        self,
        _hidden: None,
        _calls: Any,
        tokens: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        **_inputs: Tensor,
    ) -> Tensor:
        with self._casts():
            return self.layer_stack.embed(self, input_ids=tokens, **self._positions(tokens, documents, positions))

    def _layer_runner(self, index: int) -> Callable[..., Tensor]:
        name = self.layer_stack.layer_names[index]

        def run(hidden: Tensor, calls: list[LayerCall], **_inputs: Any) -> Tensor:
            with self._casts():
                return calls[index].run(self.get_submodule(name), hidden)  # by name: parallelism may replace it

        return run

    def _run_head(self, hidden: Tensor, _calls: Any, targets: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        with self._casts():
            return self.logits_loss(self._head_logits(hidden, **inputs), targets)

    def _head_logits(
        self,
        hidden: Tensor,
        tokens: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        **_inputs: Any,
    ) -> Tensor:
        placed = self._positions(tokens, documents, positions)
        logits: Tensor = self.layer_stack.head(self, hidden, **placed).logits
        return logits

    # -- first values -------------------------------------------------------------------------------------------------

    def initial(self, name: str) -> Init:
        """Initial distribution of a parameter on the meta device: as transformers initialises it."""
        rule: Init = self.init_rules[name]
        return rule

    init_rules: Any
    """of a model that was built on the meta device: each parameter's distribution by name (init_rules.py)"""


def adapt(model: nn.Module) -> Any:
    """Give a causal language model of transformers the loss contract, in place. The model may be on any device."""
    if isinstance(model, ForeignCausalLM):
        return model
    own: Any = type(model)
    with torch.device("meta"):
        twin = _derive(own(model.config), ForeignCausalLM)  # its layers are found without computing anything
    adapted = _derive(model, ForeignCausalLM)
    adapted.layer_stack = find_layer_stack(twin)
    layers = [adapted.get_submodule(name) for name in adapted.layer_stack.layer_names]
    for module, probabilities in zip((*layers, adapted), adapted.layer_stack.dropouts, strict=True):
        add_sites(module, probabilities)
    for layer in layers:
        _derive(layer, ForeignLayer)
    for module in adapted.modules():
        module.wide_buffers = tuple(name for name, _ in module.named_buffers(recurse=False))
    return adapted


def _derive(module: nn.Module, mixin: type[nn.Module]) -> Any:
    """Put a class before the module's own, under the same name."""
    own = type(module)
    module.__class__ = type(own.__name__, (mixin, own), {"__module__": own.__module__})
    return module


def build_on_meta(source: HFSource, **options: Any) -> Any:
    """Build transformers' own class of a directory on the meta device: shapes only, no contract, no first values."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(source.folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)


def build_causal_lm(
    source: HFSource, device: str = "meta", *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """Build the model of a directory: with its weights, or the first values of `seed`; on "meta" with shapes only.

    On the meta device the engine reads the weights, or draws the values, of each rank's slices.
    """
    # float64 has no grouped GEMM.
    model = build_on_meta(source, **({"experts_implementation": "eager"} if dtype == torch.float64 else {}))
    rules = record_init(model)
    materialize_buffers(model)
    adapted = adapt(model).to(dtype)
    adapted.init_rules = rules
    if device != "meta":
        buffers = {name: buffer.clone() for name, buffer in adapted.named_buffers()}
        adapted.to_empty(device=device)
        adapted.tie_weights()
        init_weights(adapted, seed)
        for name, buffer in adapted.named_buffers():
            buffer.copy_(buffers[name])
    return adapted
