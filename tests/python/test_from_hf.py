"""MoeLayer.from_hf: blocks of transformers, with random weights, beside their own forward()."""

import importlib
import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

from switchyard import MoeLayer, Routing, Unsupported, World

H, I, E, K, T = 64, 48, 8, 2, 33
GROUPS = {"n_group": 4, "topk_group": 2}

# Family, prefix of its classes, the block, its configuration, and what must be found.
BLOCKS = [
    ("olmoe", "Olmoe", "SparseMoeBlock", {}, Routing()),
    ("qwen3_moe", "Qwen3Moe", "SparseMoeBlock", {"norm_topk_prob": True}, Routing(renormalize=True)),
    ("qwen2_moe", "Qwen2Moe", "SparseMoeBlock", {}, Routing()),
    ("qwen3_next", "Qwen3Next", "SparseMoeBlock", {}, Routing(renormalize=True)),
    ("mixtral", "Mixtral", "SparseMoeBlock", {}, Routing(renormalize=True)),
    ("jamba", "Jamba", "SparseMoeBlock", {}, Routing()),
    ("granitemoe", "GraniteMoe", "MoE", {}, Routing(renormalize=True)),
    ("hunyuan_v1_moe", "HunYuanMoEV1", "Moe", {}, Routing(renormalize=True)),
    ("ernie4_5_moe", "Ernie4_5_Moe", "SparseMoeBlock", {}, Routing(renormalize=True)),
    ("gpt_oss", "GptOss", "MLP", {}, Routing(renormalize=True)),
    ("phimoe", "Phimoe", "SparseMoeBlock", {}, Routing(method="sparse_mixer")),
    ("minimax_m2", "MiniMaxM2", "SparseMoeBlock", {}, Routing(score="sigmoid", renormalize=True)),
    (
        "deepseek_v2",
        "DeepseekV2",
        "Moe",
        GROUPS | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
        Routing(groups=4, top_groups=2, group_score="max", scale=16.0),
    ),
    (
        "deepseek_v3",
        "DeepseekV3",
        "MoE",
        GROUPS | {"routed_scaling_factor": 2.5},
        Routing(score="sigmoid", renormalize=True, groups=4, top_groups=2, scale=2.5),
    ),
    (
        "glm4_moe",
        "Glm4Moe",
        "MoE",
        GROUPS | {"norm_topk_prob": False},
        Routing(score="sigmoid", groups=4, top_groups=2),
    ),
    ("dots1", "Dots1", "MoE", {"norm_topk_prob": True}, Routing(score="sigmoid", renormalize=True)),
]


