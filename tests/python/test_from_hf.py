"""MoeLayer.from_hf: blocks of transformers, with random weights, beside their own forward()."""

import copy
import dataclasses
import gc
import importlib
import io
import pickle

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

from conftest import in_threads
from switchyard import DTypeMismatch, InvalidArgument, MoeLayer, Routing, ShapeMismatch, Unsupported, World

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
        "deepseek_v2", "DeepseekV2", "Moe",
        GROUPS | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
        Routing(groups=4, top_groups=2, group_score="max", scale=16.0),
    ),
    (
        "deepseek_v3", "DeepseekV3", "MoE", GROUPS | {"routed_scaling_factor": 2.5},
        Routing(score="sigmoid", renormalize=True, renormalize_epsilon=1e-20, groups=4, top_groups=2, scale=2.5),
    ),
    (
        "glm4_moe", "Glm4Moe", "MoE", GROUPS | {"norm_topk_prob": False},
        Routing(score="sigmoid", groups=4, top_groups=2),
    ),
    (
        "dots1",
        "Dots1",
        "MoE",
        {"norm_topk_prob": True},
        Routing(score="sigmoid", renormalize=True, renormalize_epsilon=1e-20),
    ),
    (
        "lfm2_moe",
        "Lfm2Moe",
        "SparseMoeBlock",
        {"norm_topk_prob": True, "use_expert_bias": True, "layer_types": ["full_attention"]},
        Routing(score="sigmoid", renormalize=True, renormalize_epsilon=1e-6),
    ),
    (
        "hy_v3",
        "HYV3",
        "MoE",
        {"router_scaling_factor": 2.826},
        Routing(score="sigmoid", renormalize=True, renormalize_epsilon=1e-20, scale=2.826),
    ),
]


