"""Every private torch name the project touches, with the versions it was tried on.

Functions import torch themselves, so that a module pays only for what it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor


def clear_sharding_cache() -> None:
    """Clear DTensor's cache of sharding decisions. Tried on 2.13.

    Mesh equality ignores process groups: after a group was destroyed and recreated, the cache returns results that
    refer to the destroyed mesh.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def start_all_gather(gathered: Tensor, shard: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start an all-gather of equal shards. Public, but renamed: `all_gather_single` from 2.13 on."""
    import torch.distributed as dist

    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = call(gathered, shard, group=group, async_op=True)
    return work


def start_reduce_scatter(shard: Tensor, unreduced: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start a reduce-scatter to equal shards. Public, but renamed: `reduce_scatter_single` from 2.13."""
    import torch.distributed as dist

    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = call(shard, unreduced, group=group, async_op=True)
    return work


def dedicated_store() -> Any:
    """The default group's store over a new connection, which a thread may use while another hangs. Tried on 2.13."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return store.clone()


def observed_elastic_agent(observer: Any) -> Any:
    """torch's local elastic agent with callbacks: `observer.on_start()` when it has started the ranks, and
    `observer.on_failure(failures)`, by rank, before it restarts them; that may raise. Tried on 2.13.

    torch's own agent reports a failure only when no restart is left.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class ObservedElasticAgent(LocalElasticAgent):
        _failures: Any = None

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            workers: dict[int, Any] = super()._start_workers(worker_group)
            observer.on_start()
            return workers

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            self._failures = result.failures
            return result

        def _restart_workers(self, worker_group: Any) -> None:
            self._stop_workers(worker_group)
            observer.on_failure(self._failures)
            super()._restart_workers(worker_group)

    return ObservedElasticAgent


def on_backward_end(callback: Callable[[], None]) -> None:
    """Run `callback` when the current backward pass ends. Called from a gradient hook. Tried on 2.11 and 2.13."""
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(callback)


def torch_dispatch_mode() -> type:
    """The class whose `__torch_dispatch__` sees every operator below autograd. Tried on 2.13."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's storage, while that is alive. Tried on 2.11 and 2.13."""
    key: int = tensor.untyped_storage()._cdata
    return key


def map_nested(convert: Callable[[Any], Any], values: Any) -> Any:
    """Convert every value in nested tuples, lists and dictionaries. Tried on 2.11 and 2.13."""
    from torch.utils._pytree import tree_map

    return tree_map(convert, values)


def without_dispatch_modes() -> Any:
    """A context in which no `TorchDispatchMode` sees operators. Tried on 2.11 and 2.13."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def tensor_without_storage(tensor_class: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a class that handles every call itself. Tried on 2.11 and 2.13."""
    import torch

    return torch.Tensor._make_wrapper_subclass(tensor_class, tuple(shape), dtype=dtype, device=device)


def fake_tensor_mode() -> Any:
    """A context in which every tensor has a device and no memory, those that a model makes included. Tried on 2.13."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def scaled_mm(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    """An fp8 matmul with one scale per operand and fp32 accumulation. Tried on 2.11 and 2.13.

    The public `torch.nn.functional.scaled_mm` has no `out`.
    """
    import torch

    out_argument = {} if out is None else {"out": out}
    result: Tensor = torch._scaled_mm(
        left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=False, **out_argument
    )
    return result


def foreach_norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each tensor, accumulated in `dtype`, in a few fused CUDA kernels. Tried on 2.13.

    The public `torch.nn.utils.get_total_norm` returns their total norm.
    """
    import torch

    return list(torch._foreach_norm(list(tensors), order, dtype=dtype))


def has_hooks_or_patched_forward(module: torch.nn.Module) -> bool:
    """Whether a module has hooks or a replaced forward, so that its `forward` must be called. Tried on 2.13."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks) or "forward" in vars(module)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called. Tried on 2.11 and 2.13."""
    return getattr(module, "_compiled_call_impl", None) is not None


def compiler_backend(name: str) -> Callable[..., Any]:
    """A backend of `torch.compile`: from a graph and example inputs to a function. Tried on 2.11 and 2.13."""
    from torch._dynamo import lookup_backend

    backend: Callable[..., Any] = lookup_backend(name)
    return backend


def is_compile_error(error: Exception) -> bool:
    """Whether `torch.compile` raised an error, at a call, and not the code that it compiled. Tried on 2.11 and 2.13."""
    from torch._dynamo import exc

    return isinstance(error, exc.TorchDynamoException | exc.FailOnRecompileLimitHit)


def is_graph_break(error: Exception) -> bool:
    """Whether `torch.compile(fullgraph=True)` met code that it can only leave out. Tried on 2.11 and 2.13."""
    from torch._dynamo import exc

    is_fault = isinstance(error, exc.BackendCompilerFailed | exc.InternalTorchDynamoError)
    return is_compile_error(error) and not is_fault


def compile_error_cause(error: Exception) -> BaseException:
    """What a backend of `torch.compile` raised, of an error that reports it. Tried on 2.11 and 2.13."""
    cause: BaseException = getattr(error, "inner_exception", error)
    return cause


def cudnn_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """cuDNN attention: (out, lse [B, H, T]); k and v may have fewer heads than q. Tried on 2.11; same in 2.13.

    The public function does not return the log-sum-exp.
    """
    import torch

    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, bias, True, 0.0, causal, scale=scale
    )[:2]
    return out, lse.view(q.shape[:3])


def cudnn_attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), each with the strides of its forward input. Tried on 2.11.

    `gradient`, `out` and `lse` must have the strides of all other calls with such q, k and v
    (kernels/attention/sdpa_lse.py).
    """
    import torch

    seed = torch.empty((), dtype=torch.int64, device=q.device)  # dropout is off
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        gradient,
        q,
        k,
        v,
        out,
        lse.unsqueeze(-1),
        seed,
        seed,
        bias,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )
    return result


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """As `cudnn_attention`, by torch's flash attention. Tried on 2.11."""
    import torch

    out, lse = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, scale=scale)[:2]
    return out, lse


def flash_attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    seed = torch.empty((), dtype=torch.int64, device=q.device)
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        gradient, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed, scale=scale
    )
    return result


def top_saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The innermost saved-tensor hooks (pack, unpack), None without any. Tried on 2.13."""
    import torch

    result: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return result


def unflatten_outputs(program: Any, values: list[Any]) -> Any:
    """What the forward of a `torch.export` program returns, of its flat results. Tried on 2.13."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(values, program.call_spec.out_spec)
