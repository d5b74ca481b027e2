"""vLLM's layer with experts of four bits on the CPU engine, where vLLM (0.26 to 0.33) can be imported:
gpt-oss' MXFP4, DeepSeek-V4's, and compressed-tensors' INT4, loaded by vLLM's own loaders, beside fp64.
No GPU is used.
"""

import contextlib
import math

import pytest

torch = pytest.importorskip("torch")

import reference
from four_bit_cases import GPT_OSS, SEEN, Case, E, H, I, T, batch, expected_of
from four_bit_cases import require_as_exact_as_torch, require_mistakes_seen
from reference import Packed, as_words, error, experts
from switchyard import Activation, InvalidArgument, ShapeMismatch, Unsupported
from vllm_ranks import compressed_config, deepseek_v4_config, load_experts, one_rank


@pytest.fixture(scope="module")
def vllm():
    return one_rank()


def gpt_oss(vllm, streamed=False, **more):
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
    from vllm.model_executor.models import gpt_oss as model

    # In 0.29 and newer the model asks for a class of its own.
    own = getattr(model, "GptOssRoutedExperts", None)
    if streamed and own is None:
        pytest.skip("this vLLM loads gpt-oss' experts all at once only")
    given = {"routed_experts_cls": own} if own else {}
    layer = vllm(
        quant_config=GptOssMxfp4Config(), activation="swigluoai", has_bias=True, **given, **more
    )
    w13, w2 = Packed("mxfp4", 2 * I, H, count=E), Packed("mxfp4", H, I, count=E)
    b13, b2 = torch.randn(E, 2 * I).bfloat16(), 3 * torch.randn(E, H).bfloat16()
    tensors = {
        "w13_weight": w13.bytes, "w13_weight_scale": w13.scale, "w13_bias": b13,
        "w2_weight": w2.bytes, "w2_weight_scale": w2.scale, "w2_bias": b2,
    }  # fmt: skip
    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        if streamed:
            for e in range(E):
                shard = "gpt_oss_" + name.partition("_")[0]
                parameter.weight_loader(parameter, tensor[e], name, shard_id=shard, expert_id=e)
        else:
            parameter.weight_loader(
                parameter, tensor, weight_name=name, shard_id=None, expert_id=None
            )
    return Case(layer, w13, w2, (b13[:, 0::2], b13[:, 1::2], b2), GPT_OSS, interleaved=True)


def deepseek_v4(vllm, limit=10.0, config=None, **more):
    layer = vllm(quant_config=config or deepseek_v4_config(), swiglu_limit=limit, **more)
    w13, w2 = Packed("mxfp4", 2 * I, H, count=E), Packed("mxfp4", H, I, count=E)
    stored = {}
    for suffix, (first, second) in {
        "weight": (w13.bytes.view(torch.int8), w2.bytes.view(torch.int8)),
        "weight_scale": (w13.scale, w2.scale),
    }.items():
        stored[suffix] = (*first.chunk(2, dim=1), second)
    load_experts(layer, stored)
    return Case(layer, w13, w2, (None, None, None), Activation(limit=limit))


def compressed(vllm, group=32, weights={}, **more):
    """compressed-tensors' pack-quantized INT4, as Kimi-K2-Thinking has it."""
    layer = vllm(quant_config=compressed_config(group, weights), **more)
    w13, w2 = (
        Packed("int4", rows, columns, group, count=E) for rows, columns in ((2 * I, H), (H, I))
    )
    load_experts(
        layer,
        {
            "weight_packed": (*as_words(w13.bytes).chunk(2, dim=1), as_words(w2.bytes)),
            "weight_scale": (*w13.scale.chunk(2, dim=1), w2.scale),
        },
    )
    return Case(layer, w13, w2, (None, None, None), Activation())


