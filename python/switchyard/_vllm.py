"""vLLM's layer of experts with Switchyard's kernel in it. It imports vLLM: only vllm.register() imports it.

The module uses only what vLLM 0.26 and 0.33 have in common; `missing` says what another version lacks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym
from vllm.platforms import current_platform

from . import _vllm_four_bit as four_bit
from . import _vllm_ranks as over_ranks
from ._library import has_cuda
from ._serving import WEIGHTS, Binding, Options, local_ids, other_signature, taken_types
from ._vllm_setup import activation_of, capacity, is_fused, log, options_of, refuse
from .errors import Error, Unsupported

# Parameters of the methods that are overridden here.
_SIGNATURES = {
    modular_kernel.FusedMoEExpertsModular.apply: (
        "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map a1q_scale "
        "a2_scale workspace13 workspace2 expert_tokens_meta apply_router_weight_on_input"
    ),
    RoutedExperts._get_quant_method: "self prefix quant_config moe_config",
    RoutedExperts.forward_modular: "self x topk_weights topk_ids shared_experts shared_experts_input",
    modular_kernel.FusedMoEPrepareAndFinalizeModular.finalize: (
        "self output fused_expert_output topk_weights topk_ids apply_router_weight_on_input weight_and_reduce_impl"
    ),
    RoutedExperts.weight_loader: "self param loaded_weight weight_name shard_id expert_id return_success",
}
# Where methods whose weights can be used as they are choose a kernel, and the choice whose layout of weights
# is that of the checkpoint.
_SELECTORS = [
    (unquantized, "select_unquantized_moe_backend", UnquantizedMoeBackend.TRITON),
    (fp8, "select_fp8_moe_backend", Fp8MoeBackend.TRITON),
    *four_bit.SELECTORS,
]
_FP8_SCHEME = (kFp8Static128BlockSym, kFp8Dynamic128Sym)
# Scales and biases, which not every layer has: vLLM's name of each, and Switchyard's.
_SMALL = {
    "w13_weight_scale_inv": "w13_scale",  # of FP8
    "w2_weight_scale_inv": "w2_scale",
    "w13_weight_scale": "w13_scale",  # of four bits
    "w2_weight_scale": "w2_scale",
    "w13_bias": "w13_bias",
    "w2_bias": "w2_bias",
}


class SwitchyardExperts(modular_kernel.FusedMoEExpertsModular):
    """The experts of one layer, for vLLM's modular kernel: unquantised tokens in, their sums out."""

    def __init__(self, moe_config: Any, quant_config: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(moe_config, quant_config, *arguments, **named)
        # vLLM makes these objects anew when weights are reloaded. What lasts is the layer.
        self.layer: SwitchyardRoutedExperts = moe_config.switchyard_layer()

    @staticmethod
    def activation_format() -> Any:
        return modular_kernel.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cpu() or (current_platform.is_cuda() and has_cuda())

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        schemes = ((None, None), _FP8_SCHEME, *four_bit.SCHEMES.values())
        return (weight_key, activation_key) in schemes

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        # _binding() has decided, with the numbers of the layer, which some activations need.
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

    def workspace_shapes(self, M: int, N: int, K: int, *rest: Any, **named: Any) -> Any:
        return (0,), (0,), (M, K)

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
        if a1q_scale is not None:
            raise Unsupported("activations were quantised before the experts; Switchyard takes them as they are")
        rows = self.layer.rows
        if apply_router_weight_on_input:
            if rows is not None:
                # The stages before this one leave that to the experts. vLLM has it for one expert a token.
                hidden_states = hidden_states * topk_weights.to(hidden_states.dtype)
            topk_weights = torch.ones_like(topk_weights)
        topk_ids, topk_weights = taken_types(topk_ids, topk_weights)
        bind = functools.partial(self.layer.binding.bind, w1, w2, **self.layer.small())
        if rows is not None:
            rows.run(bind, hidden_states, topk_ids, topk_weights, output)
        else:
            experts = bind(tokens=hidden_states.shape[0])
            experts(hidden_states, local_ids(topk_ids, expert_map), topk_weights, out=output)


class SwitchyardRoutedExperts(RoutedExperts):
    """RoutedExperts that Switchyard runs where the user asks for it."""

    binding: Binding | None = None
    # Where Switchyard exchanges the tokens.
    rows: over_ranks.Rows | None = None
    # Of _SMALL, what the layer has: it is looked up in every pass, and what a module lacks takes long to miss.
    present: dict[str, str] = {}

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        config = get_current_vllm_config_or_none()
        options = options_of(config)
        if options is None:
            return super()._get_quant_method(prefix, quant_config, moe_config)
        try:
            refuse(options, config, moe_config)
            if is_fused(options, moe_config):
                self.rows = self._rows(options, moe_config)
            self.binding = self._binding(options, config, moe_config)
            moe_config.switchyard_layer = lambda: self
            method = super()._get_quant_method(prefix, quant_config, moe_config)
            self._refuse_method(method, moe_config, quant_config)
        except Error as error:
            raise type(error)(f"{prefix}: {error}") from error
        process = method.process_weights_after_loading
        self.binding.weight_format = four_bit.format_of(method)
        if self.binding.weight_format:
            process = functools.partial(four_bit.processed, method, experts=SwitchyardExperts)

        def process_weights_after_loading(layer: Any) -> None:
            process(layer)
            if self.rows is not None:
                over_ranks.use_stages(method)
            there = (name for name in _SMALL if getattr(self, name, None) is not None)
            self.present = {_SMALL[name]: name for name in there}
            # Now, so that vLLM counts the memory, errors come before the first request, and graphs that
            # were captured before read what is new.
            try:
                # Models change it after the layer is made.
                refuse(options, config, moe_config, exchanges=self.rows is not None)
                self.binding.weights_loaded(self.w13_weight, self.w2_weight, **self.small())
            except Error as error:
                raise type(error)(f"{prefix}: {error}") from error

        method.process_weights_after_loading = process_weights_after_loading
        return method

    def _rows(self, options: Options, moe_config: Any) -> over_ranks.Rows:
        rows = over_ranks.Rows(self, moe_config, options)
        over_ranks.pass_tokens_through(moe_config)
        over_ranks.watch_steps(rows.ranks)
        return rows

    def _binding(self, options: Options, config: Any, moe_config: Any) -> Binding:
        def of_layer(name: str, otherwise: Any) -> Any:
            value = getattr(self, name, None)
            value = getattr(moe_config, name, None) if value is None else value
            return otherwise if value is None else value

        activation, order = activation_of(
            moe_config.activation.value,
            of_layer("swiglu_limit", None),
            of_layer("swiglu_alpha", 1.0),
            of_layer("swiglu_beta", 0.0),
            (of_layer("activation_situ_beta", None), of_layer("activation_situ_linear_beta", None)),
        )
        return Binding(
            options,
            activation=activation,
            order=order,
            top_k=moe_config.experts_per_token,
            max_tokens=capacity(config, moe_config, 0 if self.rows is None else self.rows.over),
            ranks=None if self.rows is None else self.rows.ranks,
            num_experts=None if self.rows is None else moe_config.num_experts,
            refresh_in_graphs=getattr(config, "weight_transfer_config", None) is not None,
            log=log,
        )

    def _refuse_method(self, method: Any, moe_config: Any, quant_config: Any) -> None:
        quantised, form = isinstance(method, fp8.Fp8MoEMethod), four_bit.format_of(method)
        known = quantised or form or isinstance(method, unquantized.UnquantizedFusedMoEMethod)
        blocks = getattr(method, "moe_block_shape", None) or getattr(method, "weight_block_size", None)
        if not known or getattr(method, "experts_cls", None) is not SwitchyardExperts or (
            quantised and (list(blocks or ()) != [128, 128] or getattr(method, "weight_scale_refine", None))
        ):
            raise Unsupported(
                f"the experts are quantised by {type(method).__name__}"
                + (f" in blocks of {blocks}" if quantised else "")
                + f"; {WEIGHTS}"
            )
        four_bit.refuse(method, moe_config, quant_config)
        supported, reason = SwitchyardExperts.is_supported_config(
            SwitchyardExperts,
            moe_config,
            *(_FP8_SCHEME if quantised else four_bit.SCHEMES.get(form, (None, None))),
            modular_kernel.FusedMoEActivationFormat.Standard,
        )
        if not supported:
            raise Unsupported(f"Switchyard cannot run this layer: {reason}")
        if moe_config.moe_parallel_config.enable_eplb:
            if form:
                raise Unsupported(
                    "--enable-eplb moves experts between ranks without a word to the layer, which on GPUs keeps weights "
                    "of four bits in a layout of its own: they would be those of other experts. Turn it off"
                )
            self.binding.refresh_each_pass = bool(moe_config.has_bias or quantised)

    def forward_modular(self, x: Any, topk_weights: Any, topk_ids: Any, *more: Any, **named: Any) -> Any:
        if self.rows is None or x.shape[0]:
            return super().forward_modular(x, topk_weights, topk_ids, *more, **named)
        # vLLM's kernel leaves out a pass without rows, for which the other ranks would wait.
        out = torch.empty_like(x)
        bind = functools.partial(self.binding.bind, self.w13_weight, self.w2_weight, **self.small())
        self.rows.run(bind, x, *taken_types(topk_ids, topk_weights), out)
        return out

    def small(self) -> dict[str, Any]:
        """Scales and biases, by the names that `Experts` has for them."""
        return {ours: getattr(self, theirs) for ours, theirs in self.present.items()}

    def weight_loader(
        self,
        param: Any,
        loaded_weight: Any,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        done = super().weight_loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success)
        if self.binding is not None and self.binding.reads(param):
            # Trainers write into a running server's weights, and nothing else is called.
            self.binding.refresh()
        return done


def replacements() -> dict[str, type]:
    """vLLM's classes of a layer's experts that are replaced, by their names."""
    found: dict[str, type] = {"RoutedExperts": SwitchyardRoutedExperts}
    # In 0.29 and newer gpt-oss has one of its own, with a loader of its own.
    try:
        from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts as theirs
    except ImportError:
        return found
    name = "SwitchyardGptOssRoutedExperts"
    ours = type(name, (SwitchyardRoutedExperts, theirs), {"__module__": __name__})
    return found | {theirs.__name__: ours}


def selecting(original: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """vLLM's choice of a kernel, but Switchyard's experts for layers that are Switchyard's."""

    @functools.wraps(original)
    def select(*arguments: Any, **named: Any) -> Any:
        given = inspect.signature(original).bind(*arguments, **named).arguments
        config = given.get("moe_config", given.get("config"))
        if hasattr(config, "switchyard_layer"):
            return backend, SwitchyardExperts
        return original(*arguments, **named)

    return select


def missing() -> str | None:
    """What this vLLM has otherwise than the plugin expects; None: nothing."""
    if other := other_signature(_SIGNATURES):
        return other
    for module, name, _ in _SELECTORS:
        if not {"moe_config", "config"} & set(inspect.signature(getattr(module, name)).parameters):
            return f"{module.__name__}.{name}() takes no configuration"
    for cls in (SwitchyardExperts, over_ranks.Stages):
        if new := ", ".join(sorted(cls.__abstractmethods__)):
            return f"{cls.__base__.__name__} has methods to define that are not known: {new}"
    return None


def install() -> str | None:
    """Let vLLM make Switchyard's layers in the place of its own; what is in the way, if something is."""
    if op_registry_oot.get("RoutedExperts") is SwitchyardRoutedExperts:
        return None
    ours = replacements()
    for name in ours:
        if taken := op_registry_oot.get(name):
            return f"another plugin, {taken.__module__}.{taken.__qualname__}, has replaced {name}"
    for name, layer in ours.items():
        PluggableLayer.register_oot(layer, name=name)
    four_bit.install()
    for module, name, backend in _SELECTORS:
        setattr(module, name, selecting(getattr(module, name), backend))
    return None
