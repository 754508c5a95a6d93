"""A causal language model of transformers under the loss contract, so that the engine, `wrap` and `verify` take it.

`adapt` derives a class from the model's own, of the same name, whose forward also takes `tokens` and `targets` and
returns (sum of losses, number of valid targets). Called in any other way the model is what it was. Nothing of a
family's code is replaced or repeated: its forward runs as written, as a whole or in three parts (layer_stack.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.kernels.layers.cross_entropy import TokenLosses, token_cross_entropy
from echelon.models import init_weights
from echelon.models.attention import AttentionContext, document_positions
from echelon.models.foreign.core_attention import CONTEXT_ARGUMENT, CORE_ATTENTION, AttentionState, install_cores
from echelon.models.foreign.document_masks import keeps_documents_apart
from echelon.models.foreign.embedding_reads import reads_embedding
from echelon.models.foreign.float64_casts import float64_casts
from echelon.models.foreign.foreign_experts import ForeignExperts, is_experts
from echelon.models.foreign.full_tables import FullSequences, FullTable
from echelon.models.foreign.functional_dropout import SITES, add_sites, counter_dropout
from echelon.models.foreign.hf_source import HFSource, check_model_type, quiet_transformers
from echelon.models.foreign.init_rules import materialize_buffers, move_to_meta, record_init
from echelon.models.foreign.language_head import LanguageHead, LogitMap, try_logit_map
from echelon.models.foreign.layer_probe import find_layer_stack, implementations, prepare_tables
from echelon.models.foreign.layer_stack import LayerCall, LayerStack, split_hidden
from echelon.models.foreign.router_loss import FLAG, KeepsRouterLogits, RouterLoss, RoutingSums, find_router_loss
from echelon.models.foreign.unfuse import PartInit, unfuse
from echelon.models.model_config import IGNORE_INDEX
from echelon.models.pipeline_model import PipelineLayer, PipelineModel
from echelon.rng import Init

MAX_SEQ_LEN = 1 << 20


ROUTING_ARGUMENT = "router_sums"
"""keyword of a layer, which never reaches transformers' code"""
Hidden = Tensor | tuple[Tensor, Tensor]
"""hidden states, and after the first layer with a balance loss the sums of the routers so far (router_loss.py)"""


class ForeignLayer(nn.Module):
    """What `adapt` adds to the class of a layer, whose forward backward may recompute alone."""

    attention_state: AttentionState | None = None
    """what the cores of its attention read (core_attention.py)"""

    router_logits: KeepsRouterLogits | None = None
    """of a layer with routers, if their balance loss is added"""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own output; with ROUTING_ARGUMENT, hidden states and the sums of its routers."""
        context, routing = kwargs.pop(CONTEXT_ARGUMENT, None), kwargs.pop(ROUTING_ARGUMENT, None)
        if self.attention_state is not None:
            self.attention_state.context = context
        if routing is None:
            with exact_casts_and_dropout(self):
                return super().forward(*args, **kwargs)
        assert self.router_logits is not None
        self.router_logits.start()
        hidden, call = split_hidden(args, kwargs)
        with exact_casts_and_dropout(self):
            out = call.run(super().forward, hidden)
        return out, self.router_logits.take(len(hidden), routing.is_token)


@dataclass(frozen=True)
class RoutingRequest:
    """Asks a layer for the sums of its routers."""

    is_token: Tensor | None
    """tokens that are no padding; none: all"""


@contextmanager
def exact_casts_and_dropout(module: nn.Module) -> Iterator[None]:
    """Run code of transformers in float64 if the module is, and with dropout that does not depend on the layout."""
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    with float64_casts(dtype), counter_dropout(module):
        yield


@dataclass(frozen=True, kw_only=True)
class DividedSequences:
    """What knows of more tokens than this rank's."""

    sequences: FullSequences
    full_layers: frozenset[int]
    full_embedding: bool
    full_tables: bool
    """tables outside of the layers are given the positions of all tokens"""