def make(family, prefix, name, more={}):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config_module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    numbers = {
        "hidden_size": H, "intermediate_size": 2 * I, "moe_intermediate_size": I,
        "shared_expert_intermediate_size": 40, "num_experts_per_tok": K, "moe_topk": K, "moe_k": K,
        "num_hidden_layers": 1, "n_shared_experts": 1, "moe_num_shared_experts": 1, "n_group": 1,
        "topk_group": 1,
    } | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E)
    config = getattr(config_module, prefix + "Config")(**numbers | more)
    block = getattr(module, prefix + name)(config).eval()
    for tensor in (*block.parameters(), *block.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(std=0.3)
    return block.requires_grad_(False)


def router_of(block):
    found = [m for m in block.modules() if tuple(getattr(m, "weight", torch.empty(0)).shape) == (E, H)]
    return found[0]


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
    # Tokens whose logits are far below 0, where what a sum of weights is added to shows.
    weight = router_of(block).weight
    level = torch.linalg.lstsq(weight, torch.ones(E, 1)).solution.T
    for depth in (-4, -8, -12, -20, -45, -70):
        x = torch.randn(1, 9, H) / weight.norm(dim=1).mean() + depth * level
        assert error(layer(x), own(block, x)) < 1e-4, depth
    assert list(layer.parameters()) == []  # the block's weights are not saved twice


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss", "lfm2_moe"])
def test_a_block_in_bf16(family):
    (found,) = [block for block in BLOCKS if block[0] == family]
    exact = make(*found[:4])
    block = make(*found[:4])
    block.load_state_dict(exact.state_dict())
    block.bfloat16()
    exact.load_state_dict(block.state_dict())  # the rounded weights
    layer = MoeLayer.from_hf(block)
    # Rules are found in fp32, also those of which 16 bits would show little.
    assert layer.routing == found[4]
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

    in_threads(rank, World.threads(2))
    assert max(errors) < 1e-5


def test_a_gradient_is_refused_by_backward():
    block = make("olmoe", "Olmoe", "SparseMoeBlock")
    layer = MoeLayer.from_hf(block)
    x = torch.randn(1, T, H)
    expected = layer(x)
    assert not expected.requires_grad
    for of_block, of_x in ((True, False), (False, True)):
        block.requires_grad_(of_block)
        out = layer(x.clone().requires_grad_(of_x))
        assert torch.equal(out.detach(), expected)
        with pytest.raises(Unsupported, match="no backward pass.*torch.no_grad"):
            out.sum().backward()
        with pytest.raises(Unsupported, match="no backward pass"):
            layer(x.clone().requires_grad_(of_x), out=torch.empty_like(x))
        with torch.no_grad():
            assert not layer(x, out=torch.empty_like(x)).requires_grad


def rebind(block):
    block.gate.weight = torch.nn.Parameter(block.gate.weight.clone())


def assign(block):
    block.load_state_dict({name: t.clone() for name, t in block.state_dict().items()}, assign=True)


def data(block):
    block.experts.down_proj.data = block.experts.down_proj.data.clone()


def shared(block):
    block.shared_expert.up_proj = torch.nn.Linear(H, 40, bias=False)


@pytest.mark.parametrize(
    "change,named",
    [
        (rebind, "gate.weight"),
        (assign, "experts.gate_up_proj"),
        (data, "experts.down_proj"),
        (shared, "shared_expert.up_proj.weight"),
        (lambda block: block.bfloat16(), "experts.gate_up_proj"),
        (lambda block: block.double(), "experts.gate_up_proj"),
        (lambda block: delattr(block, "gate"), "gate.weight"),
        (lambda block: delattr(block.gate, "weight"), "gate.weight"),
    ],
    ids=["rebind", "assign", "data", "shared", "bfloat16", "double", "no gate", "no weight"],
)
def test_a_block_with_other_tensors_is_refused(change, named):
    block = make("qwen2_moe", "Qwen2Moe", "SparseMoeBlock")
    layer = MoeLayer.from_hf(block)
    x = torch.randn(1, T, H)
    layer(x)
    change(block)
    with pytest.raises(InvalidArgument, match=f"Qwen2MoeSparseMoeBlock.{named} is another tensor.*from_hf"):
        layer(x)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_layer_compiles_as_one_graph(backend, grad):
    """Twice, with its block alive, whose changes are seen at run time."""
    block = make("qwen2_moe", "Qwen2Moe", "SparseMoeBlock")
    block.gate.weight.requires_grad_(grad)
    layer = MoeLayer.from_hf(block, max_tokens=64)
    x = torch.randn(1, T, H)
    with torch.no_grad():
        expected = layer(x)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            torch._dynamo.reset()
            compiled = torch.compile(layer, backend=backend, fullgraph=True)
            for _ in range(2):
                out = compiled(x)
                assert torch.equal(out, expected) and out.requires_grad == grad
        if grad:
            with pytest.raises(Unsupported, match="no backward pass"):
                out.sum().backward()
        block.gate.weight = torch.nn.Parameter(torch.randn(E, H))
        with pytest.raises(InvalidArgument, match="gate.weight is another tensor"):
            compiled(x)


@torch.no_grad()
def test_a_compiled_layer_fills_what_is_given():
    block = make("olmoe", "Olmoe", "SparseMoeBlock")
    layer = MoeLayer.from_hf(block, max_tokens=64)
    x = torch.randn(T, H)

    def given():
        return torch.zeros(T, H), torch.zeros(T, K, dtype=torch.int32), torch.zeros(T, K)

    def call(out, ids, weights):
        layer(x, out=out, ids_out=ids, weights_out=weights)
        return layer(x, ids_out=ids, weights_out=weights) + out

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        ours, theirs = given(), given()
        assert torch.equal(compiled(*ours), call(*theirs))
        assert all(map(torch.equal, ours, theirs)) and ours[1].any()
    # Where a gradient is asked for, the graph breaks.
    with torch.enable_grad():
        broken = torch.compile(lambda x: layer(x, ids_out=ours[1]), backend="eager")(x.requires_grad_())
        with pytest.raises(Unsupported, match="no backward pass"):
            broken.sum().backward()


@torch.no_grad()
def test_token_ids_as_tokenizers_give_them():
    layer = MoeLayer.from_hf(make("olmoe", "Olmoe", "SparseMoeBlock"), max_tokens=64)
    # Only layers of checkpoints route by token ids, and these have no watch.
    layer._watch = None
    with pytest.raises(DTypeMismatch, match=r"token_ids is int64; pass token_ids.int\(\)"):
        layer(torch.randn(T, H), token_ids=torch.zeros(T, dtype=torch.int64))


@torch.no_grad()
def test_many_layers_are_compiled_by_one_function():
    """More than Dynamo compiles a function anew for."""
    layers = [MoeLayer.from_hf(make("olmoe", "Olmoe", "SparseMoeBlock"), max_tokens=64) for _ in range(10)]
    x = torch.randn(T, H)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: [layer(x) for layer in layers], backend="eager", fullgraph=True)
    for out, layer in zip(compiled(x), layers):
        assert torch.equal(out, layer(x))
    for layer in layers:
        assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))


def test_a_layer_outlives_its_block():
    block = make("qwen2_moe", "Qwen2Moe", "SparseMoeBlock")
    x = torch.randn(1, T, H)
    expected = own(block, x)
    layer = MoeLayer.from_hf(block)
    del block
    gc.collect()
    assert error(layer(x), expected) < 1e-5


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("copy_of", [copy.deepcopy, copy.copy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())])
def test_a_layer_is_not_copied(copy_of, inside):
    layer = MoeLayer.from_hf(make("olmoe", "Olmoe", "SparseMoeBlock"))
    model = torch.nn.Sequential(layer) if inside else layer
    if copy_of is copy.copy and inside:
        assert copy_of(model)[0] is layer  # the same layer in another container
        return
    with pytest.raises(Unsupported, match="MoeLayer cannot be copied.*Take it out of the module first.*from_hf"):
        copy_of(model)
    assert list(model.state_dict()) == []


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


