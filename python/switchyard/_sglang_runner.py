"""The part of the SGLang plugin that is built on SGLang: only `switchyard.sglang.register` imports it.

Releases of SGLang differ here in three places, which are decided by what the installed one has: how a
backend's name becomes known (`add_backend`), where settings are read (`setting`), and what its
WeightUpdater calls its methods (`updates`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.layers.moe import utils as moe_utils
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE, create_moe_dispatcher
from sglang.srt.layers.moe.moe_runner import MoeRunner
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsFusedMoEMethod,
)
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16MoE
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from sglang.srt.layers.quantization.mxfp4 import Mxfp4MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import add_moe_runner_backend_choices

from ._four_bit import WeightFormat
from ._serving import (
    NO_EPLB, WEIGHTS, Binding, other_signature, refresh_all, refuse_int4, taken_types,
)
from ._sglang_ranks import architecture, dispatcher, is_fused, most_rows, ranks_of, stand_in
from ._sglang_setup import (
    FUSED_MODELS, Deployment, Fused, activation_of, capacity, capacity_of_rank, log, options_of,
    refuse,
)
from .errors import Unsupported

NAME = "switchyard"
_METHODS = (
    UnquantizedFusedMoEMethod, Fp8MoEMethod, Mxfp4MoEMethod, CompressedTensorsFusedMoEMethod,
)
# Methods whose create_moe_runner() raises at a name not SGLang's own, or takes a kernel of its own.
_FOUR_BITS = (Mxfp4MoEMethod, CompressedTensorsFusedMoEMethod)
# Columns of MXFP4 that share a scale.
_GROUP = 32
_SIGNATURES = {
    MoeRunner.run: "self dispatch_output quant_info lora_info",
    **{method.create_moe_runner: "self layer moe_runner_config" for method in _METHODS},
    **{method.get_triton_quant_info: "self layer" for method in _METHODS[:2]},
    **{method.apply: "self layer dispatch_output" for method in _METHODS[1:]},
    **{method.process_weights_after_loading: "self layer" for method in _METHODS[1:]},
}


# --------------------------------------------------------------------------- what SGLang is set up for


def setting(name: str, default: Any = None) -> Any:
    """A server's setting after SGLang resolved it, by its flat name. The default outside of a server."""
    context = runtime_context.get_context()
    try:
        if hasattr(context, "config_leaf"):
            return context.config_leaf(name)
        return getattr(context.server_args, name)
    except ValueError:
        return default


def group_size(name: str) -> int:
    """Number of ranks in one of the server's groups. 1 outside of a server, where there are no groups."""
    try:
        return getattr(runtime_context.get_parallel(), name) or 1
    except (AttributeError, ValueError, KeyError, AssertionError, RuntimeError):
        return 1


def deployment(config: Any) -> Deployment:
    flags = runtime_context.get_flags().moe
    return Deployment(
        device=setting("device") or "cuda",
        ranks=max(map(group_size, ("moe_ep_size", "moe_tp_size", "tp_size", "attn_dp_size"))),
        a2a_backend="none" if is_fused() else moe_utils.get_moe_a2a_backend().value,
        two_batch_overlap=bool(flags.tbo_enabled), single_batch_overlap=bool(flags.sbo_enabled),
        multiplexes=bool(setting("enable_pdmux")),
        lora=bool(setting("enable_lora") or setting("lora_paths")), no_combine=config.no_combine,
        fused=fused(config) if is_fused() else None,
    )


def fused(config: Any) -> Fused:
    places = setting("init_expert_location")
    return Fused(
        expert_ranks=group_size("moe_ep_size"),
        tensor_ranks=group_size("tp_size"),
        attention_ranks=group_size("attn_dp_size"),
        architecture=architecture(),
        speculative=setting("speculative_algorithm") is not None,
        moves_experts=bool(
            setting("enable_eplb") or setting("ep_num_redundant_experts") or places not in (None, "trivial")
        ),
        shared_experts=bool(config.num_fused_shared_experts),
    )


# ------------------------------------------------------------------------------------ the backend's name


def add_backend() -> None:
    """Make ``--moe-runner-backend switchyard`` a choice."""
    add_moe_runner_backend_choices([NAME])
    if hasattr(moe_utils, "register_moe_runner_backend_name"):
        moe_utils.register_moe_runner_backend_name(NAME)
        return
    # The older releases keep the names in an Enum, which has no call that adds one. This makes a member
    # as enum.Flag makes those for combinations.
    backends = moe_utils.MoeRunnerBackend
    member = object.__new__(backends)
    member._name_, member._value_ = NAME.upper(), NAME
    backends._value2member_map_[NAME] = member


