"""Experts of Hugging Face transformers, run by Switchyard."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from conftest import in_threads
import switchyard
from reference import SMALL_MODEL, error
from switchyard import _check_hf, _hf, _probe


@pytest.fixture
def qwen():
    config = transformers.Qwen3MoeConfig(**SMALL_MODEL, intermediate_size=96, moe_intermediate_size=48, num_experts=8)
    return transformers.Qwen3MoeForCausalLM(config).eval()


@pytest.fixture
def registered():
    switchyard.register_with_transformers()
    yield
    _hf._settings.options.clear()


@torch.no_grad()
def test_experts_implementation(qwen, registered):
    ids = torch.randint(0, 96, (2, 9))
    expected = qwen(ids).logits
    qwen.set_experts_implementation("switchyard")
    assert torch.allclose(qwen(ids).logits, expected, atol=1e-5)
    made = [made for module, made in _hf._made.items() if module in set(qwen.modules())]
    # One pass of each, numbered together: all layers of a model work in the same memory.
    assert sorted(m.layer.stats().epoch for m in made) == [1, 2]
    tokens = qwen.generate(ids, max_new_tokens=4, do_sample=False)
    qwen.set_experts_implementation("eager")
    assert torch.equal(tokens, qwen.generate(ids, max_new_tokens=4, do_sample=False))


@torch.no_grad()
def test_a_model_that_is_copied_or_cast(qwen, registered):
    qwen.set_experts_implementation("switchyard")
    ids = torch.randint(0, 96, (1, 5))
    expected = qwen(ids).logits
    other = copy.deepcopy(qwen)
    assert torch.allclose(other(ids).logits, expected, atol=1e-5)
    for parameter in other.model.layers[0].mlp.experts.parameters():
        parameter.zero_()
    assert not torch.allclose(other(ids).logits, expected, atol=1e-5)
    assert torch.allclose(qwen(ids).logits, expected, atol=1e-5)
    half = qwen.bfloat16()
    assert error(half(ids).logits, expected.double()) < 0.1


@torch.no_grad()
def test_more_tokens_than_before(qwen, registered):
    qwen.set_experts_implementation("switchyard")
    experts = qwen.model.layers[0].mlp.experts
    for tokens in (1, 7, 1500, 3):
        x = torch.randn(tokens, 64)
        weights, ids = torch.rand(tokens, 8).topk(2)
        ours = experts(x, ids, weights)
        qwen.set_experts_implementation("eager")
        assert error(ours, experts(x, ids, weights).double()) < 1e-5
        qwen.set_experts_implementation("switchyard")


def epochs(model):
    """Of the layers of a model: those in one memory number their passes together."""
    modules = set(model.modules())
    return [made.layer.stats().epoch for module, made in _hf._made.items() if module in modules]


@torch.no_grad()
def test_layers_of_a_model_share_memory_and_their_bits_stay(qwen, registered, monkeypatch):
    ids = torch.randint(0, 96, (2, 9))
    qwen.set_experts_implementation("switchyard")
    with monkeypatch.context() as patched:
        patched.setattr(_hf, "_sharing", lambda model, form: None)
        alone = copy.deepcopy(qwen)
        expected = alone(ids).logits
        assert epochs(alone) == [1, 1]
    assert torch.equal(qwen(ids).logits, expected)
    assert sorted(epochs(qwen)) == [1, 2]
    # Not with those of another model.
    other = copy.deepcopy(qwen)
    assert torch.equal(other(ids).logits, expected)
    assert sorted(epochs(other)) == [1, 2]
    # Weights of the layer that was made first are loaded anew: another layer in the same memory.
    experts = qwen.model.layers[0].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.clone())
    assert torch.equal(qwen(ids).logits, expected)
    assert sorted(epochs(qwen)) == [3, 4]
    # So are those of all layers, which then need larger memory.
    many = torch.randint(0, 96, (40, 50))
    expected = alone(many).logits
    assert torch.equal(qwen(many).logits, expected)
    assert sorted(epochs(qwen)) == [1, 2]


@torch.no_grad()
def test_layers_of_a_model_that_is_patched_share_memory():
    """These modules have no config that would say which model they are of."""
    from transformers.models.dbrx import configuration_dbrx, modeling_dbrx

    config = configuration_dbrx.DbrxFFNConfig(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2)
    config.hidden_size = 64

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(modeling_dbrx.DbrxExperts(config) for _ in range(3))
            for parameter in self.parameters():
                torch.nn.init.normal_(parameter, std=0.1)

        def forward(self, x):
            weights, ids = x[..., :4].reshape(-1, 4).softmax(-1).topk(2)
            for layer in self.layers:
                x = x + layer(x, ids, weights)
            return x

    models = [Model(), Model()]
    x = torch.randn(2, 9, 64)
    for model in models:
        expected = model(x)
        assert switchyard.patch(model) == ["layers.0", "layers.1", "layers.2"]
        assert error(model(x), expected.double()) < 1e-5
    for model in models:
        assert sorted(epochs(model)) == [1, 2, 3]


@torch.no_grad()
def test_settings_that_change_make_memory_anew(qwen, registered):
    qwen.set_experts_implementation("switchyard")
    ids = torch.randint(0, 96, (2, 9))
    expected = qwen(ids).logits
    world = switchyard.World.single()
    switchyard.register_with_transformers(world=world, num_threads=3)
    try:
        experts = qwen.model.layers[1].mlp.experts
        experts.down_proj = torch.nn.Parameter(experts.down_proj.clone())
        assert torch.allclose(qwen(ids).logits, expected, atol=1e-6)
        assert sorted(epochs(qwen)) == [1, 3]
    finally:
        switchyard.register_with_transformers()


@pytest.mark.parametrize("fresh", [True, False])
def test_compiles_as_one_graph(qwen, registered, fresh):
    torch._dynamo.reset()
    ids = torch.randint(0, 96, (1, 6))
    with torch.no_grad():
        expected = qwen(ids).logits
        qwen.set_experts_implementation("switchyard")
        if not fresh:
            qwen(ids)
        compiled = torch.compile(qwen, fullgraph=_hf._IN_GRAPHS, backend="aot_eager")
        assert torch.allclose(compiled(ids).logits, expected, atol=1e-5)


def test_a_gradient_is_refused(qwen, registered):
    qwen.set_experts_implementation("switchyard")
    logits = qwen(torch.randint(0, 96, (1, 5))).logits
    with pytest.raises(switchyard.Unsupported):
        logits.sum().backward()


@torch.no_grad()
def test_experts_of_other_ranks(qwen, registered):
    """Under expert parallelism transformers marks them with the number of local experts."""
    qwen.set_experts_implementation("switchyard")
    experts = qwen.model.layers[0].mlp.experts
    x = torch.randn(6, 64)
    weights, ids = torch.rand(6, 8).topk(2)
    ids[:, 1] = 8
    weights[:, 1] = 0
    ours = experts(x, ids, weights)
    once = experts(x, torch.cat((ids[:, :1], (ids[:, :1] + 1) % 8), 1), weights)
    assert torch.allclose(ours, once, atol=1e-5)


@torch.no_grad()
def test_fp8_experts(registered):
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    config = transformers.Qwen3MoeConfig(
        hidden_size=256, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2
    )
    config._experts_implementation = "switchyard"
    cls = use_experts_implementation(
        experts_class=type("Fp8Experts", (FP8Experts,), {}), experts_interface=ALL_FP8_EXPERTS_FUNCTIONS
    )
    module = cls(config, block_size=(128, 128))
    exact = {}
    for name in ("gate_up_proj", "down_proj"):
        codes, scales = getattr(module, name), getattr(module, name + "_scale_inv")
        codes.data = (torch.randn(codes.shape) * 100).to(torch.float8_e4m3fn)
        scales.data = torch.rand(scales.shape) / 2000
        whole = scales.data.repeat_interleave(128, 1).repeat_interleave(128, 2)
        exact[name] = codes.data.double() * whole
    x = torch.randn(9, 256)
    weights, ids = torch.rand(9, 4).topk(2)
    out = module(x.bfloat16(), ids, weights)
    expected = torch.zeros(9, 256).double()
    for t in range(9):
        for k in range(2):
            gate, up = (exact["gate_up_proj"][ids[t, k]] @ x[t].bfloat16().double()).chunk(2)
            h = torch.nn.functional.silu(gate) * up
            expected[t] += weights[t, k] * (exact["down_proj"][ids[t, k]] @ h)
    # Tokens and h are quantised to 3 bits of mantissa.
    assert error(out, expected) < 0.06
    made = _hf._made[module]
    assert made.layer.compute == "f8_e4m3"
    # Scales that change: in place, as another parameter, and with other memory. Powers of 2 round nothing.
    module.down_proj_scale_inv.mul_(2)
    assert torch.equal(module(x.bfloat16(), ids, weights), 2 * out)
    module.down_proj_scale_inv = torch.nn.Parameter(module.down_proj_scale_inv / 4)
    assert torch.equal(module(x.bfloat16(), ids, weights), out / 2)
    module.down_proj_scale_inv.data = module.down_proj_scale_inv * 2
    assert torch.equal(module(x.bfloat16(), ids, weights), out)
    module.down_proj.data = (-module.down_proj.float()).to(torch.float8_e4m3fn)
    assert torch.equal(module(x.bfloat16(), ids, weights), -out)


@torch.no_grad()
@pytest.mark.parametrize(
    "family,name", [("llama4", "Llama4TextMoe"), ("longcat_flash", "LongcatFlashExperts"), ("dbrx", "DbrxExperts")]
)
def test_patch_replaces_what_has_no_interface(family, name):
    row = _check_hf.check_class(family, name, False)
    assert row.status == "agrees", row


def test_patch_says_what_it_patched(qwen):
    assert switchyard.patch(qwen) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert qwen.config._experts_implementation == "switchyard"


def test_patch_refuses_what_it_does_not_know():
    with pytest.raises(switchyard.Unsupported, match="no experts"):
        switchyard.patch(torch.nn.Linear(2, 2))

    class Mxfp4GptOssExperts(torch.nn.Module):
        pass

    with pytest.raises(switchyard.Unsupported, match=r"Mxfp4Config\(dequantize=True\)"):
        switchyard.patch(torch.nn.Sequential(Mxfp4GptOssExperts()))


def test_an_activation_that_is_none_of_ours_is_refused(qwen, registered):
    experts = qwen.model.layers[0].mlp.experts
    experts.act_fn = torch.nn.Tanh()
    with pytest.raises(switchyard.Unsupported, match="activation"):
        switchyard.patch(qwen)
    assert qwen.config._experts_implementation != "switchyard"
    qwen.set_experts_implementation("switchyard")
    with pytest.raises(switchyard.Unsupported, match="Qwen3MoeExperts: its activation is none"):
        qwen(torch.randint(0, 96, (1, 5)))


@pytest.mark.parametrize(
    "activation",
    [
        switchyard.Activation("silu"),
        switchyard.Activation("silu", alpha=1.702, limit=7.0, up_bias=1.0),
        switchyard.Activation("silu", limit=10.0), switchyard.Activation("gelu"),
        switchyard.Activation("gelu_tanh"), switchyard.Activation("relu"),
        switchyard.Activation("relu2"), switchyard.Activation("situ", alpha=4.0),
        switchyard.Activation("situ", alpha=4.0, limit=25.0),
        switchyard.Activation("situ", alpha=0.5, limit=2.0, up_bias=0.5),
    ],
    ids=str,
)
def test_probing_finds(activation):
    found = _probe.gated("m", lambda gate, up: _probe.apply(activation, gate, up), "cpu")
    assert found.kind == activation.kind
    assert found.alpha == pytest.approx(activation.alpha, rel=1e-5)
    assert found.limit == pytest.approx(activation.limit, rel=1e-6)
    assert found.up_bias == pytest.approx(activation.up_bias, abs=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda gate, up: torch.tanh(gate) * up,
        lambda gate, up: torch.nn.functional.silu(gate) + up,
        lambda gate, up: torch.nn.functional.silu(gate).clamp(max=2) * up,
        lambda gate, up: torch.nn.functional.silu(gate) * up.clamp(-3, 2),
        lambda gate, up: torch.nn.functional.silu(gate) * 1.001 * up,
        lambda gate, up: gate,
        lambda gate, up: torch.nn.functional.silu(4 * torch.tanh(gate / 4)) * 25 * torch.tanh(up / 25),
        lambda gate, up: torch.nn.functional.silu(gate) * up.square(),
    ],
)
def test_probing_refuses(function):
    with pytest.raises(switchyard.Unsupported):
        _probe.gated("m", function, "cpu")


def test_check_hf(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert _check_hf.main(["--only", "MixtralExperts", "--only", "GptOss", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "MixtralExperts" in out and "2 of 2 classes" in out
    import json

    rows = {row["name"]: row for row in json.loads(file.read_text())["classes"]}
    assert rows["GptOssExperts"]["layout"] == "interleaved, transposed"
    assert rows["GptOssExperts"]["activation"] == "silu, gated, alpha 1.702, limit 7, up_bias 1"
    assert rows["Mxfp4GptOssExperts"]["status"] == "refused"
    assert _check_hf.main(["--only", "no such class"]) == 2
    assert "no class or family has no such class" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2])
@torch.no_grad()
def test_a_layer_of_a_checkpoint(tmp_path, ranks):
    config = transformers.MixtralConfig(**SMALL_MODEL, intermediate_size=48, num_local_experts=8)
    config._experts_implementation = "eager"
    model = transformers.MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    x = torch.randn(3, 7, 64)
    expected = model.model.layers[1].mlp(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    outs = [None] * ranks

    def rank(world):
        layer = switchyard.MoeLayer.from_checkpoint(
            tmp_path, 1, world=world, max_tokens=64, num_threads=1
        )
        assert "8 experts, top-2" in repr(layer)
        ids = torch.empty(21, 2, dtype=torch.int32)
        outs[world.rank] = layer(x, ids_out=ids)
        assert ids.min() >= 0
        assert sum(layer.stats().tokens_per_expert) == 42 * ranks
        layer.close()

    in_threads(rank, switchyard.World.threads(ranks))
    for out in outs:
        assert out is not None and error(out, expected.double()) < 1e-5


def test_a_checkpoint_that_is_none(tmp_path):
    with pytest.raises(switchyard.Error, match="config.json"):
        switchyard.MoeLayer.from_checkpoint(tmp_path, 0)
