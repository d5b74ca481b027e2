"""Models of transformers whose experts are held in four bits: gpt-oss and DeepSeek-V4."""

import copy
import dataclasses
import gc
import inspect
import types
import weakref

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

import switchyard
from reference import SMALL_MODEL, error, experts, routing
from switchyard import Activation, _hf

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")

E, I, H, K = 4, 96, 64, 2


# --------------------------------------------------------------------------- triton_kernels in host memory
# transformers takes them from the hub. These are the parts that it calls to lay weights out, and they do what those
# of a processor do: nothing.


class StridedLayout:
    def __init__(self, shape=None):
        pass

    def unswizzle_data(self, data):
        return data


class HopperMXValueLayout(StridedLayout):
    pass


@dataclasses.dataclass
class Storage:
    data: torch.Tensor
    layout: StridedLayout


@dataclasses.dataclass
class TritonTensor:
    storage: Storage
    shape: torch.Size


@dataclasses.dataclass
class PrecisionConfig:
    weight_scale: TritonTensor
    flex_ctx: object


def wrap(tensor, dtype=None):
    return TritonTensor(Storage(tensor, StridedLayout()), tensor.shape)


def convert(tensor, layout, **options):
    return TritonTensor(Storage(tensor.storage.data, layout()), tensor.shape)


def hub(value_layout=StridedLayout):
    def namespace(**names):
        return types.SimpleNamespace(**names)

    layouts = namespace(
        StridedLayout=StridedLayout, make_default_matmul_mxfp4_w_layout=lambda mx_axis: (value_layout, {})
    )
    return namespace(
        matmul_ogs=namespace(
            PrecisionConfig=PrecisionConfig, FlexCtx=lambda **names: names, InFlexData=lambda: None
        ),
        tensor=namespace(FP4="fp4", convert_layout=convert, wrap_torch_tensor=wrap),
        tensor_details=namespace(layout=layouts),
    )


@pytest.fixture
def kernels(monkeypatch):
    from transformers.integrations import hub_kernels

    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *names, **options: hub())
    # A PyTorch with CUDA names a GPU even where there is none.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *names: None)
    monkeypatch.setattr(mxfp4, "get_current_accelerator", lambda *names: None, raising=False)


@pytest.fixture
def in_f32():
    switchyard.register_with_transformers(compute="f32")
    yield
    switchyard.register_with_transformers()


