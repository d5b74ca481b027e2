"""vLLM's experts, run by Switchyard: a plugin that vLLM finds by its entry point.

``vllm serve MODEL --additional-config '{"switchyard": {}}'`` selects it. Nothing of vLLM is imported
before vLLM calls `register`. See docs/frameworks/vllm.md.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Iterator
from typing import Any

from ._activation import Activation
from ._experts import Order
from ._serving import NO_EPLB, Binding, Options, local_ids, refuse_too_few_sms
from .errors import Error, Unsupported

_log = logging.getLogger("vllm.switchyard")
_WHERE = "--additional-config's \"switchyard\""
# Parameters of FusedMoEExpertsModular.apply() in the vLLM that this was written for.
_APPLY = (
    "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map "
    "a1q_scale a2_scale workspace13 workspace2 expert_tokens_meta apply_router_weight_on_input"
).split()
# The methods that a subclass of FusedMoEExpertsModular must define.
_ABSTRACT = {
    "activation_format",
    "apply",
    "finalize_weight_and_reduce_impl",
    "workspace_shapes",
    "_supports_activation",
    "_supports_current_device",
    "_supports_no_act_and_mul",
    "_supports_parallel_config",
    "_supports_quant_scheme",
}
# Modules of methods whose weights can be used as they are, and the function of each that chooses a
# backend.
_SELECTORS = {
    "unquantized": "select_unquantized_moe_backend",
    "fp8": "select_fp8_moe_backend",
}


# ------------------------------------------------------------------------- what needs no vLLM


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


# ------------------------------------------------------------------------- what is built on vLLM


@functools.cache
def _interface() -> Any:
    """The plugin's classes over the installed vLLM.

    Raises
    ------
    Unsupported
        Naming what is not as expected.
    """
    import types

    try:
        import vllm.model_executor.layers.fused_moe.modular_kernel as mk
        import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as unquantized
        import vllm.model_executor.layers.quantization.fp8 as fp8
        from vllm.config import get_current_vllm_config_or_none
        from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
        from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
        from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
        from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
            TopKWeightAndReduceNoOP,
        )
        from vllm.model_executor.layers.quantization.utils.quant_utils import (
            kFp8Dynamic128Sym,
            kFp8Static128BlockSym,
        )
        from vllm.platforms import current_platform
    except ImportError as error:
        raise Unsupported(f"vLLM lacks what the plugin is built on: {error}") from error

    found = list(inspect.signature(mk.FusedMoEExpertsModular.apply).parameters)
    if found != _APPLY:
        raise Unsupported(f"FusedMoEExpertsModular.apply() takes {', '.join(found)}")
    abstract = set(mk.FusedMoEExpertsModular.__abstractmethods__)
    if not abstract <= _ABSTRACT:
        new = ", ".join(sorted(abstract - _ABSTRACT))
        raise Unsupported(f"FusedMoEExpertsModular has methods to define that are not known: {new}")
    found = list(inspect.signature(RoutedExperts._get_quant_method).parameters)
    if found != ["self", "prefix", "quant_config", "moe_config"]:
        raise Unsupported(f"RoutedExperts._get_quant_method() takes {', '.join(found)}")
    modules = {"unquantized": unquantized, "fp8": fp8}
    for name, selector in _SELECTORS.items():
        if not callable(getattr(modules[name], selector, None)):
            raise Unsupported(f"{modules[name].__name__} has no {selector}()")

    class SwitchyardExperts(mk.FusedMoEExpertsModular):
        """The experts of one layer. Every layer has a subclass, with its binding."""

        binding: Binding

        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.Standard

        @staticmethod
        def _supports_current_device() -> bool:
            from . import has_cuda

            return current_platform.is_cpu() or (current_platform.is_cuda() and has_cuda())

        @staticmethod
        def _supports_no_act_and_mul() -> bool:
            return True

        @staticmethod
        def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
            return (weight_key, activation_key) in (
                (None, None),
                (kFp8Static128BlockSym, kFp8Dynamic128Sym),
            )

        @staticmethod
        def _supports_activation(activation: Any) -> bool:
            try:
                activation_of(activation.value, None, 1.0, 0.0)
            except Unsupported:
                return False
            return True

        @staticmethod
        def _supports_parallel_config(moe_parallel_config: Any) -> bool:
            return not moe_parallel_config.use_batched_activation_format

        @property
        def expects_unquantized_inputs(self) -> bool:
            # The layer quantises: for each token, 128 columns at a time.
            return True

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def workspace_shapes(
            self,
            M: int,
            N: int,
            K: int,
            topk: int,
            global_num_experts: int,
            local_num_experts: int,
            expert_tokens_meta: Any,
            activation: Any,
        ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
            return (0,), (0,), (M, K)

        def bind(self, w1: Any, w2: Any, tokens: int = 0) -> Any:
            """The layer over the weights; scales and biases are the quantisation's."""
            return self.binding.bind(
                w1,
                w2,
                tokens=tokens,
                w13_scale=self.w1_scale,
                w2_scale=self.w2_scale,
                w13_bias=self.w1_bias,
                w2_bias=self.w2_bias,
            )

        def apply(
            self,
            output: Any,
            hidden_states: Any,
            w1: Any,
            w2: Any,
            topk_weights: Any,
            topk_ids: Any,
            activation: Any,
            global_num_experts: int,
            expert_map: Any,
            a1q_scale: Any,
            a2_scale: Any,
            workspace13: Any,
            workspace2: Any,
            expert_tokens_meta: Any,
            apply_router_weight_on_input: bool,
        ) -> None:
            import torch

            if a1q_scale is not None:
                raise Unsupported(
                    "activations were quantised before the experts; Switchyard takes them as they are"
                )
            if apply_router_weight_on_input:
                # hidden_states have been multiplied.
                topk_weights = torch.ones_like(topk_weights)
            if topk_weights.dtype not in (torch.float32, torch.bfloat16):
                topk_weights = topk_weights.float()
            if topk_ids.dtype not in (torch.int32, torch.int64):
                topk_ids = topk_ids.to(torch.int32)
            experts = self.bind(w1, w2, hidden_states.shape[0])
            experts(hidden_states, local_ids(topk_ids, expert_map), topk_weights, out=output)

    @contextlib.contextmanager
    def chosen(experts_cls: type) -> Iterator[None]:
        """Methods that are made meanwhile choose a class, and Triton's layout of weights, which is
        that of the checkpoint."""
        backends = {"unquantized": UnquantizedMoeBackend.TRITON, "fp8": Fp8MoeBackend.TRITON}
        originals = {name: getattr(modules[name], _SELECTORS[name]) for name in modules}

        def selector(name: str) -> Any:
            def select(*arguments: Any, **named: Any) -> Any:
                bound = inspect.signature(originals[name]).bind(*arguments, **named).arguments
                config = bound.get("moe_config", bound.get("config"))
                supported, reason = experts_cls.is_supported_config(
                    experts_cls,
                    config,
                    bound.get("weight_key"),
                    bound.get("activation_key"),
                    mk.FusedMoEActivationFormat.Standard,
                )
                if not supported:
                    raise Unsupported(f"Switchyard cannot run this layer: {reason}")
                return backends[name], experts_cls

            return select

        for name in modules:
            setattr(modules[name], _SELECTORS[name], selector(name))
        try:
            yield
        finally:
            for name in modules:
                setattr(modules[name], _SELECTORS[name], originals[name])

    class SwitchyardRoutedExperts(RoutedExperts):
        """RoutedExperts that Switchyard runs where the user asks for it."""

        def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
            config = get_current_vllm_config_or_none()
            options = options_of(config)
            if options is None:
                return super()._get_quant_method(prefix, quant_config, moe_config)
            try:
                return self._switchyard_method(prefix, quant_config, moe_config, config, options)
            except Error as error:
                raise type(error)(f"{prefix}: {error}") from error

        def _switchyard_method(
            self, prefix: str, quant_config: Any, moe_config: Any, config: Any, options: Options
        ) -> Any:
            refuse(options, config, moe_config)

            def of_layer(name: str, otherwise: Any) -> Any:
                value = getattr(self, name, None)
                value = getattr(moe_config, name, None) if value is None else value
                return otherwise if value is None else value

            activation, order = activation_of(
                moe_config.activation.value,
                of_layer("swiglu_limit", None),
                of_layer("swiglu_alpha", 1.0),
                of_layer("swiglu_beta", 0.0),
            )
            binding = Binding(
                options,
                activation=activation,
                order=order,
                top_k=moe_config.experts_per_token,
                max_tokens=capacity(config, moe_config),
                refresh_in_graphs=getattr(config, "weight_transfer_config", None) is not None,
            )
            # vLLM passes on a class, and makes objects of it.
            members = {"binding": binding, "__module__": __name__}
            experts_cls = type("SwitchyardExperts", (SwitchyardExperts,), members)
            with chosen(experts_cls):
                method = super()._get_quant_method(prefix, quant_config, moe_config)
            if getattr(method, "experts_cls", None) is not experts_cls:
                raise Unsupported(
                    f"the experts are quantised by {type(method).__name__}; Switchyard takes bf16, "
                    "fp16 and fp32 weights, and FP8 in blocks of 128 x 128"
                )
            if moe_config.moe_parallel_config.enable_eplb and (
                moe_config.has_bias or isinstance(method, fp8.Fp8MoEMethod)
            ):
                raise Unsupported(NO_EPLB.format("--enable-eplb"))
            process = method.process_weights_after_loading

            def process_weights_after_loading(layer: Any) -> None:
                process(layer)
                binding.weights_changed()
                if binding.experts is None:
                    # Now, so that vLLM counts the memory, and errors come before the first request.
                    method.moe_kernel.fused_experts.bind(layer.w13_weight, layer.w2_weight)

            method.process_weights_after_loading = process_weights_after_loading
            return method

    return types.SimpleNamespace(
        experts=SwitchyardExperts,
        layer=SwitchyardRoutedExperts,
        pluggable=PluggableLayer,
        registry=op_registry_oot,
    )


def register() -> None:
    """Called by vLLM in each of its processes, perhaps more than once.

    Without ``--additional-config '{"switchyard": {}}'`` vLLM stays as it is. With a vLLM whose
    interface is not the one that this was written for, it says so and leaves vLLM as it was.
    """
    try:
        interface = _interface()
    except Unsupported as error:
        _log.warning(
            "Switchyard does not know the interface of this vLLM, and leaves it as it is, also where "
            "--additional-config asks for Switchyard: %s. The plugin is written for vLLM 0.33",
            error,
        )
        return
    taken = interface.registry.get("RoutedExperts")
    if taken is interface.layer:
        return
    if taken is not None:
        _log.warning(
            "Switchyard leaves vLLM as it is: another plugin, %s, has replaced RoutedExperts",
            f"{taken.__module__}.{taken.__qualname__}",
        )
        return
    interface.pluggable.register_oot(interface.layer, name="RoutedExperts")


__all__ = ["Options", "activation_of", "options_of", "refuse", "register"]
