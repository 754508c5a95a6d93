"""Every private torch name the project touches, with the versions it was tried on.

Nothing here is imported at the top: a room that needs one of these pays for that one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor


def clear_sharding_cache() -> None:
    """Forget DTensor's cached sharding decisions. Tried on 2.13.

    Mesh equality ignores process groups, so after a group is destroyed and made anew the cache returns results that
    carry the destroyed mesh.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def start_all_gather(gathered: Tensor, shard: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """An all-gather of equal parts, under way. Public, but renamed: `all_gather_single` from 2.13 on."""
    import torch.distributed as dist

    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = call(gathered, shard, group=group, async_op=True)
    return work


def start_reduce_scatter(shard: Tensor, unreduced: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """A reduce-scatter of equal parts, under way. Public, but renamed: `reduce_scatter_single` from 2.13."""
    import torch.distributed as dist

    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = call(shard, unreduced, group=group, async_op=True)
    return work


def dedicated_store() -> Any:
    """The default group's store, over a connection of its own: a thread may use it while another hangs. Tried on 2.13.

    The function that gives the store is private.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return store.clone()


def observed_elastic_agent(told: Any) -> Any:
    """torch's agent of one machine's ranks, which says what it does: `told.started()` when it has started them, and
    `told.failed(failures)`, by rank, before it restarts them; that may raise. Tried on 2.13.

    What it does is in private methods, and it tells of a failure only when no restart is left.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Told(LocalElasticAgent):
        _failures: Any = None

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            found: dict[int, Any] = super()._start_workers(worker_group)
            told.started()
            return found

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            self._failures = result.failures
            return result

        def _restart_workers(self, worker_group: Any) -> None:
            self._stop_workers(worker_group)
            told.failed(self._failures)
            super()._restart_workers(worker_group)

    return Told


def on_backward_end(callback: Callable[[], None]) -> None:
    """Runs `callback` when the backward pass under way ends. Called from a gradient hook. Tried on 2.11 and 2.13."""
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(callback)


def torch_dispatch_mode() -> type:
    """The class whose `__torch_dispatch__` sees every operator below autograd. Tried on 2.13."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def scaled_mm(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    """left times right of 8-bit factors, each times its scale, summed in 32 bits. Tried on 2.11 and 2.13.

    The public `torch.nn.functional.scaled_mm` cannot write into a place that it is given.
    """
    import torch

    more = {} if out is None else {"out": out}
    result: Tensor = torch._scaled_mm(
        left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=False, **more
    )
    return result


def foreach_norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each tensor, summed in `dtype`: on a GPU a few kernels for all of them. Tried on 2.13.

    The public `torch.nn.utils.get_total_norm` gives their norm together.
    """
    import torch

    return list(torch._foreach_norm(list(tensors), order, dtype=dtype))


def has_hooks_or_patched_forward(module: torch.nn.Module) -> bool:
    """Somebody would notice if the module's forward were not called: hooks, or a forward of its own. Tried on 2.13."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds) or "forward" in vars(module)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse [B, H, T]) by cuDNN. k and v may have fewer heads than q. Tried on 2.11; 2.13 declares it alike.

    The public function keeps lse to itself.
    """
    import torch

    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, k, v, bias, True, 0.0, causal)[:2]
    return out, lse.view(q.shape[:3])


def cudnn_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), each in the order in memory of what it is the gradient of. Tried on 2.11.

    `gradient`, `out` and `lse` must be laid out as in all other calls with such q, k and v (kernels/attention/sdpa_lse.py).
    """
    import torch

    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of a dropout that there is not
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        gradient, q, k, v, out, lse.unsqueeze(-1), seed, seed, bias, None, None, q.shape[2], k.shape[2], 0.0, causal
    )
    return found


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """As `cudnn_attention`, by the flash attention that torch carries. Tried on 2.11."""
    import torch

    out, lse = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal)[:2]
    return out, lse


def flash_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    seed = torch.empty((), dtype=torch.int64, device=q.device)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        gradient, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed
    )
    return found


def top_saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The (pack, unpack) that a tensor saved now would meet; none where there are none. Tried on 2.13."""
    import torch

    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found
