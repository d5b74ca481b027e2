"""The plugin for SGLang: what needs no SGLang, always; its runner core below SGLang's own methods of
quantisation, hooks and all, on the CPU engine, where SGLang (0.5.16, 0.5.23) can be imported. No GPU is used, no
server is started, and SGLang's Triton kernels do not run: what Switchyard computes is compared with fp64
and with SGLang's experts in torch."""

import copy
import importlib.util
import json
import os
import pickle
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import switchyard.sglang as plugin
import reference
from conftest import ROOT, installed, python
from reference import error, experts, fill_with_fp8, routing
from switchyard import Activation, CapacityExceeded, InvalidArgument, Unsupported
from switchyard._serving import Binding, Options, refresh_all

E, H, I, K, T = 8, 256, 128, 2, 17
BF16_ERROR = 1e-2

# --------------------------------------------------------------------------- without SGLang


def test_an_interface_that_is_not_known_is_left_alone():
    script = (
        "import sys, switchyard.sglang as plugin; sys.modules['sglang.srt.plugins.hook_registry'] = None; "
        "plugin.register(); "
        "utils = sys.modules.get('sglang.srt.layers.moe.utils'); "
        "assert utils is None or 'switchyard' not in utils.MoeRunnerBackend._value2member_map_"
    )
    assert "does not know the interface of this SGLang" in python("-c", script).stderr


def test_options_are_read_from_the_environment():
    assert plugin.options_of({}) == Options()
    text = json.dumps({"reserved_sms": 20})
    assert plugin.options_of({"SWITCHYARD_SGLANG_OPTIONS": text}) == Options(reserved_sms=20)
    for text, problem in (("reserved", "no JSON"), ("3", "pass an object"), ('{"sms": 1}', "'sms'")):
        with pytest.raises(InvalidArgument, match=problem):
            plugin.options_of({"SWITCHYARD_SGLANG_OPTIONS": text})


@pytest.mark.parametrize(
    "changes,text",
    [
        ({"two_batch_overlap": True}, "two-batch-overlap"),
        ({"multiplexes": True}, "enable-pdmux"),
        ({"single_batch_overlap": True}, "single-batch-overlap"),
        ({"lora": True}, "LoRA"),
        ({"a2a_backend": "deepep"}, "'deepep'"),
        ({"no_combine": True}, "one by one"),
        ({"ranks": 8}, "reserved_sms is 0"),
    ],
)
def test_what_cannot_be_served_is_refused(changes, text):
    plugin.refuse(Options(), plugin.Deployment())
    with pytest.raises(Unsupported, match=text):
        plugin.refuse(Options(), plugin.Deployment(**changes))
    plugin.refuse(Options(), plugin.Deployment(device="cpu", ranks=8))


def config(**changes):
    """What is read of a MoeRunnerConfig."""
    values = {
        "activation": "silu", "is_gated": True, "gemm1_alpha": None, "gemm1_beta": None,
        "gemm1_clamp_limit": None, "swiglu_limit": None, "gate_up_interleaved": True,
    }
    return SimpleNamespace(**values | changes)


def test_activations():
    assert plugin.activation_of(config()) == (Activation(), "gate_up")
    assert plugin.activation_of(config(swiglu_limit=10)) == (Activation(limit=10), "gate_up")
    oai = Activation(alpha=1.702, limit=7.0, up_bias=1.0)
    given = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}
    assert plugin.activation_of(config(**given)) == (oai, "interleaved")
    assert plugin.activation_of(config(**given, gate_up_interleaved=False)) == (oai, "gate_up")
    assert plugin.activation_of(config(activation="gelu")) == (Activation("gelu"), "gate_up")
    plain = Activation("relu2", gated=False)
    assert plugin.activation_of(config(activation="relu2", is_gated=False)) == (plain, "gate_up")
    older = config(**given)
    del older.gemm1_beta  # as in SGLang 0.5.16
    assert plugin.activation_of(older) == (oai, "interleaved")
    kimi_k3 = config(activation="situ", gemm1_alpha=4.0, gemm1_clamp_limit=25.0)
    assert plugin.activation_of(kimi_k3) == (Activation("situ", alpha=4.0, limit=25.0), "gate_up")
    for changes in (
        {"activation": "situ"},
        {"activation": "situ", "gemm1_alpha": 4.0, "swiglu_limit": 7.0},
        {"activation": "relu2"},
        {"activation": "gelu", "gemm1_clamp_limit": 7.0},
        given | {"gemm1_beta": 0.5},
    ):
        with pytest.raises(Unsupported):
            plugin.activation_of(config(**changes))


def test_room_for_tokens():
    assert plugin.capacity(2048, 16384, 4) == 8192
    assert plugin.capacity(-1, 16384, 1) == 16384
    assert plugin.capacity(None, None, 1) == 8192