@pytest.fixture
def marlin(monkeypatch):
    """0.26 asks for a GPU before it chooses the class that lets choose a kernel."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe as module,
    )

    name = "check_moe_marlin_supports_layer"
    monkeypatch.setattr(module, name, lambda *given, **named: True, raising=False)


CASES = {
    "gpt-oss": gpt_oss,
    "gpt-oss, expert by expert": lambda vllm: gpt_oss(vllm, streamed=True),
    "deepseek-v4": deepseek_v4,
    "int4": compressed,
    "int4 in groups of 128": lambda vllm: compressed(vllm, group=128),
}


def processed(case):
    case.layer.quant_method.process_weights_after_loading(case.layer)
    return case


def run(case, x, ids, weights):
    """What vLLM's kernel returns. Switchyard's class must fill all of a poisoned output with it."""
    layer = case.layer
    with torch.inference_mode():
        out = layer.quant_method.apply(layer, x, weights, ids.int(), None, None)
        poisoned = torch.full((T, H), math.nan, dtype=x.dtype)
        layer.quant_method.moe_kernel.fused_experts.apply(
            poisoned, x, layer.w13_weight, layer.w2_weight, weights, ids.int(), layer.activation, E,
            None, None, None, None, None, None, False,
        )  # fmt: skip
    assert torch.equal(out, poisoned)
    return out


@pytest.mark.parametrize("name", CASES)
def test_experts_of_four_bits(vllm, marlin, name):
    case = CASES[name](vllm)
    names = [parameter for parameter, _ in case.layer.named_parameters()]
    before = {parameter: getattr(case.layer, parameter) for parameter in names}
    addresses = {parameter: tensor.data_ptr() for parameter, tensor in before.items()}
    processed(case)
    given = batch()
    require_as_exact_as_torch(case, run(case, *given), *given)
    # The packed weights are those that were loaded: not widened, not moved, not written to.
    layer = case.layer
    w13 = before.get("w13_weight_packed", before.get("w13_weight"))
    assert w13.dtype in (torch.uint8, torch.int32) and w13.nbytes == E * 2 * I * H // 2
    assert {parameter: getattr(layer, parameter).data_ptr() for parameter in names} == addresses
    assert layer.w13_weight.data_ptr() == w13.data_ptr()
    assert torch.equal(layer.w13_weight.data.view(torch.uint8).flatten(), case.w13.bytes.flatten())
    assert layer.binding.experts.compute == "bf16"


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v4", "int4"])
def test_mistakes_would_be_seen(vllm, marlin, name):
    case = processed(CASES[name](vllm))
    x, ids, weights = batch()
    if name == "gpt-oss":
        x = x / 5  # so that biases matter, too; limits still do
    require_mistakes_seen(case, run(case, x, ids, weights), x, ids, weights)


def test_weights_loaded_anew(vllm):
    """Into the same tensors: scales and all, as a trainer does."""
    case = processed(deepseek_v4(vllm))
    given = batch()
    first = run(case, *given)
    other = deepseek_v4(vllm)
    for name, parameter in case.layer.named_parameters():
        parameter.data.copy_(getattr(other.layer, name).data)
    processed(case)
    case.w13, case.w2 = other.w13, other.w2
    expected = expected_of(case, *given)
    assert error(run(case, *given), expected) < 1e-2 < SEEN < error(first, expected)


def test_gpt_oss_in_bf16_is_switchyards_too(vllm):
    """Its own class of vLLM, without a quantisation."""
    from vllm.model_executor.models import gpt_oss as model

    own = getattr(model, "GptOssRoutedExperts", None)
    given = {"routed_experts_cls": own} if own else {}
    layer = vllm(activation="swigluoai", has_bias=True, **given)
    assert own is None or isinstance(layer, own)
    reference.load(layer)
    layer.quant_method.process_weights_after_loading(layer)
    x, ids, weights = batch()
    w13, b13 = layer.w13_weight, layer.w13_bias
    expected = experts(
        x, w13[:, 0::2], w13[:, 1::2], layer.w2_weight, ids, weights, GPT_OSS,
        (b13[:, 0::2], b13[:, 1::2], layer.w2_bias),
    )  # fmt: skip
    with torch.inference_mode():
        out = layer.quant_method.apply(layer, x, weights, ids.int(), None, None)
    assert error(out, expected) < 1e-2


def test_layers_are_vllms_own_unless_asked(vllm, monkeypatch):
    """gpt-oss' class, too: vLLM is asked for a kernel, and for this CPU it may have none."""
    from vllm.model_executor.layers.quantization import mxfp4

    asked = []
    select = mxfp4.select_mxfp4_moe_backend
    monkeypatch.setattr(
        mxfp4, "select_mxfp4_moe_backend", lambda *given: asked.append(given) or select(*given)
    )
    with contextlib.suppress(NotImplementedError, ValueError, AttributeError):
        gpt_oss(vllm, options=None)
    assert asked and not hasattr(asked[0][0], "switchyard_layer")


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "weights,text",
    [
        ({"symmetric": False}, "symmetric is False; Switchyard takes True"),
        ({"group_size": 64}, "group_size is 64; Switchyard takes 32 or 128"),
        ({"num_bits": 8}, "num_bits is 8; Switchyard takes 4"),
        (
            {"strategy": "channel", "group_size": None},
            "strategy is 'channel'; Switchyard takes 'group'",
        ),
    ],
)
def test_other_int4_is_refused(vllm, marlin, weights, text):
    with pytest.raises(
        Unsupported, match=f"model.layers.0.mlp.experts: compressed-tensors' {text}"
    ):
        compressed(vllm, weights=weights)