def backend() -> Any:
    """SGLang's identifier of this backend."""
    return getattr(moe_utils, "resolve_moe_runner_backend", moe_utils.MoeRunnerBackend)(NAME)


def asked_for() -> bool:
    return bool(moe_utils.get_moe_runner_backend().value == NAME)


# -------------------------------------------------------------------------------------- one layer's runner


def arrays(info: Any) -> dict[str, Any]:
    """What a layer reads, by the names that `Experts` has for it, of a TritonMoeQuantInfo."""
    if not isinstance(info, TritonMoeQuantInfo):
        raise Unsupported(f"the experts come as {type(info).__name__}; {WEIGHTS}")
    return {
        "w13": info.w13_weight, "w2": info.w2_weight, "w13_scale": info.w13_scale,
        "w2_scale": info.w2_scale, "w13_bias": info.b13, "w2_bias": info.b2,
    }


class SwitchyardRunner(MoeRunner):
    """The experts of one layer.

    It replaces the runner that a quantisation method made for itself. It is a Triton runner to its base
    class, because it takes the weights in the form in which Triton's takes them.
    """

    def __init__(self, config: Any, weight_format: WeightFormat | None = None) -> None:
        options = options_of()
        refuse(options, deployment(config))
        activation, order = activation_of(config)
        super().__init__(moe_utils.MoeRunnerBackend.TRITON, config)
        self.runner_backend = backend()
        prefill = setting("chunked_prefill_size"), setting("max_prefill_tokens")
        over_ranks = is_fused()
        if options.expert_parallel == "fused" and not over_ranks and group_size("moe_ep_size") > 1:
            raise Unsupported(
                "expert_parallel is 'fused', but SGLang set up its experts before this plugin could say so, and would "
                "exchange tokens itself; serve with expert_parallel 'local'"
            )
        scaled_later = over_ranks and FUSED_MODELS.get(architecture() or "", False)
        self.scale = 1.0 if scaled_later or config.routed_scaling_factor is None else config.routed_scaling_factor
        self.binding = Binding(
            options, activation=activation, order=order, top_k=config.top_k,
            max_tokens=capacity_of_rank(*prefill) if over_ranks else capacity(*prefill, group_size("attn_dp_size")),
            weight_on_input=config.apply_router_weight_on_input, weight_format=weight_format,
            ranks=ranks_of(options) if over_ranks else None,
            num_experts=config.num_experts if over_ranks else None, log=log,
        )

    def run(self, dispatch_output: Any, quant_info: Any, lora_info: Any = None) -> Any:
        if lora_info is not None:
            raise Unsupported("LoRA is asked for, which Switchyard does not do between its products")
        if dispatch_output.format.value != "standard" or dispatch_output.hidden_states_scale is not None:
            raise Unsupported(
                f"tokens come in the format {dispatch_output.format.value!r}, or quantised; "
                "Switchyard takes the standard one: use --moe-a2a-backend none"
            )
        x = dispatch_output.hidden_states
        weights, ids = dispatch_output.topk_output[:2]
        ids, weights = taken_types(ids, weights)
        layer = self.binding.bind(tokens=x.shape[0], **arrays(quant_info))
        most = most_rows(x, self.binding.ranks)
        return StandardCombineInput(
            hidden_states=layer(x, ids, weights, scale=self.scale, max_tokens_per_rank=most)
        )


# ------------------------------------------------------------------------------------------------- hooks


def runner_of(method: Any) -> SwitchyardRunner | None:
    """The runner of a quantisation method, if it is ours."""
    runner = getattr(method, "runner", None)
    return runner if isinstance(runner, SwitchyardRunner) else None


def weight_format(method: Any) -> WeightFormat | None:
    """"mxfp4" for gpt-oss' experts and for DeepSeek-V4's, which are a case of FP8 to SGLang."""
    if isinstance(method, Mxfp4MoEMethod):
        return "mxfp4"
    if isinstance(method, CompressedTensorsFusedMoEMethod):
        return "int4"  # runner_of_four_bits() takes no other scheme
    return "mxfp4" if isinstance(method, Fp8MoEMethod) and method.is_fp4_expert else None


def quant_info(method: Any, layer: Any) -> TritonMoeQuantInfo:
    """A layer's tensors, under the names that SGLang's Triton runner has for them."""
    if isinstance(method, CompressedTensorsFusedMoEMethod):
        return TritonMoeQuantInfo(
            w13_weight=layer.w13_weight_packed.transpose(1, 2),
            w2_weight=layer.w2_weight_packed.transpose(1, 2),
            w13_scale=layer.w13_weight_scale.transpose(1, 2),
            w2_scale=layer.w2_weight_scale.transpose(1, 2),
        )
    if not isinstance(method, Mxfp4MoEMethod):
        return method.get_triton_quant_info(layer)
    # Without biases in the model they may be there all the same, and are zero then.
    biases = (layer.w13_weight_bias, layer.w2_weight_bias) if method.with_bias else (None, None)
    return TritonMoeQuantInfo(
        w13_weight=layer.w13_weight, w2_weight=layer.w2_weight, b13=biases[0], b2=biases[1],
        w13_scale=layer.w13_weight_scale, w2_scale=layer.w2_weight_scale,
    )