class ForeignCausalLM(nn.Module):
    """What `adapt` adds to a class of transformers; it comes before that class in the order of inheritance."""

    layer_stack: LayerStack
    runs_by_layer = False
    """forward runs in parts, so that sequences and layers can be divided; else as written"""
    logit_map: LogitMap
    token_losses: TokenLosses = staticmethod(token_cross_entropy)
    """from logits to a loss for each target; tensor parallelism divides the vocabulary"""

    def forward(
        self,
        *args: Any,
        tokens: Tensor | None = None,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """(sum of losses, number of valid targets) of `tokens` and `targets`, int64 [B, T].

        Without `tokens`, as transformers has it.

        `documents` are document indices: tokens attend only within their document.
        """
        if tokens is None and not self.runs_by_layer:
            return super().forward(*args, **kwargs)
        if tokens is None:
            return self._mean_loss(*args, **kwargs)
        assert targets is not None
        self._check_documents(documents)
        with self._casts():
            return self._whole_loss(tokens, targets, documents, positions), (targets != IGNORE_INDEX).sum()

    def _mean_loss(self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None) -> Any:
        """Answer a call in transformers' words where its forward runs in parts: the mean loss, and all logits."""
        from transformers.modeling_outputs import CausalLMOutput

        output: Any = CausalLMOutput
        if labels is None:
            return output(logits=self.logits(input_ids))
        batch = {"input_ids": input_ids, "labels": labels}
        if attention_mask is not None:
            batch["attention_mask"] = attention_mask
        total, count = self.forward(**self.loss_inputs(batch))
        return output(loss=total / count.clamp(min=1))

    @staticmethod
    def loss_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`tokens` and `targets` of a batch in transformers' words: `input_ids`, `labels` and `attention_mask`.

        transformers predicts label i + 1 from token i, and ignores labels of -100. Tokens after a padded end are of no
        consequence to those before, so a mask only removes targets.
        """
        if "input_ids" not in batch:
            return dict(batch)
        given = dict(batch)
        tokens, mask = given.pop("input_ids"), given.pop("attention_mask", None)
        labels = given.pop("labels", tokens)
        if mask is not None:
            if bool((mask[:, 1:] > mask[:, :-1]).any()):
                raise ValueError("attention_mask must mask the end of sequences (padding_side=right); move the padding")
            labels = labels.masked_fill(mask == 0, IGNORE_INDEX)
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        return {"tokens": tokens, "targets": targets, **given}

    @property
    def max_seq_len(self) -> int:
        """The longest sequence of the config; without one, as long as memory allows."""
        return int(getattr(self.config, "max_position_embeddings", None) or MAX_SEQ_LEN)

    weight_source: Any = None
    """tensors that initialise parameters on the meta device, by name; none: `initial` draws them"""

    def logits(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        self._check_documents(documents)
        with self._casts():
            return self.full_logits(self._logits(tokens, documents, positions))

    @staticmethod
    def full_logits(logits: Tensor) -> Tensor:
        """All logits from this rank's; tensor parallelism gathers them."""
        return logits

    def _logits(self, tokens: Tensor, documents: Tensor | None, positions: Tensor | None) -> Tensor:
        if not self.runs_by_layer:
            placed = self._positions(tokens, documents, positions)
            whole: Tensor = self.forward_as_written(input_ids=tokens, use_cache=False, **placed).logits
            return whole
        return self._head_logits(self._last_hidden(tokens, documents, positions))

    def _last_hidden(self, tokens: Tensor, documents: Tensor | None, positions: Tensor | None) -> Hidden:
        calls = self._layer_calls(tokens, documents, positions)
        hidden: Hidden = self._embed(tokens, documents, positions)
        for index, call in enumerate(calls):
            hidden = self._run_layer(index, call, hidden)
        return hidden

    def _run_layer(self, index: int, call: LayerCall, hidden: Hidden) -> Hidden:
        layer: Any = self.get_submodule(self.layer_stack.layer_names[index])  # by name: parallelism may replace it
        x, sums = hidden if isinstance(hidden, tuple) else (hidden, None)
        if not self.training or self.router_loss is None or layer.router_logits is None:
            out = call.run(layer, x)
            return out if sums is None else (out, sums)
        is_token = None if self.routing_sums is None else self.routing_sums.is_token(x.device)
        asking = {**call.kwargs, ROUTING_ARGUMENT: RoutingRequest(is_token)}
        out, added = replace(call, kwargs=asking).output(layer, x)
        return out, added if sums is None else sums + added

    router_loss: RouterLoss | None = None
    """the balance loss that is added in training"""
    routing_sums: RoutingSums | None = None
    """none: all tokens of a sequence are local"""

    # -- loss ---------------------------------------------------------------------------------------------------------

    def _whole_loss(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """The sum of the losses of a forward."""
        if self.runs_by_layer or (self.router_loss is not None and self.training and not self.is_traced):
            return self._loss(self._last_hidden(tokens, documents, positions), targets)
        if not self.divides_loss:
            return self.token_losses(self._logits(tokens, documents, positions), targets).sum()
        placed = self._positions(tokens, documents, positions)
        return self._chunked_loss(self.layer_stack.head_input_as_written(self, input_ids=tokens, **placed), targets)

    def _loss(self, hidden: Hidden, targets: Tensor) -> Tensor:
        """The sum of the losses, from the hidden states after the last layer.

        The balance loss of a sequence counts once per target, since the sum is divided by the targets."""
        x, sums = hidden if isinstance(hidden, tuple) else (hidden, None)
        if self.divides_loss:
            total = self._chunked_loss(self.layer_stack.head_input(self, x), targets)
        else:
            total = self.token_losses(self._head_logits(x), targets).sum()
        if sums is None or self.router_loss is None:
            return total
        sums = sums if self.routing_sums is None else self.routing_sums.total(sums)
        balance = self.router_loss.of_sequences(sums)
        return total + (balance * (targets != IGNORE_INDEX).sum(1)).sum().to(total.dtype)

    def _chunked_loss(self, head_input: Tensor, targets: Tensor) -> Tensor:
        head = self.get_submodule(self.layer_stack.head_name)
        losses = self.token_losses if self.logit_map.is_identity else self._losses_of_head_output
        total: Tensor = head(head_input, targets=targets, losses=losses)
        return total

    def _losses_of_head_output(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The losses of some tokens, [tokens, words] and [tokens]: each is a sequence of its own to the class."""
        finished = self.layer_stack.finish_logits(self, logits.unsqueeze(1)).squeeze(1)
        return self.token_losses(finished, targets)

    @property
    def divides_loss(self) -> bool:
        """The loss is computed some tokens at a time. Planning traces it whole, on the meta device."""
        head = self.get_submodule(self.layer_stack.head_name)
        return self.logit_map.divides_tokens and isinstance(head, LanguageHead) and not self.is_traced

    @property
    def is_traced(self) -> bool:
        """Planning traces the model on the meta device."""
        weight: Tensor = self.get_submodule(self.layer_stack.head_name).weight  # type: ignore[assignment]
        return weight.is_meta

    def _embed(self, tokens: Tensor, documents: Tensor | None, positions: Tensor | None) -> Tensor:
        """The input of the first layer."""

        def embed(tokens: Tensor, positions: Tensor | None) -> Tensor:
            placed = self._positions(tokens, documents, positions) if self.layer_stack.takes_positions else {}
            return self.layer_stack.embed(self, input_ids=tokens, **placed)

        if self.divided is None or not self.divided.full_embedding:
            return self.run_embedding(lambda: embed(tokens, positions))
        assert positions is not None
        sequences, every = self.divided.sequences, positions.expand(len(tokens), -1)
        return self.run_embedding(lambda: sequences.run_full(embed, tokens, every))

    def forward_as_written(self, **kwargs: Any) -> Any:
        """Call transformers' forward without the hooks of the module; it adds no balance loss unless it is asked to."""
        if getattr(self.config, FLAG, False):
            kwargs.setdefault(FLAG, False)
        return super().forward(**kwargs)

    def _positions(self, tokens: Tensor, documents: Tensor | None, positions: Tensor | None) -> dict[str, Tensor]:
        """`position_ids`, where they are not the usual ones."""
        if positions is None and documents is not None:
            positions = document_positions(tokens, documents)
        return {} if positions is None else {"position_ids": positions.expand(len(tokens), -1)}

    @staticmethod
    def token_positions(tokens: Tensor, documents: Tensor | None) -> Tensor:
        """The position of each token, which context parallelism divides."""
        return document_positions(tokens, documents)

    def _layer_calls(
        self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> list[LayerCall]:
        if self.reads_embedding and not self.is_traced:
            raise ValueError(
                f"the layers of {type(self).__name__} read the embedding beside their input, so that it cannot run in "
                "parts; use tp=1, pp=1 and cp=1"
            )
        divided = self.divided
        if divided is None:
            placed = self._positions(tokens, documents, positions)
            return self._contexts(tokens, placed)
        assert positions is not None
        calls: dict[int, LayerCall] = {}
        if len(divided.full_layers) < self.layer_stack.num_layers:
            context = AttentionContext(positions, documents)
            names = self.layer_stack.tables if divided.full_tables else ()
            tables = {name: FullTable(self.get_submodule(name), divided.sequences) for name in names}
            with implementations(self.config, attention=CORE_ATTENTION):
                local = self._contexts(tokens, self._position_ids(positions, len(tokens)), tables)
            calls |= {
                i: replace(call, kwargs={**call.kwargs, CONTEXT_ARGUMENT: context}) for i, call in enumerate(local)
            }
        if divided.full_layers:
            gather, shape = divided.sequences.gather, (len(tokens), divided.sequences.length)
            every = gather(tokens) if self.layer_stack.needs_tokens else tokens.new_zeros(shape)
            full = self._contexts(every, self._position_ids(gather(positions), len(tokens)))
            calls |= {i: full[i] for i in divided.full_layers}
        return [calls[i] for i in range(self.layer_stack.num_layers)]

    def _contexts(
        self, tokens: Tensor, placed: Mapping[str, Tensor], tables: Mapping[str, nn.Module] | None = None
    ) -> list[LayerCall]:
        weight = next(parameter for parameter in self.parameters() if parameter.is_floating_point())
        shape = (*tokens.shape, self.layer_stack.embedding_size)
        like = torch.zeros(shape, dtype=self.context_dtype or weight.dtype, device=tokens.device)
        return self.layer_stack.contexts(self, like, tokens, tables=tables, **placed)

    def _position_ids(self, positions: Tensor, rows: int) -> dict[str, Tensor]:
        return {"position_ids": positions.expand(rows, -1)} if self.layer_stack.takes_positions else {}

    def divide_sequences(self, cores: Iterable[str], divided: DividedSequences) -> None:
        """Run on parts of sequences: these modules attend by cores, others get the arguments of all tokens."""
        self.require_layers("context parallelism", "cp=1")
        install_cores(self, cores)
        self.divided, self.runs_by_layer = divided, True

    reads_embedding = False
    """arguments of layers follow from the embedding"""
    keeps_documents = True
    """attention does not cross documents that are packed into one sequence"""

    def _check_documents(self, documents: Tensor | None) -> None:
        if documents is not None and not self.layer_stack.takes_positions:
            raise ValueError(
                f"{type(self).__name__} counts tokens by rules of its own, so that each sequence must be one "
                "document; use data.mask_documents=false"
            )
        if documents is not None and not self.keeps_documents:
            raise ValueError(
                f"{type(self).__name__} lets tokens attend to other documents of their sequence, whose masks it does "
                "not make (documents are given); use data.mask_documents=false"
            )

    divided: DividedSequences | None = None
    """none: sequences are whole"""

    def require_layers(self, asked: str, remedy: str) -> None:
        """Raise ValueError where the layers cannot run one by one, which `asked` needs."""
        if self.layer_problem:
            raise ValueError(
                f"{asked} runs the layers of {type(self).__name__} one by one, but {self.layer_problem}; use {remedy}"
            )

    @property
    def layer_problem(self) -> str:
        """Why the layers cannot run one by one; empty if they can."""
        return self.layer_stack.problem

    run_embedding: Callable[[Callable[[], Tensor]], Tensor] = staticmethod(lambda embed: embed())
    """what follows the embedding; sequence parallelism may slice its output"""
    context_dtype: torch.dtype | None = None
    """dtype of the hidden states, where no parameter of this rank has it"""

    def _casts(self) -> AbstractContextManager[None]:
        return exact_casts_and_dropout(self)

    # -- pipeline layers ----------------------------------------------------------------------------------------------

    def pipeline_model(self) -> PipelineModel:
        """The layers of the model, for pipelines and recomputation."""
        self.require_layers("pipeline parallelism", "pp=1")
        stack = self.layer_stack
        around = (*stack.before, *stack.after)
        everywhere = (*stack.tables, *((SITES,) if hasattr(self, SITES) else ()))
        inner = stack.layer_names
        others = [
            name
            for name, _ in self.named_parameters(remove_duplicate=False)
            if not any(name.startswith(f"{module}.") for module in (*around, *inner))
        ]  # parameters that no module's call uses: both ends hold them
        return PipelineModel(
            layers=(
                PipelineLayer("embed", (*stack.before, *others, *everywhere), self._run_embedding),
                *(PipelineLayer(name, (name, *everywhere), self._layer_runner(i)) for i, name in enumerate(inner)),
                PipelineLayer("head", (*stack.after, *others, *everywhere), self._run_head),
            ),
            shared=lambda tokens, targets=None, documents=None, positions=None: self._shared(
                tokens, documents, positions
            ),
            logits=lambda hidden, _shared, **inputs: self.full_logits(self._head_logits(hidden, **inputs)),
        )

    def _shared(self, tokens: Tensor, documents: Tensor | None, positions: Tensor | None) -> list[LayerCall]:
        self._check_documents(documents)
        with self._casts():
            return self._layer_calls(tokens, documents, positions)

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
            return self._embed(tokens, documents, positions)

    def _layer_runner(self, index: int) -> Callable[..., Hidden]:
        def run(hidden: Hidden, calls: list[LayerCall], **_inputs: Any) -> Hidden:
            with self._casts():
                return self._run_layer(index, calls[index], hidden)

        return run

    def _run_head(self, hidden: Hidden, _calls: Any, targets: Tensor, **_inputs: Any) -> tuple[Tensor, Tensor]:
        with self._casts():
            return self._loss(hidden, targets), (targets != IGNORE_INDEX).sum()

    def _head_logits(self, hidden: Hidden, **_inputs: Any) -> Tensor:
        x = hidden[0] if isinstance(hidden, tuple) else hidden
        logits: Tensor = self.layer_stack.head(self, x).logits
        return logits

    # -- first values -------------------------------------------------------------------------------------------------

    def initial(self, name: str) -> Init:
        """Initial distribution of a parameter on the meta device: as transformers initialises it."""
        rule: Init = self.init_rules[name]
        return rule

    fused_parts: Any
    """parameters that are parts of a fused one of transformers' class (unfuse.py)"""
    init_rules: Any
    """of a model that was built on the meta device: each parameter's distribution by name (init_rules.py)"""


def adapt(model: nn.Module) -> Any:
    """Give a causal language model of transformers the loss contract, in place. The model may be on any device."""
    if isinstance(model, ForeignCausalLM):
        return model
    own: Any = type(model)
    with torch.device("meta"):
        twin = derive_class(own(model.config), ForeignCausalLM)  # its layers are found without computing anything
    adapted = derive_class(model, ForeignCausalLM)
    stack = adapted.layer_stack = find_layer_stack(twin)
    prepare_tables(twin)
    adapted.logit_map = try_logit_map(twin, stack)
    adapted.reads_embedding = reads_embedding(twin, stack)
    adapted.keeps_documents = keeps_documents_apart(twin, stack)
    head = adapted.get_submodule(stack.head_name)
    if type(head).forward is nn.Linear.forward:
        derive_class(head, LanguageHead)
    adapted.fused_parts = unfuse(adapted, adapted.layer_stack.fused)
    layers = [adapted.get_submodule(name) for name in adapted.layer_stack.layer_names]
    for module, probabilities in zip((*layers, adapted), adapted.layer_stack.dropouts, strict=True):
        add_sites(module, probabilities)
    for layer in layers:
        derive_class(layer, ForeignLayer)
    for module in list(adapted.modules()):
        if is_experts(module):
            derive_class(module, ForeignExperts).all_experts = module.num_experts
        module.wide_buffers = tuple(name for name, _ in module.named_buffers(recurse=False))
    experts = (module.all_experts for module in adapted.modules() if isinstance(module, ForeignExperts))
    adapted.router_loss = find_router_loss(twin, stack, next(experts, 0))
    if adapted.router_loss is not None:
        keep_router_logits(adapted, adapted.router_loss)
    return adapted


def keep_router_logits(model: Any, loss: RouterLoss) -> None:
    for name in model.layer_stack.layer_names:
        routers = [router.removeprefix(f"{name}.") for router in loss.routers if router.startswith(f"{name}.")]
        if routers:
            layer = model.get_submodule(name)
            layer.router_logits = KeepsRouterLogits(layer, loss, routers)


def adapt_if_foreign(model: nn.Module) -> Any:
    """Adapt a causal language model of transformers; return any other model as it is."""
    transformers = sys.modules.get("transformers")  # a model of it cannot exist before it is imported
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return model
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} has no head of a causal language model; build it with AutoModelForCausalLM"
        )
    return adapt(model)


def derive_class(module: nn.Module, mixin: type[nn.Module]) -> Any:
    """Put a class before the module's own, under the same name: one for all modules of a class, which compile once."""
    own = type(module)
    derived = next((known for known in own.__subclasses__() if known.__bases__ == (mixin, own)), None)
    module.__class__ = derived or type(own.__name__, (mixin, own), {"__module__": own.__module__})
    return module


def build_on_meta(source: HFSource, **options: Any) -> Any:
    """Build transformers' own class of a directory on the meta device: shapes only, no contract, no first values."""
    import transformers

    check_model_type(source)
    config = transformers.AutoConfig.from_pretrained(source.folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    move_to_meta(model)
    return model


def build_causal_lm(
    source: HFSource, device: str = "meta", *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """Build the model of a directory: with its weights, or the first values of `seed`; on "meta" with shapes only.

    On the meta device the engine reads the weights, or draws the values, of each rank's slices.
    """
    with quiet_transformers():
        return _build(source, device, dtype, seed)


def _build(source: HFSource, device: str, dtype: torch.dtype, seed: int) -> Any:
    # float64 has no grouped GEMM.
    model = build_on_meta(source, **({"experts_implementation": "eager"} if dtype == torch.float64 else {}))
    rules = record_init(model)
    materialize_buffers(model)
    adapted = adapt(model).to(dtype)
    parts = adapted.fused_parts
    adapted.init_rules = rules | {name: PartInit(fused=rules[part.name], part=part) for name, part in parts.items()}
    if device != "meta":
        buffers = {name: buffer.clone() for name, buffer in adapted.named_buffers()}
        adapted.to_empty(device=device)
        adapted.tie_weights()
        init_weights(adapted, seed)
        for name, buffer in adapted.named_buffers():
            buffer.copy_(buffers[name])
    return adapted
