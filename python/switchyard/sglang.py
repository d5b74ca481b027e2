"""SGLang's experts, run by Switchyard: a plugin that SGLang finds by its entry point.

``python -m sglang.launch_server --moe-runner-backend switchyard`` selects it. Nothing of SGLang is
imported before SGLang calls `register`. See docs/frameworks/sglang.md.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

from ._activation import Activation
from ._experts import Order
from ._serving import NO_EPLB, Binding, Options, refresh_all, refuse_too_few_sms
from .errors import InvalidArgument, Unsupported

_log = logging.getLogger("sglang.switchyard")
_NAME = "switchyard"
# SGLang hands no options of a user's on to a backend.
_VARIABLE = "SWITCHYARD_SGLANG_OPTIONS"
_RUN = "self dispatch_output quant_info runner_config hooks".split()
_METHODS = {
    "sglang.srt.layers.quantization.unquant": "UnquantizedFusedMoEMethod",
    "sglang.srt.layers.quantization.fp8": "Fp8MoEMethod",
}
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_UPDATES = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


# ------------------------------------------------------------------------ what needs no SGLang


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
        if config.gemm1_beta not in (None, 1.0):
            raise Unsupported(f"gemm1_beta is {config.gemm1_beta}; SGLang's runners add 1 to up")
        order: Order = "interleaved" if config.gate_up_interleaved else "gate_up"
        return Activation("silu", alpha=alpha, limit=limit, up_bias=1.0), order
    if name == "silu" and config.is_gated:
        return Activation("silu", limit=limit), "gate_up"
    if alpha is None and not limits:
        if name in ("gelu", "gelu_tanh") and config.is_gated:
            return Activation(name), "gate_up"
        if name in ("silu", "gelu", "relu2") and not config.is_gated:
            return Activation(name, gated=False), "gate_up"
    raise Unsupported(
        f"activation {name!r} {'with' if config.is_gated else 'without'} a gate, gemm1_alpha {alpha} and "
        f"limits {limits} is none that Switchyard has; it has silu, gelu and gelu_tanh with a gate, and "
        "silu, gelu and relu2 without"
    )


@dataclasses.dataclass(frozen=True)
class Deployment:
    """What a server is set up for, as far as it matters here."""

    device: str = "cuda"
    ranks: int = 1
    a2a_backend: str = "none"
    two_batch_overlap: bool = False
    single_batch_overlap: bool = False
    lora: bool = False
    no_combine: bool = False


def refuse(options: Options, deployment: Deployment) -> None:
    """Raise `Unsupported` for a deployment that Switchyard cannot serve, saying what and why."""
    if deployment.two_batch_overlap:
        raise Unsupported(
            "--enable-two-batch-overlap is on: two passes of one layer would be on their way at once, "
            "in one workspace. Turn it off"
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
    if deployment.device == "cuda":
        refuse_too_few_sms(options.reserved_sms, deployment.ranks, "reserved_sms")


def capacity(chunked_prefill_size: int | None, max_prefill_tokens: int | None, ranks: int) -> int:
    """Tokens that a layer makes room for at first; a call with more makes it grow."""
    chunk = chunked_prefill_size if chunked_prefill_size and chunked_prefill_size > 0 else None
    return (chunk or max_prefill_tokens or 8192) * max(1, ranks)


# ------------------------------------------------------------------------ what is built on SGLang


def _published(bag: Any, name: str, default: Any) -> Any:
    """A setting of SGLang's, which has none outside of a server."""
    try:
        return getattr(bag(), name)
    except (AttributeError, ValueError, KeyError, AssertionError, RuntimeError):
        return default


