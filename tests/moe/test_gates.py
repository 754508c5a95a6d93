"""What every gate promises: shapes, types, groups on their own, no question to the device, what leaks is said to."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from echelon import rng
from echelon.moe import GATES, build_gate, gate_class
from echelon.moe.gates.gate import Gate
from tests.moe.reference import accounted, dense, gate, tokens

K = {"switch": 1, "hierarchical": 4}
SMALL = {"deepseek-v2": {"num_groups": 4}, "deepseek-v3": {"num_groups": 4}}
EVERY = list(GATES)
DRAWING = ["noisy-top-k", "hierarchical", "gshard", "switch"]


def any_gate(name: str, *, seed: int = 0, groups: int = 2, **options: Any) -> Gate:
    return gate(name, 4, 8, K.get(name, 2), seed=seed, groups=groups, **{**SMALL.get(name, {}), **options})


@pytest.mark.parametrize("name", EVERY)
def test_shapes_and_types(name: str) -> None:
    made = any_gate(name)
    scores = made.scores(tokens(2, 16, 4, 0))
    routing = made.route(scores)
    size = 2 * 16 * (K.get(name, 2))
    assert scores.shape == (2, 16, made.num_scores)
    assert routing.tokens.shape == routing.experts.shape == routing.weights.shape == (size,)
    assert {routing.tokens.dtype, routing.experts.dtype, routing.load.dtype, routing.dropped.dtype} == {torch.int64}
    assert (routing.loss.shape, routing.load.shape, routing.dropped.shape) == ((2,), (8,), ())
    assert scores.dtype == routing.weights.dtype == routing.loss.dtype == torch.float64
    assert not routing.load.requires_grad
    assert routing.num_tokens == 32
    assert routing.num_experts == made.num_experts == 8
    accounted(routing)


@pytest.mark.parametrize("name", EVERY)
def test_groups_do_not_see_each_other(name: str) -> None:
    """Each sequence alone is routed as in a batch: what makes any split of a batch compute the same."""
    made, x = any_gate(name, groups=3), tokens(3, 16, 4, 1)
    together = made(x)
    weights = dense(together, 3)
    load, dropped = torch.zeros(8, dtype=torch.int64), 0
    for g in range(3):
        for module in made.modules():
            if isinstance(module, rng.RandomDraws):
                assert module.stream is not None
                module.stream.samples = torch.tensor([10 + g])
        alone = made(x[g : g + 1])
        assert torch.equal(dense(alone, 1)[0], weights[g])
        assert torch.allclose(alone.loss, together.loss[g : g + 1], rtol=1e-12, atol=0)
        load, dropped = load + alone.load, dropped + int(alone.dropped)
    assert torch.equal(load, together.load)
    assert dropped == int(together.dropped)


@pytest.mark.parametrize("name", ["gshard", "switch", "expert-choice", "expert-choice-capped"])
def test_local_groups_are_groups(name: str) -> None:
    made, x = any_gate(name, local_groups=4), tokens(2, 32, 4, 2)
    scores = made.scores(x)
    routing = made.route(scores)
    made.local_groups = 1
    apart = made.route(scores.view(8, 8, -1))
    assert torch.equal(dense(routing, 2), dense(apart, 2))
    assert torch.allclose(routing.loss, apart.loss.view(2, 4).mean(1))
    made.local_groups = 5
    with pytest.raises(ValueError, match=r"local groups do not divide a group's tokens \(tokens=32, local_groups=5\)"):
        made.route(scores)


# --- the future -------------------------------------------------------------------------------------------------------


def leaks(made: Gate, seeds: int = 12) -> bool:
    """Whether a later token was seen to change an earlier one's experts or weights."""
    made.requires_grad_(False)
    for seed in range(seeds):
        x = tokens(2, 16, 4, seed)
        other = x.clone()
        at = 4 + seed % 12
        other[:, at:] = tokens(2, 16 - at, 4, 1000 + seed)
        if not torch.equal(dense(made(x), 2)[:, :at], dense(made(other), 2)[:, :at]):
            return True
    return False


@pytest.mark.parametrize("name", EVERY)
def test_what_leaks_says_so(name: str) -> None:
    made = any_gate(name)
    assert leaks(made) == made.leaks_future == gate_class(name).leaks_future


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gshard", {"order": "tokens", "capacity_factor": 0.5}),
        ("gshard", {"capacity_factor": None}),
        ("switch", {"capacity_factor": 0.5}),
        ("mixtral", {"capacity_factor": 0.5}),
        ("qwen", {"capacity_factor": 0.5}),
    ],
)
def test_places_in_the_order_of_tokens_do_not_leak(name: str, options: dict[str, object]) -> None:
    made = any_gate(name, **options)
    assert options["capacity_factor"] is None or int(made(tokens(2, 16, 4, 0)).dropped) > 0
    assert not made.leaks_future
    assert not leaks(made)


