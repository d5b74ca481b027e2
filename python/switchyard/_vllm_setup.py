"""What a deployment of vLLM asks of Switchyard, and what it cannot have. It imports nothing of vLLM."""

from __future__ import annotations

import logging
import math
from typing import Any

from ._activation import Activation
from ._serving import Options, refuse_too_few_sms
from ._values import count_text
from ._weights import Order
from .errors import Unsupported

log = logging.getLogger("vllm.switchyard")
_WHERE = "--additional-config's \"switchyard\""
_FUSED = "expert_parallel is 'fused'"


def options_of(config: Any) -> Options | None:
    """The options of a VllmConfig; None: Switchyard was not asked for.

    Raises
    ------
    InvalidArgument
        Naming the key.
    """
    additional = getattr(config, "additional_config", None)
    if not isinstance(additional, dict) or "switchyard" not in additional:
        return None
    return Options.parse(additional["switchyard"], _WHERE)


def activation_of(
    name: str, limit: float | None, alpha: float, beta: float, situ: tuple[float | None, float | None] = (None, None)
) -> tuple[Activation, Order]:
    """What vLLM's name of an activation means, and how rows of w13 stand.

    Parameters
    ----------
    name : str
        The value of a MoEActivation.
    limit, alpha, beta
        swiglu_limit, swiglu_alpha and swiglu_beta of the layer's configuration.
    situ
        activation_situ_beta and activation_situ_linear_beta.

    Raises
    ------
    Unsupported
        For one that Switchyard does not have.
    """
    bound = math.inf if limit is None else limit
    if name == "silu":
        return Activation("silu", limit=bound), "gate_up"
    if name in ("gelu", "gelu_tanh"):
        return Activation(name), "gate_up"
    if name == "swigluoai":
        # vLLM's kernel has GPT-OSS's constants built in.
        return Activation("silu", alpha=1.702, limit=7.0, up_bias=1.0), "interleaved"
    if name == "swigluoai_uninterleave":
        return Activation("silu", alpha=alpha, limit=bound, up_bias=beta), "gate_up"
    bends, bends_up = situ
    if name == "situ" and bends is not None and limit is None:
        # A bound of up that is not above 0 is none in vLLM.
        bound = math.inf if bends_up is None or bends_up <= 0 else bends_up
        return Activation("situ", alpha=bends, limit=bound), "gate_up"
    plain = name.removesuffix("_no_mul")
    if plain != name and plain in ("silu", "gelu", "gelu_tanh", "relu2"):
        return Activation(plain, gated=False), "gate_up"
    raise Unsupported(
        f"activation {name!r} is none that Switchyard has; it has silu, gelu, gelu_tanh, swigluoai, "
        "swigluoai_uninterleave, situ with activation_situ_beta, and silu, gelu, gelu_tanh and relu2 with _no_mul"
    )


def is_fused(options: Options, moe_config: Any) -> bool:
    """Whether Switchyard's layers exchange tokens themselves in this deployment."""
    return bool(options.expert_parallel == "fused" and moe_config.moe_parallel_config.ep_size > 1)


def shares_rows(moe_config: Any, tensor_parallel: int) -> int:
    """How many ranks are given the same rows: those of tensor parallelism, unless a model splits its tokens."""
    return 1 if moe_config.moe_parallel_config.sp_size > 1 else tensor_parallel


def refuse_fused(options: Options, vllm_config: Any, moe_config: Any) -> None:
    """Raise `Unsupported` for a deployment in which Switchyard cannot exchange tokens itself, saying why."""
    parallel, moe_parallel = vllm_config.parallel_config, moe_config.moe_parallel_config
    ranks = max(moe_parallel.dp_size, moe_parallel.tp_size, getattr(parallel, "tensor_parallel_size", 1))
    if not moe_parallel.use_ep and ranks > 1:
        raise Unsupported(
            f"{_FUSED}, but each of {count_text(ranks, 'rank')} has a part of every expert; serve with "
            "--enable-expert-parallel, or leave expert_parallel out"
        )
    if not is_fused(options, moe_config):
        return
    if getattr(moe_config, "skip_final_all_reduce", False):
        raise Unsupported(
            f"{_FUSED}, but the model adds the ranks' outputs up later (skip_final_all_reduce), which are whole "
            "sums already; leave expert_parallel out for this model"
        )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise Unsupported(
            f"{_FUSED}, and weights are transferred into the running server: ranks get them at different times, and "
            "a pass would mix old and new experts. Leave expert_parallel or weight_transfer_config out"
        )
    for name, what in (
        ("pipeline_parallel_size", "pipeline"), ("prefill_context_parallel_size", "prefill context"),
    ):
        if getattr(parallel, name, 1) > 1:
            raise Unsupported(
                f"{_FUSED} with {what} parallelism over {count_text(getattr(parallel, name), 'rank')}, which was never "
                "tried; leave one of them out"
            )