def weights_created(result: Any, method: Any, layer: Any, *more: Any, **named: Any) -> Any:
    """After Fp8MoEMethod.create_weights(): scales of MXFP4 in a byte, as checkpoints have them.

    SGLang would make them fp32, of four times the size.
    """
    if asked_for() and method.is_fp4_expert:
        for scale in (layer.w13_weight_scale_inv, layer.w2_weight_scale_inv):
            scale.data = torch.ones(scale.shape, device=scale.device).to(torch.float8_e8m0fnu)
    return result


def int4_created(result: Any, scheme: Any, layer: Any, *more: Any, **named: Any) -> Any:
    """After CompressedTensorsWNA16MoE.create_weights(), whose parameters are transposed.

    The parameters keep their shapes and become views of memory in the checkpoint's order. SGLang's
    loader transposes what it loads, and so writes it as it was.
    """
    if asked_for():
        refuse_int4(scheme, scheme.sym)
        for parameter in (
            layer.w13_weight_packed, layer.w2_weight_packed, layer.w13_weight_scale,
            layer.w2_weight_scale,
        ):
            parameter.data = parameter.data.transpose(1, 2).contiguous().transpose(1, 2)
    return result


def create_mxfp4(
    original: Any,
    method: Any,
    layer: Any,
    num_experts: int,
    hidden_size: int,
    intermediate_size_per_partition: int,
    *more: Any,
    **named: Any,
) -> Any:
    """Around Mxfp4MoEMethod.create_weights(), which pads as its own kernels need it.

    gpt-oss' loader gives each rank whole groups of columns, the last one less. So a rank's share is
    rounded up to whole groups. What the loader leaves is zero.
    """
    if asked_for():
        intermediate_size_per_partition += -intermediate_size_per_partition % _GROUP
    return original(
        method, layer, num_experts, hidden_size, intermediate_size_per_partition, *more, **named
    )


def runner_made(result: Any, method: Any, layer: Any, moe_runner_config: Any) -> Any:
    """After create_moe_runner(), which knows no names but SGLang's own."""
    if not asked_for():
        return result
    fp8, form = isinstance(method, Fp8MoEMethod), weight_format(method)
    if fp8:
        refuse_fp8(method)
        method._owns_moe_runner = True  # newer releases use no runner of an Fp8MoEMethod without it
    if form == "int4" and getattr(layer, "with_bias", False):
        raise Unsupported(
            "the experts are of INT4 and have biases, for which SGLang makes no parameters; serve "
            "with another --moe-runner-backend"
        )
    if form == "int4" and options_of().release_weights:
        raise Unsupported(
            "release_weights is true, and the experts are of INT4, of whose parameters SGLang's layer "
            "makes views in each pass; leave it out"
        )
    if setting("enable_eplb") and (fp8 or form or method.with_bias):
        raise Unsupported(NO_EPLB.format("--enable-eplb"))
    method.runner = SwitchyardRunner(moe_runner_config, form)
    return result


def runner_of_four_bits(original: Any, method: Any, layer: Any, moe_runner_config: Any) -> Any:
    """Around create_moe_runner() of _FOUR_BITS."""
    scheme = getattr(layer, "scheme", None)
    other = isinstance(method, CompressedTensorsFusedMoEMethod) and (
        type(scheme) is not CompressedTensorsWNA16MoE
    )
    if not asked_for() or other:  # layer_made() refuses another scheme
        return original(method, layer, moe_runner_config)
    for owner in (method, scheme):
        if owner is not None:
            owner.moe_runner_config = moe_runner_config
    return runner_made(None, method, layer, moe_runner_config)


def refuse_fp8(method: Any) -> None:
    """Raise `Unsupported` for an Fp8MoEMethod whose weights Switchyard cannot take as they are."""
    block, form = list(method.quant_config.weight_block_size or ()), weight_format(method)
    other = not method.block_quant if form else block != [128, 128]
    if method.use_mxfp8 or other or (form and method.dequant_fp4_to_fp8):
        raise Unsupported(
            f"the experts are quantised by {type(method).__name__} with weight_block_size {block}, "
            f"mxfp8 {method.use_mxfp8}, fp4 {method.is_fp4_expert}, "
            f"SGLANG_DSV4_FP4_DEQUANT {method.dequant_fp4_to_fp8}; {WEIGHTS}"
        )