def top(scores):
    return scores.topk(K, dim=-1)


def normed(scores, epsilon=0.0, least=0.0, scale=1.0):
    weights, ids = top(scores)
    return scale * weights / (weights.sum(-1, keepdim=True) + epsilon).clamp(min=least), ids


def changed(scores, change):
    weights, ids = top(scores)
    return change(weights), ids


SIGMOID = {"score": "sigmoid", "renormalize": True}
# What a router makes of its logits, and the fields of Routing that must be found; None: none fits.
ROUTERS = {
    "sigmoid": (lambda l: top(l.sigmoid()), {"score": "sigmoid"}),
    "epsilon 1e-3": (lambda l: normed(l.sigmoid(), 1e-3), SIGMOID | {"renormalize_epsilon": 1e-3}),
    "epsilon 1e-9": (lambda l: normed(l.sigmoid(), 1e-9), SIGMOID | {"renormalize_epsilon": 1e-9}),
    "epsilon 1e-12": (lambda l: normed(l.sigmoid(), 1e-12), SIGMOID | {"renormalize_epsilon": 1e-12}),
    "epsilon 1e-20": (lambda l: normed(l.sigmoid(), 1e-20), SIGMOID | {"renormalize_epsilon": 1e-20}),
    "epsilon 0.1": (lambda l: normed(l.sigmoid(), 0.1), SIGMOID | {"renormalize_epsilon": 0.1}),
    "epsilon 1, scale 3": (lambda l: normed(l.sigmoid(), 1.0, scale=3.0), SIGMOID | {"renormalize_epsilon": 1.0, "scale": 3.0}),
    "epsilon of softmax": (lambda l: normed(l.softmax(-1), 1e-3), {"renormalize": True, "renormalize_epsilon": 1e-3}),
    "scale 2.826": (lambda l: normed(l.softmax(-1), scale=2.826), {"renormalize": True, "scale": 2.826}),
    "sqrt_softplus": (
        lambda l: normed(torch.nn.functional.softplus(l).sqrt()),
        {"score": "sqrt_softplus", "renormalize": True},
    ),
    "least sum 1e-6": (lambda l: normed(l.sigmoid(), least=1e-6), None),
    "least sum 1e-12": (lambda l: normed(l.sigmoid(), least=1e-12), None),
    "least sum 1e-20": (lambda l: normed(l.sigmoid(), least=1e-20), None),
    "least weight": (lambda l: changed(l.sigmoid(), lambda w: w.clamp(min=1e-3)), None),
    "most weight": (lambda l: changed(l.sigmoid(), lambda w: w.clamp(max=0.999)), None),
    "threshold": (lambda l: changed(l.sigmoid(), lambda w: w.where(w > 1e-4, 0)), None),
    "least logit": (lambda l: top(l.clamp(min=-20).sigmoid()), None),
    "soft limit of logits": (lambda l: top((30 * torch.tanh(l / 30)).softmax(-1)), None),
    "temperature": (lambda l: top((l / 1.01).softmax(-1)), None),
    "softmax in bf16": (lambda l: top(l.bfloat16().softmax(-1).float()), None),
    "L2 norm": (lambda l: changed(l.sigmoid(), lambda w: w / w.norm(dim=-1, keepdim=True)), None),
    "softplus": (lambda l: top(torch.nn.functional.softplus(l)), None),
    "offset": (lambda l: changed(l.sigmoid(), lambda w: w + 1e-3), None),
    "even": (lambda l: changed(l, lambda w: torch.full_like(w, 1 / K)), None),
    "worst first": (lambda l: top((-l).sigmoid()), None),
    "no weight for a token of zeros": (
        lambda l: changed(l.softmax(-1), lambda w: w.where((l != 0).any(1, keepdim=True), 0)),
        None,
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_constants_of_routers(name):
    """Each is seen at some tokens only."""
    function, fields = ROUTERS[name]
    block = make("mixtral", "Mixtral", "SparseMoeBlock")
    weight = block.gate.weight

    def forward(x):
        logits = x.reshape(-1, H).float() @ weight.float().T
        return logits, *function(logits)

    block.gate.forward = forward
    if fields is None:
        with pytest.raises(Unsupported, match="MixtralSparseMoeBlock routes as Switchyard cannot"):
            MoeLayer.from_hf(block)
    else:
        found = MoeLayer.from_hf(block).routing
        for field, value in dataclasses.asdict(Routing(**fields)).items():
            near = value if isinstance(value, str) else pytest.approx(value, rel=1e-4, abs=0)
            assert getattr(found, field) == near, field


def test_ids_that_the_router_does_not_have_are_refused():
    block = make("mixtral", "Mixtral", "SparseMoeBlock")
    forward = block.gate.forward

    def more(x):
        logits, weights, ids = forward(x)
        return logits, weights, ids + 1

    block.gate.forward = more
    with pytest.raises(Unsupported, match="hands ids from 1 to 8 to its experts, but its router has 8"):
        MoeLayer.from_hf(block)


@pytest.mark.parametrize("experts,chosen", [(8, 8), (128, 6)])
def test_other_numbers_of_experts(experts, chosen):
    """All of them chosen, and more than a token has numbers."""
    more = {"num_local_experts": experts, "num_experts_per_tok": chosen}
    block = make("minimax_m2", "MiniMaxM2", "SparseMoeBlock", more)
    layer = MoeLayer.from_hf(block)
    x = torch.randn(1, T, H)
    assert layer.routing.score == "sigmoid" and error(layer(x), own(block, x)) < 1e-5


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", [None, "bf16", "f32"])
def test_types_that_are_computed_in(dtype, compute):
    block = make("qwen2_moe", "Qwen2Moe", "SparseMoeBlock").to(dtype)
    layer = MoeLayer.from_hf(block, compute=compute)
    assert layer.routing == Routing()
    x = torch.randn(1, T, H).to(dtype)
    errors = (layer(x) - own(block, x)).float().norm(dim=-1) / own(block, x).float().norm(dim=-1)
    assert errors.median() < (1e-5 if dtype == torch.float32 and compute != "bf16" else 2e-2)


def test_a_block_of_float64_is_refused():
    block = make("qwen2_moe", "Qwen2Moe", "SparseMoeBlock").double()
    with pytest.raises(DTypeMismatch, match="Qwen2MoeExperts.gate_up_proj is float64; cast"):
        MoeLayer.from_hf(block)


ARGUMENTS = [
    (InvalidArgument, "hidden_states is a list; pass a torch.Tensor", lambda l, x: l([1.0])),
    (InvalidArgument, "hidden_states is a ndarray", lambda l, x: l(x.numpy())),
    (InvalidArgument, "hidden_states are on meta", lambda l, x: l(x.to("meta"))),
    (ShapeMismatch, r"hidden_states is \(\); its last dimension has to be H, 64", lambda l, x: l(torch.tensor(1.0))),
    (ShapeMismatch, r"hidden_states is \(1, 33, 5\)", lambda l, x: l(x[..., :5])),
    (DTypeMismatch, "hidden_states is float64; pass", lambda l, x: l(x.double())),
    (DTypeMismatch, "hidden_states is int32; pass", lambda l, x: l(x.int())),
    (ShapeMismatch, r"out is \(3,\); it has to be as hidden_states", lambda l, x: l(x, out=torch.empty(3))),
    (InvalidArgument, "out has strides", lambda l, x: l(x, out=torch.empty(1, H, T).transpose(1, 2))),
    (InvalidArgument, "out is a ndarray", lambda l, x: l(x, out=x.numpy())),
    (InvalidArgument, "token_ids are given", lambda l, x: l(x, token_ids=torch.zeros(1, T, dtype=torch.int32))),
    (InvalidArgument, "hidden_states is a nested tensor", lambda l, x: l(torch.nested.nested_tensor([x[0], x[0, :2]]))),
    (InvalidArgument, "token_ids is a list", lambda l, x: l(x, token_ids=[1])),
    (InvalidArgument, "block is a str", lambda l, x: MoeLayer.from_hf("block")),
    (InvalidArgument, "check is 'no'", lambda l, x: MoeLayer.from_hf(make(*BLOCKS[0][:3]), check="no")),
    (InvalidArgument, "device is 'tpu'; pass 'cpu'", lambda l, x: MoeLayer.from_checkpoint("/", 0, device="tpu")),
    (InvalidArgument, "device is 5.5; pass", lambda l, x: MoeLayer.from_checkpoint("/", 0, device=5.5)),
    (InvalidArgument, "layer is '0'; pass the index", lambda l, x: MoeLayer.from_checkpoint("/", "0")),
    (InvalidArgument, "layer is -1; pass the index", lambda l, x: MoeLayer.from_checkpoint("/", -1)),
]


@pytest.mark.parametrize("kind,message,call", ARGUMENTS, ids=[message[:30] for _, message, _ in ARGUMENTS])
def test_arguments(kind, message, call):
    layer = MoeLayer.from_hf(make("olmoe", "Olmoe", "SparseMoeBlock"))
    with pytest.raises(kind, match=message):
        call(layer, torch.randn(1, T, H))
