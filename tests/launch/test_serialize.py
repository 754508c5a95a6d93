from __future__ import annotations

import pytest
import torch

from echelon.launch.serialize import deserialize, serialize


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # by torch 2.11
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.randn(2, 3).bfloat16(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.zeros(3).expand(4, 3),
        torch.randn(4, 6)[1:3, ::2],
        torch.randn(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.eye(2).to_sparse(),
    ],
    ids=["scalar", "bfloat16", "conjugate", "empty", "bool", "expanded", "strided", "grad", "parameter", "sparse"],
)
def test_a_tensor_round_trips(tensor: torch.Tensor) -> None:
    back = deserialize(serialize({"key": [tensor]}))["key"][0]
    assert type(back) is type(tensor)
    assert (back.dtype, back.shape, back.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
    assert torch.equal(back.to_dense(), tensor.to_dense())


def test_a_view_is_serialized_without_its_storage() -> None:
    assert len(serialize(torch.zeros(1_000_000)[:2])) < 1_000


def test_autograd_history_is_not_serialized() -> None:
    assert not deserialize(serialize(torch.ones(2, requires_grad=True) * 2)).requires_grad


def test_a_tied_parameter_stays_tied() -> None:
    module = torch.nn.Linear(2, 2)
    module.tied = module.weight
    back = deserialize(serialize(module))
    assert back.tied is back.weight
    assert back.weight.requires_grad