@pytest.mark.parametrize("name", EVERY)
def test_causal_training_is_warned(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = build_gate(name, 4, 8, K.get(name, 2), causal=True)
    assert bool(caught) == made.leaks_future
    assert all("leaks future tokens" in str(w.message) for w in caught)


# --- the device -------------------------------------------------------------------------------------------------------


class Asks(TorchDispatchMode):
    """Counts operations whose result a GPU's host has to wait for, or whose size depends on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "equal", "is_nonzero", "item")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype == torch.bool] if name == "index" else []
        if name in self.WAITS or masks:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", EVERY)
def test_routing_asks_the_device_nothing(name: str) -> None:
    made, x = any_gate(name), tokens(2, 16, 4, 3)
    with Asks() as asks:
        routing = made(x)
        kept = routing.select_tokens(torch.arange(3, 20))
        torch.autograd.grad(kept.weights.sum() + routing.loss.sum(), made.weight)
        update = getattr(made, "update", None)
        if update is not None:
            update(routing.load)
    assert asks.found == []


def test_a_question_would_be_seen() -> None:
    with Asks() as asks:
        x = torch.arange(4)
        x[x > 1]
        x.sum().item()
        x.nonzero()
    assert {"index", "_local_scalar_dense", "nonzero"} <= set(asks.found)


@pytest.mark.parametrize("name", EVERY)
def test_shapes_follow_from_shapes(name: str) -> None:
    """On the meta device there are no values to ask for."""
    options = SMALL.get(name, {})
    with torch.device("meta"):
        made = build_gate(name, 4, 8, K.get(name, 2), **options)
        routing = made(torch.empty(2, 16, 4))
        kept = routing.select_tokens(torch.empty(5, dtype=torch.int64))
    assert routing.experts.shape == (2 * 16 * K.get(name, 2),)
    assert kept.experts.shape == ((5 * K.get(name, 2),) if routing.choices_per_token else routing.experts.shape)
    (routing.weights.sum() + routing.loss.sum()).backward()


@pytest.mark.parametrize("name", EVERY)
def test_routers_compute_in_32_bits(name: str) -> None:
    made = build_gate(name, 16, 8, K.get(name, 2), **SMALL.get(name, {})).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    x = torch.randn(2, 16, 16).bfloat16()
    scores = made.scores(x)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, made.scores(x.float()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = made(x)
    assert inside.weights.dtype == torch.float32
    assert torch.equal(inside.weights, made(x).weights)


# --- randomness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWING)
def test_numbers_are_functions_of_their_place(name: str) -> None:
    made, x = any_gate(name, groups=4), tokens(4, 16, 4, 0)
    (draws,) = (module for module in made.modules() if isinstance(module, rng.RandomDraws))
    assert draws.stream is not None
    drawn: list[torch.Tensor] = []
    draws.register_forward_hook(lambda _module, _given, numbers: drawn.append(numbers))
    whole = made.scores(x)
    assert torch.equal(made.scores(x), whole)
    draws.rows = slice(1, 3)
    draws.window[1] = (torch.tensor([3, 15, 0]), 16)
    some = made.scores(x[1:3][:, [3, 15, 0]])
    every, _, few = (drawn[at : at + len(drawn) // 3] for at in range(0, len(drawn), len(drawn) // 3))
    assert all(torch.equal(few[at], numbers[1:3][:, [3, 15, 0]]) for at, numbers in enumerate(every))
    # What they are added to: not every processor multiplies a row alike among few others and among many.
    torch.testing.assert_close(some, whole[1:3][:, [3, 15, 0]], rtol=1e-12, atol=1e-12)
    draws.rows, draws.window = slice(None), {}
    draws.stream.samples = torch.arange(4)
    assert not torch.equal(made.scores(x), whole)
    assert not torch.equal(made.eval().scores(x), whole)


@pytest.mark.parametrize("name", sorted(set(EVERY) - set(DRAWING)))
def test_others_draw_nothing(name: str) -> None:
    assert not [module for module in any_gate(name).modules() if isinstance(module, rng.RandomSite)]


# --- names and options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_first_values_and_their_rule(name: str) -> None:
    made = build_gate(name, 4, 8, K.get(name, 2))
    for key, tensor in made.state_dict().items():
        kind = made.initial(key).distribution
        assert bool(tensor.any()) == (kind != "zeros"), key
    a, b = (build_gate(name, 4, 8, K.get(name, 2)).weight for _ in range(2))
    assert torch.equal(a, b) == (made.initial("weight").distribution == "zeros")


def test_names_and_options_are_checked() -> None:
    assert len(GATES) == len(EVERY) == 11
    with pytest.raises(ValueError, match=r'gate=swich is an unknown gate; legal: .*; did you mean "switch"\?'):
        build_gate("swich", 4, 8, 1)
    with pytest.raises(ValueError, match=r'ballance=1 is not an option.*legal: .*balance.*did you mean "balance"') as e:
        build_gate("switch", 4, 8, 1, ballance=1, other=2)
    assert "other=2 is not an option of the gate switch" in str(e.value)
    with pytest.raises(ValueError, match=r"gate Mixtral: width is less than 1 \(width=0\).*also k is not in 1 .. 8"):
        build_gate("mixtral", 0, 8, 9)
    with pytest.raises(ValueError, match=r"num_experts is less than 1"):
        build_gate("switch", 4, 0, 1)