def apply_here(original: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Around a method's apply() that chooses what it hands to the runner by SGLang's own names."""
    runner = runner_of(method)
    if runner is None:
        return original(method, layer, dispatch_output)
    return runner.run(dispatch_output, quant_info(method, layer))


def process_weights(original: Any, method: Any, layer: Any) -> Any:
    """Around process_weights_after_loading(), which repacks four bits for SGLang's kernels."""
    runner = runner_of(method)
    if runner is not None and runner.binding.weight_format:
        return None
    return original(method, layer)


def weights_processed(result: Any, method: Any, layer: Any, *more: Any, **named: Any) -> Any:
    """After process_weights_after_loading()."""
    runner = runner_of(method)
    if runner is not None:
        if runner.binding.ranks is not None:
            runner.binding.ranks.meet()  # ranks load for different times
        # Now, so that SGLang counts the memory, and errors come before the first request.
        runner.binding.weights_loaded(**arrays(quant_info(method, layer)))
    return result


def layer_made(result: Any, layer: Any, *more: Any, **named: Any) -> Any:
    """After FusedMoE.__init__(): methods of quantisation without a hook above keep runners of their own."""
    if asked_for() and runner_of(layer.quant_method) is None:
        raise Unsupported(
            f"--moe-runner-backend is switchyard, but {type(layer.quant_method).__name__} quantises "
            f"the experts; {WEIGHTS}"
        )
    if asked_for() and is_fused() and layer.reduce_results:
        raise Unsupported(
            "expert_parallel is 'fused', and this model's layer adds its outputs up over ranks, where they are of "
            "different tokens; serve with expert_parallel 'local'"
        )
    return result


def moe_configured(result: Any, server_args: Any = None, *more: Any, **named: Any) -> Any:
    """After initialize_moe_config(), which SGLang 0.5.16 calls with settings that it has not published yet."""
    if asked_for():
        expert_ranks, ranks = (
            setting(name) if server_args is None else getattr(server_args, name) for name in ("ep_size", "tp_size")
        )
        stand_in(options_of(), expert_ranks or 1, ranks or 1)
    return result


def dispatcher_made(original: Any, moe_runner_config: Any, *more: Any, **named: Any) -> Any:
    """Around create_moe_dispatcher()."""
    if asked_for() and is_fused():
        return dispatcher(moe_runner_config)
    return original(moe_runner_config, *more, **named)


def weights_updated(result: Any, *more: Any, **named: Any) -> Any:
    """After an update of a running server's weights."""
    refresh_all()
    return result


# ---------------------------------------------------------------------------------------------- install


def updates() -> list[str]:
    """WeightUpdater's methods that change weights; releases name that for torch.distributed differently."""
    return [name for name in vars(WeightUpdater) if name.startswith(("update_weights_", "load_weights_"))]


def check_interface() -> None:
    """Raise `Unsupported` for an SGLang that lacks what the hooks rely on, naming it."""
    if other := other_signature(_SIGNATURES):
        raise Unsupported(other)
    if not updates():
        raise Unsupported("WeightUpdater has no update_weights_...()")


@functools.cache
def install() -> None:
    """Register the name and the hooks, once a process. SGLang applies hooks itself."""
    check_interface()
    add_backend()
    for method in _METHODS:
        if method is not UnquantizedFusedMoEMethod:
            hook(method, "apply", apply_here, HookType.AROUND)
            hook(method, "process_weights_after_loading", process_weights, HookType.AROUND)
        hook(method, "process_weights_after_loading", weights_processed)
        if method in _FOUR_BITS:
            hook(method, "create_moe_runner", runner_of_four_bits, HookType.AROUND)
        else:
            hook(method, "create_moe_runner", runner_made)
    hook(CompressedTensorsWNA16MoE, "create_weights", int4_created)
    hook(Mxfp4MoEMethod, "create_weights", create_mxfp4, HookType.AROUND)
    hook(Fp8MoEMethod, "create_weights", weights_created)
    hook(FusedMoE, "__init__", layer_made)
    for function, around, kind in (
        (moe_utils.initialize_moe_config, moe_configured, HookType.AFTER),
        (create_moe_dispatcher, dispatcher_made, HookType.AROUND),
    ):
        HookRegistry.register(f"{function.__module__}.{function.__qualname__}", around, kind)
    for name in updates():
        hook(WeightUpdater, name, weights_updated)


def hook(owner: type, name: str, function: Any, kind: Any = HookType.AFTER) -> None:
    """Register a hook on a method of one of SGLang's classes."""
    HookRegistry.register(f"{owner.__module__}.{owner.__qualname__}.{name}", function, kind)