def blocks_and_scales(rows, columns):
    blocks = torch.randint(0, 256, (E, rows, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(118, 124, (E, rows, columns // 32), dtype=torch.uint8)


def gpt_oss():
    config = transformers.GptOssConfig(
        **SMALL_MODEL | {"hidden_size": H, "num_experts_per_tok": K}, intermediate_size=I, num_local_experts=E,
        layer_types=["full_attention"] * 2,
    )
    config._experts_implementation = "eager"
    return transformers.GptOssForCausalLM(config).eval()


@torch.no_grad()
def pair(layout=StridedLayout):
    """gpt-oss with experts in fp32, and the same one as transformers loads it in MXFP4."""
    plain = gpt_oss()
    held = copy.deepcopy(plain)
    mxfp4.replace_with_mxfp4_linear(held, quantization_config=transformers.Mxfp4Config(dequantize=False))
    for layer, packed in zip(plain.model.layers, held.model.layers):
        ours, its = packed.mlp.experts, layer.mlp.experts
        assert type(ours).__name__ == "Mxfp4GptOssExperts"
        for name, rows, columns in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
            blocks, scales = blocks_and_scales(rows, columns)
            wide = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            getattr(its, name).copy_(wide)
            bias = getattr(its, name + "_bias").normal_()
            setattr(ours, name + "_bias", torch.nn.Parameter(bias.float().clone(), requires_grad=False))
            mxfp4.swizzle_mxfp4_convertops(blocks, scales, ours, name, "cpu", hub(layout))
    return plain, held


@torch.no_grad()
def test_gpt_oss_in_mxfp4(kernels, in_f32):
    plain, held = pair()
    assert switchyard.patch(held) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    ids = torch.randint(0, 96, (2, 9))
    expected = plain(ids).logits
    assert error(held(ids).logits, expected.double()) < 1e-5
    made = [made for module, made in _hf._made.items() if module in set(held.modules())]
    assert [m.layer._stored for m in made] == ["f4_e2m1"] * 2
    assert made[0].layer.order == "interleaved" and made[0].layer.activation.limit == 7
    assert made[0].layer.activation.alpha == pytest.approx(1.702)
    # The packed weights themselves are read.
    mlp = held.model.layers[0].mlp
    places = {address for m in made for _, address, _ in m.layer._keep.places}
    assert mlp.experts.gate_up_proj.storage.data.data_ptr() in places
    # All that a block returns.
    x = torch.randn(2, 5, H)
    out, logits = mlp(x)
    assert out.shape == x.shape
    assert torch.allclose(logits, plain.model.layers[0].mlp.router(x.view(-1, H))[0])
    tokens = plain.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(held.generate(ids, max_new_tokens=4, do_sample=False), tokens)


@torch.no_grad()
def test_gpt_oss_in_bf16_is_as_good_as_dequantised(kernels):
    plain, held = pair()
    exact = copy.deepcopy(plain.bfloat16()).float()
    held = held.bfloat16()
    switchyard.patch(held)
    x = torch.randn(33, H).bfloat16()
    for block, its, right in zip(held.model.layers, plain.model.layers, exact.model.layers):
        _, weights, ids = its.mlp.router(x)
        expected = right.mlp.experts(x.float(), ids, weights.float()).double()
        of_eager = error(its.mlp(x[None])[0][0], expected)
        assert error(block.mlp(x[None])[0][0], expected) < 2 * of_eager
        assert _hf._made[block.mlp.experts].layer.compute == "bf16"


@torch.no_grad()
def test_models_that_are_gone_leave_no_layer(kernels):
    held = pair()[1]
    switchyard.patch(held)
    held(torch.randint(0, 96, (1, 3)))
    experts = weakref.ref(held.model.layers[0].mlp.experts)
    assert experts() in _hf._made
    del held
    gc.collect()
    assert experts() is None


@torch.no_grad()
def test_weights_of_gpt_oss_that_change(kernels, in_f32):
    plain, held = pair()
    switchyard.patch(held)
    x = torch.randn(1, 7, H)
    packed, its = held.model.layers[0].mlp, plain.model.layers[0].mlp

    def agree(block=packed):
        assert error(block(x)[0], its(x)[0].double()) < 1e-5

    agree()
    copied = copy.deepcopy(held)
    # In place: of the packed weights, of scales, of biases.
    packed.experts.gate_up_proj.storage.data.bitwise_xor_(0x88)
    its.experts.gate_up_proj.neg_()
    agree()
    packed.experts.down_proj_precision_config.weight_scale.storage.data.add_(1)
    its.experts.down_proj.mul_(2)
    agree()
    for block in (packed, its):
        block.experts.down_proj_bias.add_(1)
    agree()
    # Other tensors.
    storage = packed.experts.gate_up_proj.storage
    storage.data = (storage.data.transpose(1, 2) ^ 0x88).transpose(1, 2)
    its.experts.gate_up_proj.neg_()
    agree()
    blocks, scales = blocks_and_scales(H, I)
    mxfp4.swizzle_mxfp4_convertops(blocks, scales, packed.experts, "down_proj", "cpu", hub())
    its.experts.down_proj.copy_(mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    agree()
    packed.experts.limit = its.experts.limit = 0.5
    agree()
    # A copy of the model has weights of its own.
    its.load_state_dict(pair()[0].model.layers[0].mlp.state_dict())
    with pytest.raises(AssertionError):
        agree(copied.model.layers[0].mlp)


@torch.no_grad()
def test_gpt_oss_that_cannot_be_read(kernels):
    def refused(model, text, **more):
        with pytest.raises(switchyard.Unsupported) as caught:
            switchyard.patch(model, **more)
        assert text in str(caught.value)

    _, held = pair(HopperMXValueLayout)
    refused(held, "Mxfp4GptOssExperts.gate_up_proj is in the HopperMXValueLayout of a GPU's kernel")
    _, held = pair()
    block = held.model.layers[1].mlp
    block.experts.gate_up_proj.storage.data = block.experts.gate_up_proj.storage.data.int()
    refused(held, "gate_up_proj is int32 [4, 32, 192], but uint8 [E, bytes, rows]")
    assert switchyard.patch(held, partial=True) == ["model.layers.0.mlp"]
    _, held = pair()
    held.model.layers[0].mlp.experts.down_proj_precision_config = None
    refused(held, "model.layers.0.mlp: Mxfp4GptOssExperts.down_proj_precision_config is None: its scales are not there")
    _, held = pair()
    experts = held.model.layers[0].mlp.experts
    experts.gate_up_proj = torch.nn.Parameter(torch.zeros(E, 2 * I, H // 2, dtype=torch.uint8), requires_grad=False)
    refused(held, "gate_up_proj is no tensor of triton_kernels: another kernel has repacked it")
    _, held = pair()
    held.model.layers[0].mlp.forward = lambda x: x
    refused(held, "was already replaced, by a function")
    refused(torch.nn.Sequential(held.model.layers[1].mlp.experts), "the block around it")
    # Its forward() is replaced once more, as when layers are patched one by one.
    _, held = pair()
    for _ in range(2):
        assert switchyard.patch(held) == ["model.layers.0.mlp", "model.layers.1.mlp"]


# ----------------------------------------------------------------------------------- DeepSeek-V4


def deepseek_v4(**options):
    """FP8Experts with weights in MXFP4, as DeepSeek-V4's are held, with random codes."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    config = transformers.Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K, swiglu_limit=10.0
    )
    config._experts_implementation = "switchyard"
    # Which of both says it depends on the version of transformers.
    config.expert_dtype = "fp4"
    if "expert_dtype" in inspect.signature(FP8Experts.__init__).parameters:
        options["expert_dtype"] = "fp4"
    cls = use_experts_implementation(
        experts_class=type("Fp8Experts", (FP8Experts,), {}), experts_interface=ALL_FP8_EXPERTS_FUNCTIONS
    )
    module = cls(config, **({"block_size": (128, 128), "scale_fmt": "ue8m0"} | options))
    exact = []
    for name in ("gate_up_proj", "down_proj"):
        codes, scales = getattr(module, name), getattr(module, name + "_scale_inv")
        assert codes.dtype == torch.int8
        blocks, exponents = blocks_and_scales(codes.shape[1], codes.shape[2] * 2)
        codes.data.copy_(blocks.flatten(2).view(torch.int8))
        if scales.dtype != torch.float32:
            scales.data.copy_(exponents.view(scales.dtype))
        exact.append(mxfp4.convert_moe_packed_tensors(blocks, exponents, dtype=torch.float64).transpose(1, 2))
    return module, exact


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_deepseek_v4_in_mxfp4(in_f32, mode):
    module, (gate_up, down) = deepseek_v4()
    x, (ids, weights) = torch.randn(9, H), routing(9, E, K)
    with mode():
        out = module(x, ids, weights).detach()
    expected = experts(x, *gate_up.chunk(2, 1), down, ids, weights, Activation("silu", limit=10.0))
    assert error(out, expected) < 1e-5
    assert _hf._made[module].layer._stored == "f4_e2m1"
    with torch.no_grad():
        # Scales that change: in place, and as another parameter.
        module.down_proj_scale_inv.view(torch.uint8).add_(1)
        assert torch.equal(module(x, ids, weights), 2 * out)
        less = (module.down_proj_scale_inv.view(torch.uint8) - 2).view(torch.float8_e8m0fnu)
        module.down_proj_scale_inv = torch.nn.Parameter(less, requires_grad=False)
        assert torch.equal(module(x, ids, weights), out / 2)


@torch.no_grad()
def test_deepseek_v4_that_cannot_be_read(in_f32):
    module, _ = deepseek_v4(scale_fmt="float")
    with pytest.raises(switchyard.Unsupported, match="gate_up_proj_scale_inv is float32, but scales of MXFP4"):
        switchyard.patch(torch.nn.ModuleList([module]))
    module, _ = deepseek_v4()
    module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj.view(torch.uint8), requires_grad=False)
    with pytest.raises(switchyard.Unsupported, match="gate_up_proj is uint8, packed in a format"):
        switchyard.patch(torch.nn.ModuleList([module]))
    module, _ = deepseek_v4(activation_scheme="static")
    with pytest.raises(switchyard.Unsupported, match="activation_scale"):
        switchyard.patch(torch.nn.ModuleList([module]))
