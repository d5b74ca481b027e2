"""What a deployment of vLLM asks of Switchyard, and what it cannot have. It imports nothing of vLLM."""

from __future__ import annotations

import logging
import math
from typing import Any

from ._activation import Activation
from ._serving import Options, refuse_too_few_sms
from ._weights import Order
from .errors import Unsupported

log = logging.getLogger("vllm.switchyard")
_WHERE = "--additional-config's \"switchyard\""


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


def activation_of(name: str, limit: float | None, alpha: float, beta: float) -> tuple[Activation, Order]:
    """What vLLM's name of an activation means, and how rows of w13 stand.

    Parameters
    ----------
    name : str
        The value of a MoEActivation.
    limit, alpha, beta
        swiglu_limit, swiglu_alpha and swiglu_beta of the layer's configuration.

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
    plain = name.removesuffix("_no_mul")
    if plain != name and plain in ("silu", "gelu", "gelu_tanh", "relu2"):
        return Activation(plain, gated=False), "gate_up"
    raise Unsupported(
        f"activation {name!r} is none that Switchyard has; it has silu, gelu, gelu_tanh, swigluoai, "
        "swigluoai_uninterleave, and silu, gelu, gelu_tanh and relu2 with _no_mul"
    )


def refuse(options: Options, vllm_config: Any, moe_config: Any) -> None:
    """Raise `Unsupported` for a deployment that Switchyard cannot serve, saying what and why."""
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
    if moe_parallel.use_all2all_kernels and not moe_parallel.use_ag_rs_all2all_kernels:
        raise Unsupported(
            f"--all2all-backend is {moe_parallel.all2all_backend!r}, whose activation formats "
            "Switchyard does not take; use allgather_reducescatter"
        )
    if moe_parallel.all2all_backend == "passthrough":
        raise Unsupported(
            "--all2all-backend is 'passthrough', but the plugin does not exchange tokens itself; use "
            "allgather_reducescatter"
        )
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


def capacity(vllm_config: Any, moe_config: Any) -> int:
    """Most tokens of a call: the scheduler's, of all ranks whose tokens are gathered."""
    tokens = max(moe_config.max_num_tokens, vllm_config.scheduler_config.max_num_batched_tokens)
    return tokens * max(1, moe_config.moe_parallel_config.dp_size)
