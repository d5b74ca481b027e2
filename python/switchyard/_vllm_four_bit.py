"""vLLM's experts of four bits: which methods Switchyard takes over, and what it does in the place
of their repacking. It imports vLLM: only _vllm imports it.

vLLM creates packed weights as the checkpoint has them, [E, N, K/2] in bytes or [E, N, K/8] in
words, with the scales [E, N, K/group] beside them. Its methods repack both for a kernel once they are
loaded. Switchyard's layers leave that step out: they read what was loaded, where it is.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import (
    int4_w4a16_moe_quant_config,
    mxfp4_w4a16_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt4Static32, kMxfp4Static

from ._four_bit import WeightFormat
from ._serving import refuse_int4
from .errors import InvalidArgument, Unsupported

# Columns that share a scale. INT4's groups are multiples of it.
_MXFP4_GROUP = 32
_COMPRESSED = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"


def _int4_method() -> tuple[Any, Any]:
    """The module and the class of compressed-tensors' INT4; (None, None): it cannot be imported.

    Where there are two classes, as in 0.26, the one that chooses among kernels has "Marlin" in its
    name. The other one has a kernel of its own, and is refused.
    """
    for module, name in (
        ("compressed_tensors_moe_wna16_marlin", "CompressedTensorsWNA16MarlinMoEMethod"),
        ("compressed_tensors_moe_wna16", "CompressedTensorsWNA16MoEMethod"),
    ):
        try:
            found = importlib.import_module(f"{_COMPRESSED}.{module}")
        except ImportError:
            continue
        if hasattr(found, "select_wna16_moe_backend"):
            return found, getattr(found, name)
    return None, None


_int4_module, _Int4 = _int4_method()

# Where these methods choose a kernel, and the choice that leaves the layout of weights as the
# checkpoint has it: vLLM pads sizes to whole groups for it, and transposes nothing while it loads.
SELECTORS = [
    (mxfp4, "select_mxfp4_moe_backend", Mxfp4MoeBackend.EMULATION),
    (mxfp4, "select_deepseek_v4_mxfp4_moe_backend", Mxfp4MoeBackend.EMULATION),
]
if _int4_module is not None:
    SELECTORS.append(
        (_int4_module, "select_wna16_moe_backend", _int4_module.WNA16MoEBackend.FLASHINFER_TRTLLM)
    )

# What vLLM's checks of a class of experts name the two formats.
SCHEMES: dict[WeightFormat | None, Any] = {
    "mxfp4": (kMxfp4Static, None),
    "int4": (kInt4Static32, None),
}


def format_of(method: Any) -> WeightFormat | None:
    """The format of a method's weights; None: not of four bits, or a class that is not known."""
    if type(method) in (mxfp4.GptOssMxfp4MoEMethod, mxfp4.Mxfp4MoEMethod):
        return "mxfp4"
    return "int4" if _Int4 is not None and type(method) is _Int4 else None


def refuse(method: Any, moe_config: Any, quant_config: Any) -> None:
    """Raise `Unsupported` for experts of four bits that would be read as other numbers."""
    form, activation = format_of(method), moe_config.activation.value
    columns = moe_config.intermediate_size_per_partition
    # gpt-oss has gate and up in turns, and loaders of its own that cut between groups. Experts that
    # are loaded by vLLM's common loader have up after gate, and are cut anywhere.
    one_by_one = form and quant_config.get_name() != "gpt_oss_mxfp4"
    if form == "int4" and moe_config.has_bias:
        raise Unsupported(
            "the experts are of INT4 and have biases, for which some releases of vLLM make no "
            "parameters; serve without Switchyard"
        )
    if one_by_one and activation == "swigluoai":
        raise Unsupported(
            f"activation is 'swigluoai', which means gate and up in turns, and "
            f"{type(method).__name__} loads them one after the other; Switchyard takes "
            "'swigluoai_uninterleave' there"
        )
    if one_by_one and columns % _MXFP4_GROUP:
        raise Unsupported(
            f"a rank has {columns} of the experts' {moe_config.intermediate_size} intermediate "
            f"columns, which cuts through a group of {_MXFP4_GROUP} that share a scale; use fewer "
            "ranks, or expert parallelism"
        )


def install() -> None:
    """Make compressed-tensors' method refuse by `refuse_int4` for Switchyard's layers.

    It must happen before the method's own checks, which are of kernels that are not used here and, in
    some releases, are assertions without a text.
    """
    if _Int4 is None:
        return
    original = _Int4.__init__

    @functools.wraps(original)
    def __init__(
        self: Any, weight_quant: Any, input_quant: Any, moe: Any, *more: Any, **named: Any
    ) -> None:
        if hasattr(moe, "switchyard_layer"):
            refuse_int4(weight_quant, weight_quant.symmetric)
        original(self, weight_quant, input_quant, moe, *more, **named)

    _Int4.__init__ = __init__


def processed(method: Any, layer: Any, experts: type) -> None:
    """Stands in for process_weights_after_loading(): a kernel over the weights as they are."""
    small = {
        "w1_scale": layer.w13_weight_scale,
        "w2_scale": layer.w2_weight_scale,
        "w1_bias": getattr(layer, "w13_bias", None),
        "w2_bias": getattr(layer, "w2_bias", None),
    }
    if format_of(method) == "int4":
        # The modular kernel is called with the names that other methods have.
        layer.w13_weight, layer.w2_weight = layer.w13_weight_packed, layer.w2_weight_packed
        config = int4_w4a16_moe_quant_config(**small, block_shape=[0, method.group_size])
    else:
        config = mxfp4_w4a16_moe_quant_config(**small)
    if method.moe.has_bias and small["w1_bias"] is None:
        raise InvalidArgument(
            f"the model's experts have biases, but {type(method).__name__} has made no w13_bias; "
            "serve without Switchyard"
        )
    method.moe_quant_config = config
    prepare = maybe_make_prepare_finalize(
        moe=method.moe,
        quant_config=config,
        routing_tables=layer._expert_routing_tables(),
        allow_new_interface=True,
        use_monolithic=False,
    )
    method.moe_kernel = modular_kernel.FusedMoEKernel(prepare, experts(method.moe, config))
