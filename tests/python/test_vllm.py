"""The plugin for vLLM: what needs no vLLM, always; its classes in vLLM's own layer on the CPU engine,
where vLLM can be imported, of 0.26 to 0.33. No GPU is used, and vLLM's own kernels are not: what
Switchyard computes is compared with fp64, with the activation by vLLM where it has one in torch."""

import gc
import importlib
import re
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import switchyard.vllm as plugin
import reference
from conftest import ROOT, installed, python
from reference import Packed, error, experts, fill_with_fp8, fp8_experts, routing
from switchyard import Activation, InvalidArgument, Unsupported
from switchyard._serving import Binding, Options, local_ids, nccl_ctas, refuse_too_few_sms
from vllm_ranks import one_rank

E, H, I, K, T = 8, 256, 128, 2, 17
BF16_ERROR = 1e-2

# ----------------------------------------------------------------------------- without vLLM


@pytest.mark.parametrize("module,group", [("vllm", "vllm.general_plugins"), ("sglang", "sglang.srt.plugins")])
def test_the_entry_point_names_what_is_there(module, group):
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf'\[project.entry-points."{group}"\]\nswitchyard = "(.*):(.*)"', text)
    assert found is not None
    named, function = found.groups()
    assert getattr(importlib.import_module(named), function) is importlib.import_module(f"switchyard.{module}").register


@pytest.mark.parametrize("module", ["vllm", "sglang"])
def test_importing_a_plugin_imports_no_server(module):
    python("-c", f"import sys, switchyard.{module}; assert not {{'{module}', 'torch'}} & set(sys.modules)")


@pytest.mark.parametrize("module", ["vllm", "sglang"])
def test_an_unknown_framework_is_left_as_it_is(tmp_path, module):
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text("")
    script = (
        "import logging, sys; logging.basicConfig(); "
        f"import switchyard.{module} as plugin; plugin.register(); "
        f"assert [m for m in sys.modules if m.startswith('{module}')] == ['{module}'], sys.modules"
    )
    done = python("-c", script, path=[tmp_path])
    assert "does not know the interface" in done.stderr and f"No module named '{module}." in done.stderr


def test_options_are_read_from_the_configuration():
    assert plugin.options_of(None) is None
    assert plugin.options_of(SimpleNamespace(additional_config={})) is None
    assert plugin.options_of(SimpleNamespace(additional_config={"switchyard": {}})) == Options()
    given = {"max_tokens": 64, "reserved_sms": 20, "bad_ids": "raise", "deadline": 3}
    found = plugin.options_of(SimpleNamespace(additional_config={"switchyard": given}))
    assert found == Options(max_tokens=64, reserved_sms=20, bad_ids="raise", deadline=3)


@pytest.mark.parametrize(
    "given,text",
    [
        (True, "pass an object"),
        ({"reserved_sm": 8}, "'reserved_sm'; it takes max_tokens, reserved_sms"),
        ({"reserved_sms": "8"}, "reserved_sms is '8'"),
        ({"reserved_sms": True}, "reserved_sms is True"),
        ({"max_tokens": 0}, "from 1 on"),
        ({"bad_ids": "ignore"}, "'skip' or 'raise'"),
        ({"deadline": -1.0}, "0 or more"),
        ({"refresh_in_graphs": 1}, "true or false"),
    ],
)
def test_options_that_cannot_be_are_refused(given, text):
    with pytest.raises(InvalidArgument, match=re.escape(text)):
        plugin.options_of(SimpleNamespace(additional_config={"switchyard": given}))


def test_names_of_activations():
    assert plugin.activation_of("silu", None, 1, 0) == (Activation(), "gate_up")
    assert plugin.activation_of("silu", 10.0, 1, 0) == (Activation(limit=10.0), "gate_up")
    assert plugin.activation_of("swigluoai", None, 1, 0) == (
        Activation(alpha=1.702, limit=7.0, up_bias=1.0),
        "interleaved",
    )
    assert plugin.activation_of("swigluoai_uninterleave", 5.0, 1.5, 1.0) == (
        Activation(alpha=1.5, limit=5.0, up_bias=1.0),
        "gate_up",
    )
    assert plugin.activation_of("relu2_no_mul", None, 1, 0) == (Activation("relu2", gated=False), "gate_up")
    assert plugin.activation_of("situ", None, 1, 0, (4.0, None)) == (Activation("situ", alpha=4.0), "gate_up")
    assert plugin.activation_of("situ", None, 1, 0, (4.0, 25.0)) == (
        Activation("situ", alpha=4.0, limit=25.0),
        "gate_up",
    )
    with pytest.raises(Unsupported, match="situ"):
        plugin.activation_of("situ", 7.0, 1, 0, (4.0, 25.0))
    for name in ("situ", "swiglustep", "relu2", "identity_no_mul"):
        with pytest.raises(Unsupported, match=name):
            plugin.activation_of(name, None, 1, 0)