@functools.cache
def _interface() -> Any:
    """The plugin's classes over the installed SGLang.

    Raises
    ------
    Unsupported
        Naming what is not as expected.
    """
    import importlib
    import types

    try:
        from sglang.srt import runtime_context
        from sglang.srt.layers.moe.moe_runner import MoeRunner, register_moe_runner_core
        from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
        from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
        from sglang.srt.layers.moe.utils import (
            get_moe_a2a_backend,
            get_moe_runner_backend,
            resolve_moe_runner_backend,
        )
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.server_args import add_moe_runner_backend_choices

        methods = {
            module: getattr(importlib.import_module(module), name) for module, name in _METHODS.items()
        }
        updater = importlib.import_module(_UPDATER).WeightUpdater
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"SGLang lacks what the plugin is built on: {error}") from error

    found = list(inspect.signature(DispatchMoeRunnerCore.run_from_dispatch).parameters)
    if found != _RUN:
        raise Unsupported(f"DispatchMoeRunnerCore.run_from_dispatch() takes {', '.join(found)}")
    for method in methods.values():
        found = list(inspect.signature(method.create_moe_runner).parameters)
        if found != ["self", "layer", "moe_runner_config"]:
            raise Unsupported(f"{method.__name__}.create_moe_runner() takes {', '.join(found)}")
        if not hasattr(method, "get_triton_quant_info"):
            raise Unsupported(f"{method.__name__} has no get_triton_quant_info()")
    for name in _UPDATES:
        if not hasattr(updater, name):
            raise Unsupported(f"WeightUpdater has no {name}()")

    def deployment(config: Any) -> Deployment:
        flags = runtime_context.get_flags().moe
        lora = runtime_context.get_lora
        ranks = max(
            _published(runtime_context.get_parallel, name, 1) or 1
            for name in ("moe_ep_size", "moe_tp_size", "tp_size", "attn_dp_size")
        )
        return Deployment(
            device=_published(runtime_context.get_device, "device", None) or "cuda",
            ranks=ranks,
            a2a_backend=get_moe_a2a_backend().value,
            two_batch_overlap=bool(flags.tbo_enabled),
            single_batch_overlap=bool(flags.sbo_enabled),
            lora=bool(_published(lora, "enable_lora", False) or _published(lora, "lora_paths", None)),
            no_combine=config.no_combine,
        )

    class SwitchyardRunnerCore(DispatchMoeRunnerCore):
        """The experts of one layer."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            options = options_of()
            refuse(options, deployment(config))
            activation, order = activation_of(config)
            schedule = runtime_context.get_schedule
            self.binding = Binding(
                options,
                activation=activation,
                order=order,
                top_k=config.top_k,
                max_tokens=capacity(
                    _published(schedule, "chunked_prefill_size", None),
                    _published(schedule, "max_prefill_tokens", None),
                    _published(runtime_context.get_parallel, "attn_dp_size", 1),
                ),
                weight_on_input=config.apply_router_weight_on_input,
            )

        @property
        def runner_backend(self) -> Any:
            return resolve_moe_runner_backend(_NAME)

        def bind(self, info: Any, tokens: int = 0) -> Any:
            """The layer over the weights of a TritonMoeQuantInfo."""
            if not isinstance(info, TritonMoeQuantInfo):
                raise Unsupported(
                    f"the experts come as {type(info).__name__}; Switchyard takes bf16, fp16 and fp32 "
                    "weights, and FP8 in blocks of 128 x 128"
                )
            return self.binding.bind(
                info.w13_weight,
                info.w2_weight,
                tokens=tokens,
                w13_scale=info.w13_scale,
                w2_scale=info.w2_scale,
                w13_bias=info.b13,
                w2_bias=info.b2,
            )

        def run_from_dispatch(
            self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
        ) -> Any:
            import torch

            if hooks is not None:
                raise Unsupported("LoRA is asked for, which Switchyard does not do between its products")
            if dispatch_output.format.value != "standard" or dispatch_output.hidden_states_scale is not None:
                raise Unsupported(
                    f"tokens come in the format {dispatch_output.format.value!r}, or quantised; "
                    "Switchyard takes the standard one: use --moe-a2a-backend none"
                )
            x = dispatch_output.hidden_states
            weights, ids = dispatch_output.topk_output[:2]
            if weights.dtype not in (torch.float32, torch.bfloat16):
                weights = weights.float()
            if ids.dtype not in (torch.int32, torch.int64):
                ids = ids.to(torch.int32)
            factor = self.config.routed_scaling_factor
            out = self.bind(quant_info, x.shape[0])(x, ids, weights, scale=1.0 if factor is None else factor)
            return StandardCombineInput(hidden_states=out)

    def asked_for() -> bool:
        return get_moe_runner_backend().value == _NAME

    def core_of(method: Any) -> Any:
        core = getattr(getattr(method, "runner", None), "runner_core", None)
        return core if isinstance(core, SwitchyardRunnerCore) else None

    def create_moe_runner(original: Any, method: Any, layer: Any, moe_runner_config: Any) -> Any:
        if not asked_for():
            return original(method, layer, moe_runner_config)
        block = getattr(method, "weight_block_size", None)
        fp8 = isinstance(method, methods["sglang.srt.layers.quantization.fp8"])
        if fp8 and (
            method.use_mxfp8
            or method.is_fp4_expert
            or not method.block_quant
            or list(block or ()) != [128, 128]
        ):
            raise Unsupported(
                f"the experts are quantised by {type(method).__name__} with weight_block_size {block}, "
                f"mxfp8 {method.use_mxfp8}, fp4 {method.is_fp4_expert}; Switchyard takes FP8 in blocks of "
                "128 x 128"
            )
        eplb = getattr(_published(runtime_context.get_exec, "moe", None), "enable_eplb", False)
        if eplb and (fp8 or method.with_bias):
            raise Unsupported(NO_EPLB.format("--enable-eplb"))
        method.moe_runner_config = moe_runner_config
        method.runner = MoeRunner(resolve_moe_runner_backend(_NAME), moe_runner_config)
        if fp8:
            method._owns_moe_runner = True
        return None

    def apply_fp8(original: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
        if core_of(method) is None:
            return original(method, layer, dispatch_output)
        return method.runner.run(dispatch_output, method.get_triton_quant_info(layer))

    def weights_processed(result: Any, method: Any, layer: Any, *more: Any, **named: Any) -> Any:
        core = core_of(method)
        if core is not None:
            core.binding.weights_changed()
            # Now, so that SGLang counts the memory, and errors come before the first request.
            core.bind(method.get_triton_quant_info(layer))
        return result

    def layer_made(result: Any, layer: Any, *more: Any, **named: Any) -> Any:
        if asked_for() and getattr(layer.runner_backend, "value", None) != _NAME:
            raise Unsupported(
                f"--moe-runner-backend is switchyard, but {type(layer.quant_method).__name__} quantises "
                "the experts; Switchyard takes bf16, fp16 and fp32 weights, and FP8 in blocks of 128 x 128"
            )
        return result

    def weights_updated(result: Any, *more: Any, **named: Any) -> Any:
        refresh_all()
        return result

    def install() -> None:
        register_moe_runner_core(_NAME, SwitchyardRunnerCore)
        add_moe_runner_backend_choices([_NAME])
        for module, name in _METHODS.items():
            target = f"{module}.{name}"
            HookRegistry.register(f"{target}.create_moe_runner", create_moe_runner, HookType.AROUND)
            HookRegistry.register(
                f"{target}.process_weights_after_loading", weights_processed, HookType.AFTER
            )
        fp8 = "sglang.srt.layers.quantization.fp8.Fp8MoEMethod.apply"
        HookRegistry.register(fp8, apply_fp8, HookType.AROUND)
        made = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__"
        HookRegistry.register(made, layer_made, HookType.AFTER)
        for name in _UPDATES:
            HookRegistry.register(f"{_UPDATER}.WeightUpdater.{name}", weights_updated, HookType.AFTER)

    return types.SimpleNamespace(core=SwitchyardRunnerCore, install=functools.cache(install))


def register() -> None:
    """Called by SGLang in each of its processes.

    Without ``--moe-runner-backend switchyard`` SGLang computes as it does. With an SGLang whose
    interface is not the one that this was written for, it says so and leaves SGLang as it was: the
    choice is then none that SGLang knows.
    """
    try:
        interface = _interface()
    except Unsupported as error:
        _log.warning(
            "Switchyard does not know the interface of this SGLang, and leaves it as it is: %s. The "
            "plugin is written for SGLang 0.5.23",
            error,
        )
        return
    interface.install()


__all__ = ["Deployment", "Options", "activation_of", "options_of", "refuse", "register"]