def test_a_binding_grows_unless_it_was_told_a_size():
    w13, w2 = torch.randn(E, 2 * I, H) / 16, torch.randn(E, H, I) / 16
    given = {"activation": Activation(), "order": "gate_up", "top_k": K, "max_tokens": 4}
    x = torch.randn(T, H)
    ids, weights = routing(T, E, K)
    expected = experts(x, *w13.chunk(2, dim=1), w2, ids, weights, Activation())
    binding = Binding(Options(), **given)
    small = binding.bind(w13, w2, tokens=3)
    large = binding.bind(w13, w2, tokens=T)
    assert large.max_tokens == 32 and error(large(x, ids, weights), expected) < 1e-5
    assert not small.closed  # a graph may have captured it
    refresh_all()
    assert binding.bind(w13, w2, tokens=T) is large
    binding = Binding(Options(max_tokens=4), **given)
    with pytest.raises(CapacityExceeded):
        binding.bind(w13, w2, tokens=T)(x, ids, weights)


# ------------------------------------------------------------------------------ with SGLang


@pytest.fixture(scope="module")
def sglang():
    """SGLang with the plugin, as its load_plugins() would leave it."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: see docs/frameworks/sglang.md for how these tests were run")
    plugin.register()
    plugin.register()
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_flags
    from switchyard._sglang_runner import backend

    HookRegistry.apply_hooks()
    flags = get_flags().moe
    before = flags.runner_backend
    flags.runner_backend = backend()
    yield flags
    flags.runner_backend = before


def make(quantised=None, dtype=torch.bfloat16, with_bias=False, **changes):
    """A layer's module and method, as FusedMoE makes them."""
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from sglang.srt.runtime_context import get_parallel

    layer = torch.nn.Module()
    layer.num_experts = layer.num_local_experts = E
    layer.hidden_size, layer.intermediate_size_per_partition = H, I
    layer.moe_tp_size = layer.moe_ep_size = 1
    layer.moe_runner_config = MoeRunnerConfig(
        num_experts=E, num_local_experts=E, hidden_size=H, intermediate_size_per_partition=I,
        top_k=changes.pop("top_k", K), params_dtype=dtype, layer=layer, **changes,
    )
    if quantised is None:
        method = UnquantizedFusedMoEMethod()
    else:
        method = Fp8MoEMethod(
            Fp8Config(
                is_checkpoint_fp8_serialized=True,
                activation_scheme="dynamic",
                weight_block_size=quantised or None,
            )
        )
    more = {"weight_loader": None} | ({"with_bias": True} if with_bias else {})
    with get_parallel().override(tp_size=1):  # what SGLang 0.5.16 asks for; there are no groups here
        method.create_weights(layer, E, H, I, dtype, **more)
    method.create_moe_runner(layer, layer.moe_runner_config)
    return layer, method


def load(layer, method):
    reference.load(layer)
    processed(layer, method)


def processed(layer, method):
    """The hook's part: SGLang's own repacks for AMX where it takes the machine for a CPU server."""
    from switchyard._sglang_runner import arrays

    method.runner.binding.weights_loaded(**arrays(method.get_triton_quant_info(layer)))


def run(layer, method, x, ids, weights):
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    topk = StandardTopKOutput(weights, ids.int(), None)
    given = StandardDispatchOutput(hidden_states=x, hidden_states_scale=None, topk_output=topk)
    forward = getattr(method, "forward_cuda", method.apply)  # what a CUDA server calls
    if forward == method.apply:
        return forward(layer, given).hidden_states
    return forward(layer=layer, dispatch_output=given).hidden_states


def batch(dtype=torch.bfloat16):
    return torch.randn(T, H, dtype=dtype), *routing(T, E, K)


def test_switchyard_is_a_choice(sglang):
    from sglang.srt.layers.moe.utils import get_moe_runner_backend
    from sglang.srt.server_args import MOE_RUNNER_BACKEND_CHOICES

    backend = get_moe_runner_backend()
    assert backend.value == "switchyard" and not backend.is_triton() and not backend.is_auto()
    assert copy.deepcopy(backend) == backend and pickle.loads(pickle.dumps(backend)) == backend
    assert MOE_RUNNER_BACKEND_CHOICES.count("switchyard") == 1


@pytest.mark.parametrize("dtype,bound", [(torch.bfloat16, BF16_ERROR), (torch.float32, 1e-5)])
def test_the_runner_computes_as_the_reference(sglang, dtype, bound):
    layer, method = make(dtype=dtype)
    assert type(method.runner).__name__ == "SwitchyardRunner"
    load(layer, method)
    x, ids, weights = batch(dtype)
    ids[3] = -1  # padding
    expected = experts(x, *layer.w13_weight.chunk(2, dim=1), layer.w2_weight, ids, weights, Activation())
    assert error(run(layer, method, x, ids, weights), expected) < bound


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_the_runner_computes_as_sglangs_torch(sglang, activation):
    from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    layer, method = make(dtype=torch.float32, activation=activation)
    load(layer, method)
    x, ids, weights = batch(torch.float32)
    topk = StandardTopKOutput(weights, ids, None)
    given = StandardDispatchOutput(hidden_states=x, hidden_states_scale=None, topk_output=topk)
    expected = fused_moe_forward_native(layer, given).hidden_states
    assert error(run(layer, method, x, ids, weights), expected.double()) < 1e-5