def configs(device="cuda", **changes):
    """What refuse() reads of a VllmConfig and a FusedMoEConfig: one GPU, nothing out of the ordinary."""
    parallel = SimpleNamespace(use_ubatching=False, enable_elastic_ep=False, tensor_parallel_size=1)
    moe_parallel = SimpleNamespace(
        dp_size=1,
        ep_size=1,
        tp_size=1,
        use_all2all_kernels=False,
        use_ag_rs_all2all_kernels=False,
        all2all_backend="allgather_reducescatter",
    )
    moe = SimpleNamespace(
        is_lora_enabled=False, max_num_tokens=100, moe_parallel_config=moe_parallel, moe_backend="auto"
    )
    for name, value in changes.items():
        for holder in (parallel, moe_parallel, moe):
            if hasattr(holder, name):
                setattr(holder, name, value)
    vllm = SimpleNamespace(
        parallel_config=parallel,
        device_config=SimpleNamespace(device_type=device),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=300),
    )
    return vllm, moe


@pytest.mark.parametrize(
    "changes,text",
    [
        ({"moe_backend": "triton"}, "--moe-backend is 'triton'"),
        ({"use_ubatching": True}, "two-batch overlap"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"enable_elastic_ep": True}, "elastic"),
        ({"use_all2all_kernels": True, "all2all_backend": "deepep_low_latency"}, "deepep_low_latency"),
        ({"all2all_backend": "passthrough"}, "passthrough"),
        ({"dp_size": 2, "ep_size": 2}, "reserved_sms is 0"),
        ({"device": "tpu"}, "'tpu'"),
    ],
)
def test_what_cannot_be_served_is_refused(changes, text):
    plugin.refuse(Options(), *configs())
    with pytest.raises(Unsupported, match=text):
        plugin.refuse(Options(), *configs(**changes))


def test_reserved_sms_below_what_nccl_takes_are_refused():
    assert nccl_ctas({}) == 32
    assert nccl_ctas({"NCCL_MAX_CTAS": "8", "NCCL_MAX_NCHANNELS": "4"}) == 8
    assert nccl_ctas({"NCCL_MAX_CTAS": "none", "NCCL_MAX_NCHANNELS": "4"}) == 4
    refuse_too_few_sms(0, 1, "reserved_sms", {})
    refuse_too_few_sms(32, 8, "reserved_sms", {})
    refuse_too_few_sms(8, 8, "reserved_sms", {"NCCL_MAX_CTAS": "8"})
    with pytest.raises(Unsupported, match="up to 32 SMs, but reserved_sms is 31"):
        refuse_too_few_sms(31, 2, "reserved_sms", {})


def test_room_for_the_tokens_of_all_ranks():
    assert plugin.capacity(*configs()) == 300
    assert plugin.capacity(*configs(dp_size=4)) == 1200


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_other_ranks_experts_become_none(dtype):
    ids = torch.tensor([[0, 3], [-1, 5], [2, 6], [100, -7]], dtype=dtype)
    expert_map = torch.tensor([-1, -1, 0, 1, 2, -1], dtype=torch.int32)
    assert local_ids(ids, expert_map).tolist() == [[-1, 1], [-1, -1], [0, -1], [-1, -1]]
    assert local_ids(ids, None) is ids


