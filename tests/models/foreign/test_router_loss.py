"""The balance loss of transformers' routers, for each sequence: equal to transformers' for a batch of one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_families import build_family

from echelon.models.foreign.causal_lm import adapt
from echelon.models.foreign.float64_casts import float64_casts

pytest.importorskip("transformers")

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.37}


def build(name: str, **changes: Any) -> Any:
    torch.manual_seed(1)
    return build_family(name, {**BALANCED, **changes}, experts_implementation="eager").double().train()


def tokens(rows: int, length: int = 11) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(2))


def losses(own: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with float64_casts(torch.float64):
        loss: torch.Tensor = own(input_ids=ids, labels=ids, **options).loss
    return loss


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "qwen3_next"])
def test_a_sequence_has_the_loss_of_transformers(name: str) -> None:
    own, ids = build(name), tokens(1)
    expected = losses(own, ids)
    assert float((expected - losses(own, ids, output_router_logits=False)).detach()) > 0.1
    model = adapt(copy.deepcopy(own))
    total, count = model(**model.loss_inputs({"input_ids": ids, "labels": ids}))
    torch.testing.assert_close(total / count, expected, rtol=0, atol=1e-12)
    (total / count).backward()
    expected.backward()
    given = dict(own.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, given[key].grad, rtol=0, atol=1e-12, msg=key)


def test_a_batch_has_the_mean_over_its_sequences() -> None:
    """transformers routes a batch as one group: another number, that changes with the batch."""
    own, ids = build("mixtral"), tokens(3)
    each = torch.stack([losses(own, row[None]) for row in ids]).mean()
    model = adapt(copy.deepcopy(own))
    total, count = model(**model.loss_inputs({"input_ids": ids, "labels": ids}))
    torch.testing.assert_close(total / count, each, rtol=0, atol=1e-12)
    assert float((each - losses(own, ids)).abs().detach()) > 1e-4


def test_in_evaluation_and_where_the_config_does_not_ask_nothing_is_added() -> None:
    own, ids = build("mixtral"), tokens(1)
    plain = losses(own, ids, output_router_logits=False)
    model = adapt(copy.deepcopy(own)).eval()
    total, count = model(**model.loss_inputs({"input_ids": ids}))
    torch.testing.assert_close(total / count, plain, rtol=0, atol=1e-12)
    assert adapt(build("mixtral", output_router_logits=False)).router_loss is None
    assert adapt(build("deepseek_v3")).router_loss is None  # the class has none


OTHER = """
from transformers import MixtralForCausalLM


class Other(MixtralForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if output.aux_loss is not None:
            output.loss = output.loss + output.aux_loss ** 2
        return output
"""


def test_another_loss_is_refused(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "other"}
    exec(OTHER, namespace)
    with pytest.raises(ValueError, match="use output_router_logits=false"):
        adapt(namespace["Other"](build("mixtral").config))
