"""Expert parallelism in vLLM with Switchyard's own exchange: what stands before and behind a layer's kernel, and who
learns that a rank failed. It imports vLLM: only _vllm imports it.

vLLM 0.33 has a seam for experts that exchange tokens themselves, all2all_backend "passthrough". Older ones take
`Stages`, which do the same.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed import get_ep_group, get_tp_group
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe import modular_kernel

from ._serving import MOST_PROMISED_ROWS, Ranks, check_passes, promised
from ._vllm_setup import shares_rows
from .errors import Unsupported


class Stages(modular_kernel.FusedMoEPrepareAndFinalizeModular):
    """Hands a rank's own tokens to experts that exchange them, and their sums on."""

    @property
    def activation_format(self) -> Any:
        return modular_kernel.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> None:
        return None

    def max_num_tokens_per_rank(self) -> None:
        return None

    def num_dispatchers(self) -> int:
        return 1

    def output_is_reduced(self) -> bool:
        # Sums are over the experts of all ranks: vLLM must not add them up again.
        return True

    def prepare(self, a1: Any, *arguments: Any, **named: Any) -> Any:
        return a1, None, None, None, None

    def finalize(
        self,
        output: Any,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        weight_and_reduce_impl.apply(
            output=output,
            fused_expert_output=fused_expert_output,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )


def pass_tokens_through(moe_config: Any) -> None:
    """Let vLLM exchange nothing for this layer, where it can be told so. The command line cannot say it: vLLM
    refuses the value there for all kernels but some of its own."""
    parallel = moe_config.moe_parallel_config
    if hasattr(type(parallel), "use_passthrough_all2all"):
        parallel.all2all_backend = "passthrough"


def use_stages(method: Any) -> None:
    """Give a method's kernel stages that exchange nothing, unless it has vLLM's."""
    kernel = method.moe_kernel
    if method.moe.moe_parallel_config.all2all_backend != "passthrough":
        method.moe_kernel = modular_kernel.FusedMoEKernel(Stages(), kernel.fused_experts)
    if not method.moe_kernel.output_is_reduced():
        stages = type(method.moe_kernel.prepare_finalize).__name__
        raise Unsupported(
            f"vLLM's {stages} would exchange tokens that Switchyard exchanges; serve without expert_parallel"
        )


class Rows:
    """What a rank's layer computes of the rows that it is given.

    Ranks of tensor parallelism have the same rows: each computes a slice, and all gather the slices.
    """

    def __init__(self, layer: Any, moe_config: Any, options: Any) -> None:
        group = get_ep_group()
        parallel = moe_config.moe_parallel_config
        if (group.rank_in_group, group.world_size) != (parallel.ep_rank, parallel.ep_size):
            raise Unsupported(
                f"this is rank {group.rank_in_group} of {group.world_size} of vLLM's group, but rank "
                f"{parallel.ep_rank} of {parallel.ep_size} of the layer's expert parallelism; serve without "
                "expert_parallel"
            )
        strategy = getattr(layer.expert_map_manager, "placement_strategy", None)
        if strategy != "linear":
            raise Unsupported(
                f"--expert-placement-strategy is {strategy!r}; with expert_parallel 'fused' ranks must have "
                "neighbouring experts, so use 'linear'"
            )
        tensor_parallel = get_tp_group()
        self.ranks = Ranks.of(group.cpu_group, options.deadline)
        self.ranks.refuse_placement(moe_config.num_experts, layer.expert_map_manager.expert_map)
        self.over = shares_rows(moe_config, tensor_parallel.world_size)
        self._gather, self._part = tensor_parallel.all_gather, tensor_parallel.rank_in_group
        self._data_rank, self._data_ranks = parallel.dp_rank, parallel.dp_size

    def run(self, bind: Callable[..., Any], x: Any, ids: Any, weights: Any, out: Any) -> None:
        """One pass.

        Parameters
        ----------
        bind : callable
            bind(tokens=...) is the layer, over its weights, for so many rows.
        x, out : Tensor [T, H]
        ids, weights : Tensor [T, K]
            The router's, of all ranks' experts.
        """
        self.ranks.meet()
        most = self._most(x)
        if self.over == 1:
            bind(tokens=x.shape[0])(x, ids, weights, out=out, max_tokens_per_rank=most)
            return
        # The last slices may be shorter or empty, but all are gathered as one size.
        size = -(-x.shape[0] // self.over)
        own = slice(min(self._part * size, x.shape[0]), min((self._part + 1) * size, x.shape[0]))
        part = torch.empty((size, x.shape[1]), dtype=out.dtype, device=out.device)
        rows = own.stop - own.start
        bind(tokens=rows)(x[own], ids[own], weights[own], out=part[:rows], max_tokens_per_rank=most)
        if size:
            out.copy_(self._gather(part, 0)[: x.shape[0]])

    def _most(self, x: Any) -> int:
        """The most rows of any rank in this pass, as all ranks know it. 0: unknown, or too many for it to matter.

        vLLM's data-parallel ranks agree on a step's numbers of rows. Where they replay graphs, all have the same
        number, that of the capture.
        """
        rows = [x.shape[0]]
        if x.dtype is not torch.bfloat16 or rows[0] > MOST_PROMISED_ROWS:
            return 0
        if self._data_ranks * self.over != self.ranks.world.size:
            return 0
        if self._data_ranks > 1:
            agreed = is_forward_context_available() and get_forward_context().dp_metadata
            if not agreed:
                return 0
            rows = agreed.num_tokens_across_dp_cpu.tolist()
            if len(rows) != self._data_ranks or rows[self._data_rank] != x.shape[0]:
                return 0
        return promised(-(-max(rows) // self.over))


# Where data-parallel ranks agree on a step's form, before its first layer: vLLM's two runners. It waits for all of
# them, for as long as a group of torch.distributed does.
_AGREEMENTS = (
    ("vllm.v1.worker.dp_utils", "_run_ar"),
    ("vllm.v1.worker.gpu.dp_utils", "sync_cudagraph_and_dp_padding"),
)
_serves = False


def watch_steps(ranks: Ranks) -> None:
    """Let vLLM's worker end with an error that names the rank which does not go on.

    Called by a layer, in the worker's process, once vLLM's modules are there.
    """
    module = sys.modules.get("vllm.v1.worker.gpu_worker")  # the worker for CPUs inherits from it
    worker = getattr(module, "Worker", None)
    if worker is not None and not hasattr(worker, "_switchyard_watches"):
        worker._switchyard_watches = True
        for name in ("execute_model", "sample_tokens", "execute_dummy_batch"):
            setattr(worker, name, watched(getattr(worker, name)))
        worker.compile_or_warm_up_model = before_serving(worker.compile_or_warm_up_model)
    for name, function in _AGREEMENTS:
        there = sys.modules.get(name)
        agree = getattr(there, function, None)
        if agree is not None:
            setattr(there, function, ranks.meeting_first(agree, serves=lambda: _serves))


def before_serving(warm_up: Callable[..., Any]) -> Callable[..., Any]:
    """The last step of a worker's start. Ranks compile in it, for minutes, and wait for each other."""

    @functools.wraps(warm_up)
    def starting(*arguments: Any, **named: Any) -> Any:
        global _serves
        result = warm_up(*arguments, **named)
        _serves = True
        return result

    return starting


def watched(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step of a worker that raises what passes failed with: before it returns or, where its tokens are on their
    way from the GPU, when they are there. On GPUs a pass fails after its call, or in the replay of a graph, which
    calls no layer. All layers are asked once a step, because that takes a microsecond for each."""
    # An execute_model() without a result is followed by sample_tokens().
    goes_on = step.__name__ == "execute_model"

    @functools.wraps(step)
    def watching(*arguments: Any, **named: Any) -> Any:
        result = step(*arguments, **named)
        if hasattr(result, "get_output"):
            get_output = result.get_output

            def get_checked() -> Any:
                output = get_output()
                check_passes()
                return output

            result.get_output = get_checked
        elif result is not None or not goes_on:
            check_passes()
        return result

    return watching