def test_columns_in_another_order_are_refused(vllm, marlin):
    """By the newest releases of vLLM themselves."""
    with pytest.raises((Unsupported, ValueError), match="actorder.*'group'"):
        compressed(vllm, weights={"actorder": "group"})


def test_int4_with_biases_is_refused(vllm, marlin):
    with pytest.raises(Unsupported, match="INT4 and have biases"):
        compressed(vllm, has_bias=True)


def test_gate_and_up_in_turns_by_the_other_loader_are_refused(vllm):
    with pytest.raises(Unsupported, match="and Mxfp4MoEMethod loads them one after the other"):
        deepseek_v4(vllm, limit=None, activation="swigluoai")


def test_a_cut_through_a_group_is_refused(vllm):
    with pytest.raises(Unsupported, match="a rank has 80 of the experts' 80 intermediate columns"):
        deepseek_v4(vllm, intermediate_size=80)


def test_eplb_is_refused(vllm):
    def balanced(config):
        config.parallel_config.enable_eplb = True

    with pytest.raises(Unsupported, match="--enable-eplb moves experts"):
        deepseek_v4(vllm, change=balanced, enable_eplb=True)


def test_another_class_for_mxfp4_is_refused(vllm):
    """It may repack, or load otherwise, than the classes that are known."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config, Mxfp4MoEMethod

    class Mxfp4Other(Mxfp4MoEMethod):
        pass

    class Config(Mxfp4Config):
        def get_quant_method(self, layer, prefix):
            assert isinstance(layer, RoutedExperts)
            return Mxfp4Other(layer.moe_config)

    with pytest.raises(Unsupported, match="quantised by Mxfp4Other"):
        deepseek_v4(vllm, config=Config())


def test_errors_of_the_library_come_while_weights_are_loaded(vllm):
    """A scale that is NaN, with the layer's name. Missing kernels for four bits are told here, too."""
    case = deepseek_v4(vllm)
    case.layer.w2_weight_scale.data[1, 3, 2] = 255
    with pytest.raises(
        InvalidArgument, match=r"model.layers.0.mlp.experts: experts\[1\].down's scale of row 3"
    ):
        processed(case)
    case.layer.w2_weight_scale.data[1, 3, 2] = 120
    case.layer.w2_weight_scale.data = case.layer.w2_weight_scale.data[:, :, 1:]
    with pytest.raises(ShapeMismatch, match="w2_scale is"):
        processed(case)