def test_a_binding_follows_the_weights():
    x = torch.randn(T, H)
    ids, weights = routing(T, E, K)
    binding = Binding(Options(), activation=Activation(), order="gate_up", top_k=K, max_tokens=T)

    def tensors():
        return torch.randn(E, 2 * I, H) / 16, torch.randn(E, H, I) / 16, torch.randn(E, 2 * I), torch.randn(E, H)

    def agrees(w13, w2, b13, b2):
        layer = binding.bind(w13, w2, w13_bias=b13, w2_bias=b2)
        gate, up = w13.chunk(2, dim=1)
        biases = (*b13.chunk(2, dim=1), b2)
        expected = experts(x, gate, up, w2, ids, weights, Activation(), biases)
        return error(layer(x, ids, weights), expected) < 1e-5

    first, second = tensors(), tensors()
    assert agrees(*first)
    made = binding.experts
    assert agrees(*second)  # other tensors
    assert agrees(*first)
    for old, new in zip(first, second):
        old.copy_(new)
    binding.weights_loaded(*first[:2], w13_bias=first[2], w2_bias=first[3])
    assert agrees(*first)  # the same tensors with other values
    assert binding.experts is made


def test_a_reload_reaches_what_calls_nothing():
    """Weights loaded into other tensors, as vLLM does, whose values it copies into the bound ones afterwards: a
    captured graph, here the layer itself, must compute with the new scales."""
    def tensors():
        w13 = (torch.randn(E, 2 * I, H) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        w2 = (torch.randn(E, H, I) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        # A CPU layer keeps copies of scales that are not fp32.
        drawn = [2.0 ** torch.randint(-10, -6, (E, n // 128, k // 128)) for n, k in ((2 * I, H), (H, I))]
        return w13, w2, *(scale.to(torch.float8_e8m0fnu) for scale in drawn)

    x, (ids, weights) = torch.randn(T, H), routing(T, E, K)
    binding = Binding(Options(), activation=Activation(), order="gate_up", top_k=K, max_tokens=T)
    w13, w2, s13, s2 = tensors()
    binding.weights_loaded(w13, w2, w13_scale=s13, w2_scale=s2)
    layer = binding.experts
    before = layer(x, ids, weights)
    assert binding.reads(s13) and not binding.reads(w13)
    _, _, s13_new, s2_new = tensors()
    binding.weights_loaded(torch.zeros(0), torch.zeros(0), w13_scale=s13_new, w2_scale=s2_new)
    after = layer(x, ids, weights)
    assert (s13.float() == s13_new.float()).all() and (s2.float() == s2_new.float()).all()
    fresh = Binding(Options(), activation=Activation(), order="gate_up", top_k=K, max_tokens=T)
    fresh.weights_loaded(w13, w2, w13_scale=s13_new, w2_scale=s2_new)
    assert error(after, fresh.experts(x, ids, weights).double()) < 1e-6 < error(after, before.double())


def test_experts_that_move_in_place_without_a_word():
    """With scales of which a CPU layer has copies, as a layer on a GPU has of all."""
    w13 = (torch.randn(E, 2 * I, H) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    w2 = (torch.randn(E, H, I) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    drawn = [2.0 ** torch.randint(-10, -4, (E, n // 128, k // 128)) for n, k in ((2 * I, H), (H, I))]
    small = dict(zip(("w13_scale", "w2_scale"), (scale.to(torch.float8_e8m0fnu) for scale in drawn)))
    x, (ids, weights) = torch.randn(T, H), routing(T, E, K)
    results = {}
    for told in (True, False):
        binding = Binding(
            Options(), activation=Activation(), order="gate_up", top_k=K, max_tokens=T, refresh_each_pass=told
        )
        arrays = [array.clone() for array in (w13, w2, *small.values())]
        named = dict(zip(small, arrays[2:]))
        before = binding.bind(*arrays[:2], **named)(x, ids, weights)
        for array in arrays:
            bytes_ = array.view(torch.uint8)
            bytes_.copy_(bytes_.roll(1, 0))
        # Expert e is at e + 1 now.
        after = binding.bind(*arrays[:2], **named)(x, (ids + 1) % E, weights)
        results[told] = error(after, before.double())
    assert results[True] < 1e-6 < 1e-2 < results[False]


def test_a_reload_of_packed_weights_reaches_the_bound_ones():
    """A layer on a GPU has a copy of four bits, too, which must follow what a server loads elsewhere."""
    x, (ids, weights) = torch.randn(T, H), routing(T, E, K)
    binding = Binding(
        Options(), activation=Activation(), order="gate_up", top_k=K, max_tokens=T, weight_format="mxfp4"
    )
    first, second = ([Packed("mxfp4", 2 * I, H, count=E), Packed("mxfp4", H, I, count=E)] for _ in range(2))
    for w13, w2 in (first, second):
        binding.weights_loaded(w13.bytes, w2.bytes, w13_scale=w13.scale, w2_scale=w2.scale)
        expected = experts(x, *w13.exact.chunk(2, dim=1), w2.exact, ids, weights, Activation())
        assert error(binding.experts(x, ids, weights), expected) < BF16_ERROR
    assert binding.reads(first[0].bytes) and binding.reads(first[1].scale) and not binding.reads(second[0].bytes)
    assert torch.equal(first[0].bytes, second[0].bytes)


def test_layers_of_one_form_share_memory(monkeypatch):
    """As on GPUs, and also one that became too small for a call."""
    from switchyard import _serving

    monkeypatch.setattr(_serving, "_shares_memory", lambda tensor: True)
    monkeypatch.setattr(_serving, "made", _serving.Made())
    x, (ids, weights) = torch.randn(T, H), routing(T, E, K)

    def bound(dtype=torch.float32):
        binding = Binding(Options(num_threads=1), activation=Activation(), order="gate_up", top_k=K, max_tokens=T)
        w13, w2 = (torch.randn(shape).to(dtype) / 16 for shape in ((E, 2 * I, H), (E, H, I)))
        return binding, w13, w2, binding.bind(w13, w2)

    bindings = [bound() for _ in range(3)]
    for number, (binding, w13, w2, layer) in enumerate(bindings):
        expected = experts(x, *w13.chunk(2, dim=1), w2, ids, weights, Activation())
        assert error(layer(x, ids, weights), expected) < 1e-5
        assert layer.stats().epoch == number + 1
    workspace = bindings[0][0]._workspace
    assert _serving.made.layers == 3 and _serving.made.bytes == layer.workspace_bytes
    assert {binding._workspace for binding, *_ in bindings} == {workspace}
    assert bound(torch.bfloat16)[0]._workspace.compute == "bf16"
    binding, w13, w2, layer = bindings[0]
    larger = binding.bind(w13, w2, tokens=3 * T)
    assert larger.max_tokens >= 3 * T and binding._workspace is not workspace
    layer(x, ids, weights)
    assert layer.stats().epoch == 4 and larger.stats().epoch == 0
    # Memory goes with the last layer in it.
    kept = len(_serving._workspaces)
    del bindings, binding, layer, larger, workspace
    gc.collect()
    assert len(_serving._workspaces) < kept


# -------------------------------------------------------------------------------- with vLLM


@pytest.fixture(scope="module")
def vllm():
    return one_rank()


def load(layer):
    """As a loader of vLLM does."""
    reference.load(layer)
    layer.quant_method.process_weights_after_loading(layer)


def run(layer, x, ids, weights):
    with torch.inference_mode():
        return layer.quant_method.apply(layer, x, weights, ids.int(), None, None)


def batch():
    return torch.randn(T, H, dtype=torch.bfloat16), *routing(T, E, K)


def test_vllms_layer_is_vllms_own_unless_asked(vllm):
    from switchyard._vllm import SwitchyardExperts

    assert vllm().quant_method.experts_cls is SwitchyardExperts
    own = vllm(options=None).quant_method
    # Before 0.33 vLLM had no class of experts for CPUs.
    kernel = own.experts_cls.__module__ if own.experts_cls else own.unquantized_backend.name
    assert kernel == "CPU" or "cpu_moe" in kernel


@pytest.mark.parametrize("dtype,bound", [(torch.bfloat16, BF16_ERROR), (torch.float32, 1e-5)])
def test_vllms_layer_computes_as_the_reference(vllm, dtype, bound):
    layer = vllm(params_dtype=dtype)
    load(layer)
    x, ids, weights = batch()
    x = x.to(dtype)
    before = layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()
    expected = experts(x, *layer.w13_weight.chunk(2, dim=1), layer.w2_weight, ids, weights, Activation())
    for _ in range(2):
        out = run(layer, x, ids, weights)
        assert out.dtype == dtype and error(out, expected) < bound
    assert before == (layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr())


@pytest.mark.parametrize(
    "name,more",
    [
        ("silu", {}),
        ("silu", {"swiglu_limit": 1.0}),
        ("gelu", {}),
        ("gelu_tanh", {}),
        ("swigluoai", {"has_bias": True}),
        ("swigluoai_uninterleave", {"swiglu_limit": 2.0, "swiglu_alpha": 1.3, "swiglu_beta": 0.5}),
        ("silu_no_mul", {}),
        ("relu2_no_mul", {}),
        ("situ", {"activation_situ_beta": 2.0, "activation_situ_linear_beta": 1.5}),
        ("situ", {"activation_situ_beta": 2.0, "activation_situ_linear_beta": 0.0}),
    ],
)
def test_activations_are_vllms(vllm, monkeypatch, name, more):
    from vllm.model_executor.layers import activation as vllm_activation
    from vllm.model_executor.layers.fused_moe import config as vllm_moe_config

    if name.endswith("_no_mul"):
        # vLLM refuses experts without a gate on CPUs, whoever computes them.
        platform = SimpleNamespace(is_cuda_alike=lambda: True)
        monkeypatch.setattr(vllm_moe_config, "current_platform", platform)

    ckpt_names = ("up_proj", "down_proj", None) if name.endswith("_no_mul") else ("gate", "down", "up")
    layer = vllm(activation=name, ckpt_names=ckpt_names, params_dtype=torch.float32, **more)
    load(layer)
    x, ids, weights = batch()
    x = x.float()

    def native(h):
        def class_(kind, *arguments):
            return getattr(vllm_activation, kind).forward_native(SimpleNamespace(**dict(arguments)), h)

        if name == "silu" and more:
            h = torch.cat((h[:, :I].clamp(max=1.0), h[:, I:].clamp(-1.0, 1.0)), dim=1)
        if name == "silu":
            return vllm_activation.SiluAndMul.forward_native(h)
        if name == "gelu":
            return class_("GeluAndMul", ("approximate", "none"))
        if name == "gelu_tanh":
            return class_("GeluAndMul", ("approximate", "tanh"))
        if name == "swigluoai":
            return class_("SwigluOAIAndMul", ("alpha", 1.702), ("limit", 7.0))
        if name == "swigluoai_uninterleave":
            # vLLM has it as a CUDA kernel only: its formula.
            gate, up = h[:, :I].clamp(max=2.0), h[:, I:].clamp(-2.0, 2.0)
            return gate * torch.sigmoid(1.3 * gate) * (up + 0.5)
        if name == "situ":
            gate, up = h[:, :I], h[:, I:]
            bound = more["activation_situ_linear_beta"]
            return 2.0 * torch.tanh(gate / 2.0) * torch.sigmoid(gate) * (bound * torch.tanh(up / bound) if bound else up)
        return torch.relu(h).square() if name == "relu2_no_mul" else torch.nn.functional.silu(h)

    expected = torch.zeros(T, H, dtype=torch.float64)
    w13, w2 = layer.w13_weight, layer.w2_weight
    for t in range(T):
        for k in range(K):
            e = ids[t, k]
            h = x[t].double() @ w13[e].double().T
            if "has_bias" in more:
                h += layer.w13_bias[e]
            y = native(h[None].float()).double()[0] @ w2[e].double().T
            if "has_bias" in more:
                y += layer.w2_bias[e]
            expected[t] += weights[t, k] * y
    assert error(run(layer, x, ids, weights), expected) < 1e-5


def test_slots_of_zero_experts_hide_no_expert(vllm):
    """LongCat's router gives slots of its zero experts the id 0 and the weight 0."""
    layer = vllm(params_dtype=torch.float32)
    load(layer)
    x, ids, weights = batch()
    ids, weights = ids.clone(), weights.clone()
    ids[:, -1], weights[:, -1] = 0, 0.7
    ids[:, 0], weights[:, 0] = 0, 0
    out = run(layer, x.float(), ids, weights)
    w13 = layer.w13_weight.chunk(2, dim=1)
    expected = experts(x.float(), *w13, layer.w2_weight, ids, weights, Activation())
    assert error(out, expected) < 1e-5


def test_an_activation_that_is_not_there_is_refused(vllm):
    with pytest.raises(Unsupported, match="model.layers.0.mlp.experts: activation 'swiglustep'"):
        vllm(activation="swiglustep")


def fp8_layer(vllm, **more):
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    given = {"is_checkpoint_fp8_serialized": True, "activation_scheme": "dynamic"}
    return vllm(quant_config=Fp8Config(**given | more))


def test_fp8_in_blocks(vllm):
    layer = fp8_layer(vllm, weight_block_size=[128, 128])
    exact = fill_with_fp8(layer)
    layer.quant_method.process_weights_after_loading(layer)
    x, ids, weights = batch()
    expected = experts(x, *exact[0].chunk(2, dim=1), exact[1], ids, weights, Activation())
    # Both products round their activations to e4m3, with 3 bits of mantissa: the same, simulated.
    simulated = fp8_experts(x, *exact[0].chunk(2, dim=1), exact[1], ids, weights)
    assert error(run(layer, x, ids, weights), expected) < 2 * error(simulated, expected)
    # Reloaded, as vLLM does for reinforcement learning: other values, the same tensors.
    layer.w2_weight_scale_inv.data.mul_(3)
    layer.quant_method.process_weights_after_loading(layer)
    assert error(run(layer, x, ids, weights), 3 * expected) < 2 * error(simulated, expected)


def test_a_trainer_that_writes_scales_through_the_loader(vllm, monkeypatch):
    layer = fp8_layer(vllm, weight_block_size=[128, 128])
    for name in ("w13", "w2"):
        getattr(layer, f"{name}_weight").data.zero_()
        getattr(layer, f"{name}_weight_scale_inv").data.fill_(1)
    layer.quant_method.process_weights_after_loading(layer)
    if not hasattr(layer.w2_weight_scale_inv, "quant_method"):
        pytest.skip("this vLLM's own loader takes no scales of a layer that was processed")
    refreshed = []
    monkeypatch.setattr(layer.binding, "refresh", lambda: refreshed.append(1))
    for name, shards in (("w13", ("w1", "w3")), ("w2", ("w2",))):
        matrix, scale = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale_inv")
        for shard in shards:
            part = matrix[0].chunk(len(shards))[0]
            layer.weight_loader(matrix, part.clone(), f"{name}_weight", shard, 0)
            assert not refreshed  # it is read where it is
            part = scale[0].chunk(len(shards))[0]
            layer.weight_loader(scale, 3 * torch.ones_like(part), f"{name}_weight_scale_inv", shard, 0)
            assert refreshed and (scale[0] == 3).any()
            refreshed.clear()


@pytest.mark.parametrize("block", [None, [64, 64]])
def test_other_fp8_is_refused(vllm, block):
    with pytest.raises(Unsupported, match="experts: the experts are quantised by Fp8MoEMethod"):
        fp8_layer(vllm, weight_block_size=block)


def test_another_quantisation_is_refused(vllm):
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class Other(UnquantizedFusedMoEMethod):
        def __init__(self, moe):
            self.experts_cls = None

    class OtherConfig(QuantizationConfig):
        get_name = get_supported_act_dtypes = get_min_capability = None
        get_config_filenames = from_config = None

        def get_quant_method(self, layer, prefix):
            return Other.__new__(Other)

    OtherConfig.__abstractmethods__ = frozenset()
    with pytest.raises(Unsupported, match="quantised by Other"):
        vllm(quant_config=OtherConfig())


def test_padding_and_other_ranks_experts(vllm):
    """Global ids with a map, as under expert parallelism; -1 and garbage where vLLM pads."""
    layer = vllm()
    load(layer)
    x, _, weights = batch()
    # This rank's experts are 8 to 15 of 24.
    ids = torch.stack([torch.randperm(24)[:K] for _ in range(T)])
    ids[3, 0], ids[5], ids[6, 1] = -1, -1, 10_000
    expert_map = torch.full((24,), -1, dtype=torch.int32)
    expert_map[8:16] = torch.arange(8)
    layer._expert_map, layer.global_num_experts = expert_map, 24
    x[5] = float("nan")
    out = run(layer, x, ids, weights)
    assert (out[5] == 0).all() or out[5].isnan().all()
    x[5] = 0
    local = torch.where((ids >= 8) & (ids < 16), ids - 8, -1)
    expected = experts(x, *layer.w13_weight.chunk(2, dim=1), layer.w2_weight, local, weights, Activation())
    keep = torch.arange(T) != 5
    assert error(out[keep], expected[keep]) < BF16_ERROR


def test_router_weights_on_the_input(vllm):
    layer = vllm(top_k=1, apply_router_weight_on_input=True)
    load(layer)
    x, ids, weights = batch()
    ids, weights = ids[:, :1], weights[:, :1]
    scaled = x * weights.to(x.dtype)
    ones = torch.ones_like(weights)
    expected = experts(scaled, *layer.w13_weight.chunk(2, dim=1), layer.w2_weight, ids, ones, Activation())
    assert error(run(layer, x, ids, weights), expected) < BF16_ERROR


def test_weights_loaded_anew(vllm):
    """In place; and as vLLM's layerwise reload does it: new tensors are processed, and their values
    copied into the old ones, which take their place again."""
    layer = vllm(has_bias=True)
    load(layer)
    x, ids, weights = batch()

    def agrees():
        biases = (*layer.w13_bias.chunk(2, dim=1), layer.w2_bias)
        expected = experts(
            x, *layer.w13_weight.chunk(2, dim=1), layer.w2_weight, ids, weights, Activation(), biases
        )
        return error(run(layer, x, ids, weights), expected) < BF16_ERROR

    assert agrees()
    load(layer)
    assert agrees()
    old = dict(layer.named_parameters())
    for name, parameter in old.items():
        setattr(layer, name, torch.nn.Parameter(torch.empty_like(parameter), requires_grad=False))
    load(layer)
    for name, parameter in old.items():
        parameter.data.copy_(getattr(layer, name).data)
        setattr(layer, name, parameter)
    assert agrees()


def test_batch_invariance_is_refused(vllm, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(Unsupported, match="batch invariance"):
        vllm()


def test_scales_and_biases_are_laid_out_in_each_pass_under_eplb(vllm):
    """vLLM moves experts in place, and tells no layer."""

    def balanced(config):
        config.parallel_config.enable_eplb = True

    given = {"change": balanced, "enable_eplb": True}
    assert not vllm(**given).binding.refresh_each_pass
    assert not vllm(has_bias=True).binding.refresh_each_pass
    layer = vllm(has_bias=True, **given)
    load(layer)
    x, ids, weights = batch()
    for _ in range(2):
        biases = (*layer.w13_bias.chunk(2, dim=1), layer.w2_bias)
        expected = experts(
            x, *layer.w13_weight.chunk(2, dim=1), layer.w2_weight, ids, weights, Activation(), biases
        )
        assert error(run(layer, x, ids, weights), expected) < BF16_ERROR
        for tensor in (layer.w13_weight, layer.w2_weight, layer.w13_bias, layer.w2_bias):
            tensor.data.copy_(tensor.data.roll(1, 0))


def test_what_vllm_is_configured_for_is_refused(vllm):
    def overlap(config):
        config.parallel_config.enable_dbo = True

    with pytest.raises(Unsupported, match="two-batch overlap"):
        vllm(change=overlap)

    def lora(config):
        config.lora_config = SimpleNamespace()

    with pytest.raises(Unsupported, match="LoRA"):
        vllm(change=lora)
    with pytest.raises(InvalidArgument, match="reserved_sm'"):
        vllm(options={"reserved_sm": 1})


def test_an_unknown_interface_is_left_as_it_is(vllm, monkeypatch, caplog):
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from switchyard import _vllm

    assert _vllm.missing() is None
    other = lambda self, prefix: None
    signature = _vllm._SIGNATURES[RoutedExperts._get_quant_method]
    monkeypatch.setitem(_vllm._SIGNATURES, other, signature)
    with caplog.at_level("WARNING", "vllm.switchyard"):
        plugin.register()
    assert "does not know the interface of this vLLM" in caplog.text and "takes self, prefix" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(_vllm.SwitchyardExperts, "__abstractmethods__", frozenset({"refine"}))
    assert "not known: refine" in _vllm.missing()
    assert issubclass(_vllm.SwitchyardExperts, mk.FusedMoEExpertsModular)


def test_vllm_finds_the_entry_point(vllm, tmp_path):
    """As of an installed package, by vLLM's own loader."""
    installed(tmp_path)
    script = (
        "from vllm.plugins import load_general_plugins; load_general_plugins(); "
        "from vllm.model_executor.custom_op import op_registry_oot; "
        "assert op_registry_oot['RoutedExperts'].__module__ == 'switchyard._vllm'"
    )
    python("-c", script, path=[tmp_path])


@pytest.mark.parametrize("words", ["1 tensor", "2 tensor", "2 expert", "2 tensor mxfp4", "2 expert mxfp4"])
def test_vllms_runner_on_ranks(vllm, words):
    assert "agrees" in python(ROOT / "tests/python/vllm_ranks.py", *words.split()).stdout