def test_gpt_oss_and_the_factor(sglang):
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import swiglu_gpt_oss_sigmoid_alpha

    layer, method = make(
        dtype=torch.float32, with_bias=True, gemm1_alpha=1.702, gemm1_clamp_limit=7.0,
        routed_scaling_factor=2.5,
    )
    load(layer, method)
    x, ids, weights = batch(torch.float32)
    expected = torch.zeros(T, H, dtype=torch.float64)
    formula = getattr(swiglu_gpt_oss_sigmoid_alpha, "__wrapped__", swiglu_gpt_oss_sigmoid_alpha)
    for t in range(T):
        for k in range(K):
            e = ids[t, k]
            h = x[t] @ layer.w13_weight[e].T + layer.w13_weight_bias[e]
            y = formula(h[None], 1.702, 7.0)[0] @ layer.w2_weight[e].T + layer.w2_weight_bias[e]
            expected[t] += 2.5 * weights[t, k] * y
    assert error(run(layer, method, x, ids, weights), expected) < 1e-5


def test_router_weights_on_the_input(sglang):
    layer, method = make(dtype=torch.float32, top_k=1, apply_router_weight_on_input=True)
    load(layer, method)
    x, ids, weights = batch(torch.float32)
    ids, weights = ids[:, :1], weights[:, :1]
    ones = torch.ones_like(weights)
    expected = experts(
        x * weights, *layer.w13_weight.chunk(2, dim=1), layer.w2_weight, ids, ones, Activation()
    )
    assert error(run(layer, method, x, ids, weights), expected) < 1e-5


def test_fp8_in_blocks_and_an_update(sglang):
    layer, method = make(quantised=[128, 128])
    exact = fill_with_fp8(layer)
    processed(layer, method)
    x, ids, weights = batch()
    expected = experts(x, *exact[0].chunk(2, dim=1), exact[1], ids, weights, Activation())
    # e4m3 has 3 bits of mantissa: each product's activations are off by up to 2^-4, 0.02 rms.
    assert error(run(layer, method, x, ids, weights), expected) < 0.06
    layer.w2_weight_scale_inv.data.mul_(3)
    refresh_all()  # what the hook on SGLang's WeightUpdater does
    assert error(run(layer, method, x, ids, weights), 3 * expected) < 0.06


@pytest.mark.parametrize("block", [[], [64, 64]])
def test_other_fp8_is_refused(sglang, block):
    with pytest.raises(Unsupported, match="Fp8MoEMethod with weight_block_size"):
        make(quantised=block)


def test_what_sglang_is_configured_for_is_refused(sglang, monkeypatch):
    monkeypatch.setattr(sglang, "tbo_enabled", True)
    with pytest.raises(Unsupported, match="two-batch-overlap"):
        make()
    monkeypatch.undo()
    monkeypatch.setenv("SWITCHYARD_SGLANG_OPTIONS", '{"sms": 3}')
    with pytest.raises(InvalidArgument, match="'sms'"):
        make()


def test_eplb_is_refused_where_it_would_move_what_was_copied(sglang, monkeypatch):
    from switchyard import _sglang_runner

    monkeypatch.setattr(_sglang_runner, "setting", {"enable_eplb": True}.get)
    make()
    with pytest.raises(Unsupported, match="--enable-eplb moves experts"):
        make(with_bias=True)


def test_another_method_is_refused(sglang):
    """The hook on FusedMoE.__init__, with a layer whose method chose another runner."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks = HookRegistry._hooks["sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__"]
    with pytest.raises(Unsupported, match="object quantises"):
        hooks[0][1](None, SimpleNamespace(quant_method=object()))
    hooks[0][1](None, SimpleNamespace(quant_method=make()[1]))


def test_sglang_is_its_own_unless_asked(sglang, monkeypatch):
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    monkeypatch.setattr(sglang, "runner_backend", MoeRunnerBackend.TRITON)
    _, method = make()
    assert method.runner.runner_backend == MoeRunnerBackend.TRITON


def test_sglangs_own_layer(sglang):
    """ServerArgs, FusedMoE and the hooks together, in a process of their own."""
    path = [os.environ["PYTHONPATH"], ROOT / "tests/python"]
    assert "agrees" in python(ROOT / "tests/python/sglang_layers.py", "bf16", path=path).stdout


def test_updates_of_weights_are_hooked(sglang):
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    from switchyard._sglang_runner import updates

    assert {"update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc"} < set(updates())
    for name in updates():
        assert hasattr(getattr(WeightUpdater, name), "__wrapped__"), name


def test_sglang_finds_the_entry_point(sglang, tmp_path):
    """As of an installed package, by SGLang's own loader, which applies the hooks."""
    installed(tmp_path)
    script = (
        "from sglang.srt.plugins import load_plugins; load_plugins(); "
        "from sglang.srt.server_args import MOE_RUNNER_BACKEND_CHOICES as choices; "
        "assert 'switchyard' in choices; "
        "from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod; "
        "assert hasattr(Fp8MoEMethod.apply, '__wrapped__')"
    )
    python("-c", script, path=[tmp_path])