def refuse_all2all(options: Options, moe_config: Any) -> None:
    """Raise `Unsupported` for an exchange of tokens that Switchyard can neither use nor replace, saying why."""
    moe_parallel = moe_config.moe_parallel_config
    if is_fused(options, moe_config) and moe_parallel.all2all_backend != "allgather_reducescatter":
        raise Unsupported(
            f"{_FUSED}, and --all2all-backend is {moe_parallel.all2all_backend!r}: Switchyard exchanges the tokens, so "
            "leave --all2all-backend out"
        )
    if moe_parallel.use_all2all_kernels and not moe_parallel.use_ag_rs_all2all_kernels:
        raise Unsupported(
            f"--all2all-backend is {moe_parallel.all2all_backend!r}, whose activation formats "
            "Switchyard does not take; use allgather_reducescatter"
        )
    if moe_parallel.all2all_backend == "passthrough":
        raise Unsupported(
            "--all2all-backend is 'passthrough', but the plugin does not exchange tokens itself unless "
            'expert_parallel is "fused"; use allgather_reducescatter in both cases'
        )


def refuse(options: Options, vllm_config: Any, moe_config: Any, exchanges: bool = False) -> None:
    """Raise `Unsupported` for a deployment that Switchyard cannot serve, saying what and why.

    exchanges: Switchyard exchanges tokens already. vLLM's all2all backend is then what the plugin has set.
    """
    if options.expert_parallel == "fused":
        refuse_fused(options, vllm_config, moe_config)
    parallel = vllm_config.parallel_config
    moe_parallel = moe_config.moe_parallel_config
    if moe_config.moe_backend != "auto":
        raise Unsupported(
            f"--moe-backend is {moe_config.moe_backend!r}, and --additional-config asks for Switchyard: choose "
            "one of them"
        )
    if getattr(parallel, "use_ubatching", False):
        raise Unsupported(
            "two-batch overlap is on (--enable-dbo or --ubatch-size): two passes of one layer would be "
            "on their way at once, in one workspace. Turn it off"
        )
    if moe_config.is_lora_enabled:
        raise Unsupported(
            "LoRA is enabled: adapters of experts are added between the two products, which are one "
            "kernel in Switchyard. Serve without --enable-lora, or merge the adapter"
        )
    if getattr(parallel, "enable_elastic_ep", False):
        raise Unsupported("elastic expert parallelism changes how many experts a rank has; turn it off")
    if not exchanges:
        refuse_all2all(options, moe_config)
    if vllm_config.device_config.device_type == "cuda":
        refuse_too_few_sms(
            options.reserved_sms,
            max(
                moe_parallel.dp_size,
                moe_parallel.ep_size,
                moe_parallel.tp_size,
                getattr(parallel, "tensor_parallel_size", 1),
            ),
            "reserved_sms",
        )
    elif vllm_config.device_config.device_type != "cpu":
        raise Unsupported(
            f"the device is {vllm_config.device_config.device_type!r}; Switchyard has engines for "
            "cuda and cpu"
        )


def capacity(vllm_config: Any, moe_config: Any, fused_over: int = 0) -> int:
    """Most tokens of a call.

    Parameters
    ----------
    vllm_config, moe_config
    fused_over : int
        0: vLLM gathers the tokens of all ranks. Otherwise a rank calls with its own tokens, of which so
        many ranks are given the same ones and take a part each.
    """
    tokens = max(moe_config.max_num_tokens, vllm_config.scheduler_config.max_num_batched_tokens)
    if fused_over:
        return int(-(-tokens // fused_over))
    return int(tokens * max(1, moe_config.moe_parallel_config.dp_size))