def make(family, prefix, name, more={}):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config_module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    numbers = {
        "hidden_size": H,
        "intermediate_size": 2 * I,
        "moe_intermediate_size": I,
        "shared_expert_intermediate_size": 40,
        "num_experts_per_tok": K,
        "moe_topk": K,
        "moe_k": K,
        "num_hidden_layers": 1,
        "n_shared_experts": 1,
        "moe_num_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    } | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E)
    config = getattr(config_module, prefix + "Config")(**numbers | more)
    block = getattr(module, prefix + name)(config).eval()
    for tensor in (*block.parameters(), *block.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(std=0.3)
    return block.requires_grad_(False)


def own(block, x):
    out = block(x)
    return out[0] if isinstance(out, tuple) else out


def error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("family,prefix,name,more,routing", BLOCKS, ids=[block[0] for block in BLOCKS])
def test_a_block_is_read(family, prefix, name, more, routing):
    block = make(family, prefix, name, more)
    layer = MoeLayer.from_hf(block, max_tokens=T)
    assert layer.routing == routing
    x = torch.randn(3, T // 3, H)
    out = layer(x)
    assert out.shape == x.shape and error(out, own(block, x)) < 1e-5
    assert list(layer.parameters()) == []  # the block's weights are not saved twice


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss"])
def test_a_block_in_bf16(family):
    (found,) = [block for block in BLOCKS if block[0] == family]
    exact = make(*found[:4])
    block = make(*found[:4])
    block.load_state_dict(exact.state_dict())
    block.bfloat16()
    exact.load_state_dict(block.state_dict())  # the rounded weights
    layer = MoeLayer.from_hf(block)
    assert layer.routing.score == found[4].score
    x = torch.randn(1, T, H, dtype=torch.bfloat16)
    expected = own(exact, x.float())
    # Tokens whose experts change places in bf16 are off by much, in either.
    ours = (layer(x).float() - expected).norm(dim=-1).median()
    theirs = (own(block, x).float() - expected).norm(dim=-1).median()
    assert ours < 2 * theirs


def test_weights_are_used_where_they_are():
    block = make("qwen2_moe", "Qwen2Moe", "SparseMoeBlock")
    layer = MoeLayer.from_hf(block)
    x = torch.randn(1, T, H)
    for tensor in block.parameters():
        tensor.data.mul_(1.25)
    layer.refresh()
    assert error(layer(x), own(block, x)) < 1e-5


def test_several_ranks():
    block = make("deepseek_v3", "DeepseekV3", "MoE", GROUPS)
    xs = torch.randn(2, 1, T, H)
    errors = [None, None]

    def rank(world):
        with torch.no_grad():
            layer = MoeLayer.from_hf(block, world=world, num_threads=1)
            errors[world.rank] = error(layer(xs[world.rank]), own(block, xs[world.rank]))

    threads = [threading.Thread(target=rank, args=(world,)) for world in World.threads(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(errors) < 1e-5


def test_gradients_are_refused():
    block = make("olmoe", "Olmoe", "SparseMoeBlock").requires_grad_(True)
    layer = MoeLayer.from_hf(block)
    x = torch.randn(1, T, H)
    with pytest.raises(Unsupported, match="backward"):
        layer(x)
    with torch.no_grad():
        layer(x)


def test_what_is_no_part_of_a_layer_is_refused():
    block = make("olmoe", "Olmoe", "SparseMoeBlock")
    block.adapter = torch.nn.Linear(H, H, bias=False)
    with pytest.raises(Unsupported, match=r"OlmoeSparseMoeBlock.adapter.weight \(\[64, 64\]\)"):
        MoeLayer.from_hf(block)
    with pytest.raises(Unsupported, match="Linear.experts is NoneType"):
        MoeLayer.from_hf(torch.nn.Linear(2, 2))
    block = make("olmoe", "Olmoe", "SparseMoeBlock")
    del block.gate
    with pytest.raises(Unsupported, match=r"OlmoeSparseMoeBlock has no gate or router .* \[8, 64\]"):
        MoeLayer.from_hf(block)
    block = make("ernie4_5_moe", "Ernie4_5_Moe", "SparseMoeBlock", {"use_bias": True})
    with pytest.raises(Unsupported, match="shared_experts.*bias"):
        MoeLayer.from_hf(block)


def test_another_activation_of_the_shared_expert_is_refused():
    block = make("qwen2_moe", "Qwen2Moe", "SparseMoeBlock")
    block.shared_expert.act_fn = torch.nn.GELU()
    with pytest.raises(Unsupported, match=r"Qwen2MoeSparseMoeBlock.shared_expert \(Qwen2MoeMLP\) does not"):
        MoeLayer.from_hf(block)
    # A limit that only large values reach.
    class Limited(torch.nn.Module):
        def forward(self, v):
            return torch.nn.functional.silu(v.clamp(max=9))

    block = make("qwen2_moe", "Qwen2Moe", "SparseMoeBlock")
    block.shared_expert.act_fn = Limited()
    with pytest.raises(Unsupported, match="shared_expert"):
        MoeLayer.from_hf(block)


def test_weights_that_are_not_loaded_are_refused():
    block = make("mixtral", "Mixtral", "SparseMoeBlock")
    block.gate.weight.data.zero_()
    with pytest.raises(Unsupported, match="all 0"):
        MoeLayer.from_hf(block)


def test_another_routing_is_refused():
    block = make("mixtral", "Mixtral", "SparseMoeBlock")
    forward = block.gate.forward

    def colder(x):
        logits, weights, ids = forward(x)
        return logits, weights.square(), ids

    block.gate.forward = colder
    with pytest.raises(Unsupported, match="MixtralSparseMoeBlock routes as Switchyard cannot"):
        MoeLayer.from_hf(block)


def test_a_block_that_does_more_is_found_out_unless_it_is_not_checked():
    block = make("mixtral", "Mixtral", "SparseMoeBlock")
    forward = block.forward
    block.forward = lambda x: forward(x) + x
    with pytest.raises(Unsupported, match="does more than router, experts"):
        MoeLayer.from_hf(block)
    x = torch.randn(1, T, H)
    assert error(MoeLayer.from_hf(block, check=False)(x) + x, own(block, x)) < 1e-5


def test_the_block_is_left_as_it_was():
    block = make("phimoe", "Phimoe", "SparseMoeBlock").train()
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    MoeLayer.from_hf(block)
    assert block.training and not block.experts._forward_pre_hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())
