"""Expert parallelism in SGLang with Switchyard's own exchange. It imports SGLang: only _sglang_runner imports it.

SGLang asks everywhere which all-to-all it has: whether tokens stay where data-parallel attention left them, whether a
model adds outputs up over ranks, and whether a rank without tokens calls its layers. Its answers for FlashInfer's
are those that Switchyard needs: tokens stay, outputs are complete, and every rank calls. So the plugin says that this
one is in use, and gives each layer a dispatcher that passes tokens through, where FlashInfer's would be made.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
from sglang.srt.layers.moe import utils as moe_utils
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher

from ._serving import MOST_PROMISED_ROWS, Options, Ranks, check_passes, promised
from ._values import count_text
from .errors import Unsupported

_STANDS_FOR = moe_utils.MoeA2ABackend.FLASHINFER
_SCHEDULER = "sglang.srt.managers.scheduler"
_AGREEMENT, _REQUESTS = (f"{_SCHEDULER}_components.{name}" for name in ("dp_attn", "request_receiver"))


def stand_in(options: Options, expert_ranks: int, tensor_ranks: int) -> None:
    """Have SGLang leave tokens where they are, if `options` ask for that. Before a model is built.

    Raises
    ------
    Unsupported
        If each rank has a part of every expert.
    """
    if options.expert_parallel != "fused" or tensor_ranks == 1:
        return
    if expert_ranks == 1:
        raise Unsupported(
            f"expert_parallel is 'fused', but --ep-size is 1, and each of {count_text(tensor_ranks, 'rank')} has a "
            f"part of every expert; pass --ep-size {tensor_ranks}, or serve with expert_parallel 'local'"
        )
    if moe_utils.get_moe_a2a_backend().is_none():
        runtime_context.get_flags().moe.a2a_backend = _STANDS_FOR


def is_fused() -> bool:
    """Whether `stand_in` did that. The command line has no FlashInfer beside this runner: SGLang refuses it."""
    return bool(moe_utils.get_moe_a2a_backend() == _STANDS_FOR)


def dispatcher(config: Any) -> StandardDispatcher:
    """A dispatcher that hands over a rank's own tokens, with ids of all ranks' experts."""
    passing = StandardDispatcher(config)
    passing.skip_local_expert_mapping = True
    return passing


def ranks_of(options: Options) -> Ranks:
    """The ranks of SGLang's expert parallelism. Collective at the first call."""
    parallel = runtime_context.get_parallel()
    ranks = Ranks.of(parallel.moe_ep_group.cpu_group, options.deadline)
    if (ranks.world.rank, ranks.world.size) != (parallel.moe_ep_rank, parallel.moe_ep_size):
        raise Unsupported(
            f"this is rank {ranks.world.rank} of {ranks.world.size} of SGLang's group, but rank {parallel.moe_ep_rank} "
            f"of {parallel.moe_ep_size} of expert parallelism; serve with expert_parallel 'local'"
        )
    watch_results()
    watch_schedulers(ranks)
    return ranks


def most_rows(x: torch.Tensor, ranks: Ranks | None) -> int:
    """The most rows of any rank in this pass, as all ranks know it. 0: unknown, or too many for it to matter.

    SGLang's ranks agree on a step's numbers of rows. Where they replay graphs, all have the same number, that of the
    capture.
    """
    if ranks is None or x.dtype is not torch.bfloat16 or x.shape[0] > MOST_PROMISED_ROWS:
        return 0
    agreed = get_dp_global_num_tokens()
    if not agreed or len(agreed) != ranks.world.size or agreed[ranks.world.rank] != x.shape[0]:
        return 0
    return promised(int(max(agreed)))


def architecture() -> str | None:
    """The class of the model that this process serves. None outside of a server."""
    try:
        if hasattr(runtime_context, "process_model_config"):
            config = runtime_context.process_model_config()
        else:  # SGLang 0.5.16
            config = runtime_context.get_context().server_args.get_model_config()
        return str(config.hf_config.architectures[0])
    except (AttributeError, ValueError, TypeError, IndexError):
        return None


def of_scheduler(module: str, name: str) -> Any:
    """A class or function that SGLang's schedulers use. None outside of their processes."""
    found = getattr(sys.modules.get(module), name, None)
    if found is None and _SCHEDULER in sys.modules:
        raise Unsupported(
            f"expert_parallel is 'fused', but this SGLang has no {module}.{name}, so nobody would notice ranks that "
            "fail; serve with expert_parallel 'local'"
        )
    return found


def watch_results() -> None:
    """Let SGLang's scheduler raise what a pass failed with before it uses a step's tokens.

    Called in the scheduler's process, once its module is there. On GPUs a pass fails after its call, or in the
    replay of a graph, which calls no layer.
    """
    scheduler = of_scheduler(_SCHEDULER, "Scheduler")
    if scheduler is not None:
        scheduler.process_batch_result = watched(scheduler.process_batch_result)


def watch_schedulers(ranks: Ranks) -> None:
    """Let what schedulers wait in for each other name a rank that has stopped or ended.

    All schedulers hand requests on and agree before each step, also without a request. With gloo the one that hands
    requests on waits for those that receive them.
    """
    info = of_scheduler(_AGREEMENT, "MLPSyncBatchInfo")
    if info is not None:
        info.all_gather = ranks.meeting_first(info.all_gather)
    hand_on = of_scheduler(_REQUESTS, "broadcast_pyobj")
    if hand_on is not None:
        sys.modules[_REQUESTS].broadcast_pyobj = ranks.meeting_first(hand_on)  # type: ignore[attr-defined]


def watched(process: Any) -> Any:
    """A scheduler's process_batch_result() that first waits for the results, and raises what passes failed with."""
    if hasattr(process, "_switchyard_watches"):
        return process

    @functools.wraps(process)
    def watching(scheduler: Any, batch: Any, result: Any) -> Any:
        done = getattr(result, "copy_done", None)
        if done is not None:
            done.synchronize()
        check_passes()
        return process(scheduler, batch, result)

    watching._switchyard_watches = True  # type: ignore[attr-defined]
    return watching
