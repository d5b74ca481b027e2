"""What a deployment of SGLang asks of Switchyard, and what it cannot have. It imports nothing of SGLang."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

from ._activation import Activation
from ._serving import Options, refuse_too_few_sms
from ._values import count_text
from ._weights import Order
from .errors import InvalidArgument, Unsupported

log = logging.getLogger("sglang.switchyard")
# SGLang hands no options of a user's on to a backend.
_VARIABLE = "SWITCHYARD_SGLANG_OPTIONS"
# SGLang admits no more requests to a rank's batch, unless --max-running-requests says otherwise.
_MOST_REQUESTS = 4096


def options_of(environment: Mapping[str, str] = os.environ) -> Options:
    """The options in SWITCHYARD_SGLANG_OPTIONS, an object of JSON.

    Raises
    ------
    InvalidArgument
        Naming the key.
    """
    text = environment.get(_VARIABLE) or "{}"
    try:
        given = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"{_VARIABLE} is {text!r}, which is no JSON: {error}") from error
    return Options.parse(given, _VARIABLE)


def activation_of(config: Any) -> tuple[Activation, Order]:
    """What a MoeRunnerConfig says of the activation, and how rows of w13 stand.

    As SGLang's Triton runner reads it: up has a bias of 1 where gemm1_alpha is given.

    Raises
    ------
    Unsupported
        For one that Switchyard does not have.
    """
    name, alpha = config.activation, config.gemm1_alpha
    limits = [limit for limit in (config.gemm1_clamp_limit, config.swiglu_limit) if limit is not None]
    limit = limits[0] if limits else math.inf
    if name == "silu" and config.is_gated and alpha is not None:
        beta = getattr(config, "gemm1_beta", None)  # absent from older releases
        if beta not in (None, 1.0):
            raise Unsupported(f"gemm1_beta is {beta}; SGLang's runners add 1 to up")
        order: Order = "interleaved" if config.gate_up_interleaved else "gate_up"
        return Activation("silu", alpha=alpha, limit=limit, up_bias=1.0), order
    if name == "silu" and config.is_gated:
        return Activation("silu", limit=limit), "gate_up"
    if name == "situ" and config.is_gated and alpha is not None and config.swiglu_limit is None:
        return Activation("situ", alpha=alpha, limit=limit), "gate_up"
    if alpha is None and not limits:
        if name in ("gelu", "gelu_tanh") and config.is_gated:
            return Activation(name), "gate_up"
        if name in ("silu", "gelu", "relu2") and not config.is_gated:
            return Activation(name, gated=False), "gate_up"
    raise Unsupported(
        f"activation {name!r} {'with' if config.is_gated else 'without'} a gate, gemm1_alpha {alpha} and "
        f"limits {limits} is none that Switchyard has; it has silu, situ, gelu and gelu_tanh with a gate, and "
        "silu, gelu and relu2 without"
    )


@dataclasses.dataclass(frozen=True)
class Deployment:
    """What a server is set up for, as far as it matters here."""

    device: str = "cuda"
    ranks: int = 1
    a2a_backend: str = "none"
    two_batch_overlap: bool = False
    multiplexes: bool = False
    single_batch_overlap: bool = False
    lora: bool = False
    no_combine: bool = False
    fused: Fused | None = None


@dataclasses.dataclass(frozen=True)
class Fused:
    """What it is set up for where Switchyard exchanges tokens itself.

    Attributes
    ----------
    expert_ranks, tensor_ranks, attention_ranks : int
        Ranks of expert parallelism, of tensor parallelism, and those with a batch of their own.
    architecture : str, optional
        The model's class. None: outside of a server.
    speculative, moves_experts, shared_experts : bool
        Speculative decoding; EPLB, or experts elsewhere than in shards; shared experts among the routed ones.
    """

    expert_ranks: int
    tensor_ranks: int
    attention_ranks: int
    architecture: str | None = None
    speculative: bool = False
    moves_experts: bool = False
    shared_experts: bool = False


# Models whose blocks do not add complete outputs up over ranks, which would be those of different tokens: whether a
# block multiplies them by routed_scaling_factor itself, which it does not where SGLang gathers tokens.
FUSED_MODELS = {
    "DeepseekV2ForCausalLM": True, "DeepseekV3ForCausalLM": True, "DeepseekV32ForCausalLM": True,
    "Glm4MoeForCausalLM": True, "GlmMoeDsaForCausalLM": True,
    "Qwen2MoeForCausalLM": False, "Qwen3MoeForCausalLM": False,
}


def refuse_fused(fused: Fused) -> None:
    """Raise `Unsupported` for a deployment in which Switchyard cannot exchange tokens itself."""
    local = "or serve with expert_parallel 'local'"
    ranks = {fused.expert_ranks, fused.tensor_ranks, fused.attention_ranks}
    if len(ranks) != 1:
        raise Unsupported(
            f"expert_parallel is 'fused' with {count_text(fused.tensor_ranks, 'rank')} of tensor parallelism, "
            f"{fused.attention_ranks} of data-parallel attention and {fused.expert_ranks} of expert parallelism, but "
            "each rank must have a batch of its own: pass the same number as --tp-size, --ep-size and --dp-size, with "
            f"--enable-dp-attention (--attn-dp-size in newer releases), {local}"
        )
    if fused.architecture not in (None, *FUSED_MODELS):
        raise Unsupported(
            f"expert_parallel is 'fused', and the model is a {fused.architecture}: Switchyard does not know whether "
            f"it adds outputs of different tokens up over ranks. It knows {', '.join(FUSED_MODELS)}; serve with "
            "expert_parallel 'local'"
        )
    for wrong, what in (
        (fused.speculative, "speculative decoding, whose draft has layers and steps of its own: turn it off"),
        (fused.moves_experts, "experts that are not in shards (EPLB, redundant or other initial places): turn it off"),
        (fused.shared_experts, "shared experts among the routed ones: pass --disable-shared-experts-fusion"),
    ):
        if wrong:
            raise Unsupported(f"expert_parallel is 'fused' with {what}, {local}")


def refuse(options: Options, deployment: Deployment) -> None:
    """Raise `Unsupported` for a deployment that Switchyard cannot serve, saying what and why."""
    if deployment.two_batch_overlap:
        raise Unsupported(
            "--enable-two-batch-overlap is on: two passes of one layer would be on their way at once, "
            "in one workspace. Turn it off"
        )
    if deployment.multiplexes:
        raise Unsupported(
            "--enable-pdmux is on: a prefill and a decode would be on their way at once, in one workspace "
            "and on parts of the GPU. Turn it off"
        )
    if deployment.single_batch_overlap:
        raise Unsupported(
            "--enable-single-batch-overlap is on: it starts other work between the experts' two "
            "products, which are one kernel in Switchyard. Turn it off"
        )
    if deployment.lora:
        raise Unsupported(
            "LoRA is enabled: adapters of experts are added between the two products, which are one "
            "kernel in Switchyard. Serve without --enable-lora and --lora-paths, or merge the adapter"
        )
    if deployment.a2a_backend != "none":
        raise Unsupported(
            f"--moe-a2a-backend is {deployment.a2a_backend!r}, whose activation formats Switchyard does "
            "not take; use none"
        )
    if deployment.no_combine:
        raise Unsupported("the layer wants its top-k outputs one by one; Switchyard adds them up")
    if deployment.fused is not None:
        refuse_fused(deployment.fused)
    if deployment.device == "cuda":
        refuse_too_few_sms(options.reserved_sms, deployment.ranks, "reserved_sms")


def capacity(chunked_prefill_size: int | None, max_prefill_tokens: int | None, ranks: int) -> int:
    """Tokens that a layer makes room for at first; a call with more makes it grow."""
    chunk = chunked_prefill_size if chunked_prefill_size and chunked_prefill_size > 0 else None
    return (chunk or max_prefill_tokens or 8192) * max(1, ranks)


def capacity_of_rank(chunked_prefill_size: int | None, max_prefill_tokens: int | None) -> int:
    """Most tokens of a rank's call where Switchyard exchanges them; more are an error. A chunk of prefill, or a batch
    of decoding."""
    return max(capacity(chunked_prefill_size, max_prefill_tokens, 1), _MOST_REQUESTS)
