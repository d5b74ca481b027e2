"""What may happen to a model between two calls: every class of transformers that Switchyard runs gives what
its own eager forward() gives, after each of the changes that trainers, loaders and casts make."""

import copy
import functools
import gc
import importlib
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from conftest import in_threads, python
import switchyard
from reference import SMALL_MODEL
from switchyard import _check_hf, _hf, _hf_patch

CLASSES = [c for c in _check_hf._classes() if c[1] not in _hf_patch._REFUSED]


@functools.cache
def made(family, name):
    """A tiny module with random weights, and what a refusal says, if it is refused."""
    transformers.logging.set_verbosity_error()
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    eager = _check_hf._make(module, getattr(module, name))
    try:
        switchyard.patch(copy.deepcopy(eager))
    except switchyard.Unsupported as refusal:
        return eager, str(refusal)
    return eager, None


def draw(tensor, seed):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor.dtype) / 8


def parameters(module):
    return list(module.named_parameters())


def owner(module, name):
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def in_place(module, seed):
    with torch.no_grad():
        for _, p in parameters(module):
            p.add_(draw(p, seed))


def through_data(module, seed):
    for _, p in parameters(module):
        p.data.add_(draw(p, seed))


def one_row_through_data(module, seed):
    for _, p in parameters(module):
        p.data[0] += draw(p, seed)[0]


def load(module, seed, assign=False):
    module.load_state_dict({n: draw(p, seed) for n, p in parameters(module)}, strict=False, assign=assign)


def load_and_assign(module, seed):
    load(module, seed, assign=True)


def other_data(module, seed):
    for _, p in parameters(module):
        p.data = draw(p, seed)


def other_strides(module, seed):
    for _, p in parameters(module):
        p.data = draw(p, seed).movedim(-1, 0).contiguous().movedim(0, -1)


def other_parameters(module, seed):
    for name, p in parameters(module):
        setattr(*owner(module, name), torch.nn.Parameter(draw(p, seed)))


def other_parameters_over_the_same_memory(module, seed):
    for name, p in parameters(module):
        setattr(*owner(module, name), torch.nn.Parameter(p.data, requires_grad=False))
    through_data(module, seed)


def flat(module, seed):
    """As those do that keep all parameters in one buffer, and write to that."""
    whole = torch.cat([p.detach().flatten() for _, p in parameters(module)])
    at = 0
    for _, p in parameters(module):
        p.data = whole[at : at + p.numel()].view(p.shape)
        at += p.numel()
    module(*module._its_inputs)
    whole.add_(draw(whole, seed))


def moved_away_and_back(module, seed):
    """As an offloading hook does: the memory is another at every call, and nobody's between them."""
    kept = {name: draw(p, seed) for name, p in parameters(module)}

    def load(*_):
        for name, p in parameters(module):
            p.data = kept[name].clone()

    def unload(*_):
        for _, p in parameters(module):
            p.data = torch.empty(0)

    hooks = [module.register_forward_pre_hook(load), module.register_forward_hook(unload)]
    for _ in range(3):
        module(*module._its_inputs)
    for hook in hooks:
        hook.remove()
    load()


def twice_cast(module, seed):
    in_place(module.bfloat16(), seed)
    module(*(x.bfloat16() if x.is_floating_point() else x for x in module._its_inputs))
    module.float()


def twice_cast_by_half(module, seed):
    in_place(module.half().float(), seed)


def trained(module, seed):
    """A step of an optimizer."""
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for _, p in parameters(module):
        p.grad = draw(p, seed)
    optimizer.step()
    module.zero_grad()
    module.eval()


def in_inference_mode(module, seed):
    with torch.inference_mode():
        module(*module._its_inputs)
        for _, p in parameters(module):
            p.add_(draw(p, seed))


def shared_with_other_processes(module, seed):
    module.share_memory()
    through_data(module, seed)


def away_for_a_while(module, seed):
    module.to("meta")
    module.to_empty(device="cpu")
    load(module, seed)


CHANGES = [
    in_place, through_data, one_row_through_data, load, load_and_assign, other_data, other_strides,
    other_parameters, other_parameters_over_the_same_memory, flat, moved_away_and_back, twice_cast,
    twice_cast_by_half, trained, shared_with_other_processes, away_for_a_while, in_inference_mode,
]


def pair(family, name):
    eager, refusal = made(family, name)
    if refusal is not None:
        pytest.skip(refusal)
    eager = copy.deepcopy(eager)
    ours = copy.deepcopy(eager)
    switchyard.patch(ours)
    inputs = _check_hf._inputs(eager, torch.float32)
    eager._its_inputs = ours._its_inputs = inputs
    return eager, ours


def off(ours, eager):
    expected = _check_hf._output(eager, eager._its_inputs)
    return _check_hf._error(_check_hf._output(ours, ours._its_inputs), expected)


@pytest.mark.parametrize("family,decorated", [(c[:2], c[2]) for c in CLASSES], ids=[c[1] for c in CLASSES])
@torch.no_grad()
def test_a_class_follows_its_weights(family, decorated):
    eager, ours = pair(*family)
    assert off(ours, eager) < 1e-5
    before = _check_hf._output(eager, eager._its_inputs)
    for seed, change in enumerate(CHANGES):
        for module in (eager, ours):
            change(module, seed)
        after = _check_hf._output(eager, eager._its_inputs)
        assert _check_hf._error(after, before) > 1e-4, change  # or nothing would be tried
        before = after
        assert off(ours, eager) < 1e-5, change.__name__
    # Copies are of their own weights from the first call on, and leave the first alone.
    for copied in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        other, other_eager = copied(ours), copied(eager)
        assert off(other, other_eager) < 1e-5
        for module in (other, other_eager):
            through_data(module, 99)
        assert off(other, other_eager) < 1e-5 and off(ours, eager) < 1e-5
    # More tokens, none, and another number of experts for each.
    inputs = eager._its_inputs
    x = inputs[0].expand(70, *inputs[0].shape) if inputs[0].dim() == 2 else inputs[0].repeat(1, 70, 1)
    x = x.flatten(0, 1) if inputs[0].dim() == 2 else x
    many = [x, *(i.repeat(70, 1) for i in inputs[1:])]
    for their in ([i[:1] for i in many], many, inputs):
        eager._its_inputs = ours._its_inputs = their
        assert off(ours, eager) < 1e-5
    if len(inputs) == 3 and family[0] != "longcat_flash":  # whose eager forward() needs two of them
        eager._its_inputs = ours._its_inputs = [inputs[0], *(i[:, :1] for i in inputs[1:])]
        assert off(ours, eager) < 1e-5
        eager._its_inputs = ours._its_inputs = inputs
    if decorated:
        for implementation in ("eager", "switchyard"):
            ours.config._experts_implementation = implementation
            for module in (eager, ours):
                in_place(module, 100)
            assert off(ours, eager) < 1e-5


@torch.no_grad()
def test_modules_that_come_and_go():
    """Addresses of modules and weights are used again."""
    for seed in range(10):
        eager, ours = pair("gpt_oss", "GptOssExperts")
        for module in (eager, ours):
            through_data(module, seed)
        assert off(ours, eager) < 1e-5
        del eager, ours
    count = len(_hf._made)
    del module
    gc.collect()
    assert len(_hf._made) < count


@torch.no_grad()
def test_two_models_of_one_config():
    eager, ours = pair("gpt_oss", "GptOssExperts")
    other = copy.deepcopy(ours)
    other.config = ours.config
    other_eager = copy.deepcopy(eager)
    for module in (other, other_eager):
        through_data(module, 1)
    for _ in range(3):
        assert off(ours, eager) < 1e-5 and off(other, other_eager) < 1e-5


@torch.no_grad()
def test_an_activation_that_changes():
    eager, ours = pair("gpt_oss", "GptOssExperts")
    off(ours, eager)
    for module in (eager, ours):
        module.limit = 2.0
    assert off(ours, eager) < 1e-5
    eager, ours = pair("mixtral", "MixtralExperts")
    off(ours, eager)
    for module in (eager, ours):
        module.act_fn = torch.nn.GELU()
    assert off(ours, eager) < 1e-5


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


WRAPPED = [
    ("mixtral", "MixtralExperts", "gate_up_proj"),
    ("gpt_oss", "GptOssExperts", "down_proj_bias"),
    ("jetmoe", "JetMoeMoE", "input_linear.weight"),
    ("dbrx", "DbrxExperts", "mlp.v1"),
    ("llama4", "Llama4TextMoe", "experts.down_proj"),
    ("longcat_flash", "LongcatFlashExperts", "gate_up_proj"),
    ("step3p7", "Step3p7Experts", "down_proj"),
]


@pytest.mark.parametrize("family,name,weight", WRAPPED, ids=[w[1] for w in WRAPPED])
@pytest.mark.parametrize("called", [False, True])
@torch.no_grad()
def test_weights_that_are_computed_are_refused(family, name, weight, called):
    """By parametrizations, as adapters are, before the first call and after it."""
    eager, ours = pair(family, name)
    if called:
        off(ours, eager)
    for module in (eager, ours):
        holder, leaf = owner(module, weight)
        torch.nn.utils.parametrize.register_parametrization(holder, leaf, Doubled(), unsafe=True)
    refusal = rf"{weight.rpartition('.')[2]} .*neither a parameter or buffer of the module.*merge_and_unload"
    with pytest.raises(switchyard.Unsupported, match=refusal):
        ours(*ours._its_inputs)
    with pytest.raises(switchyard.Unsupported, match="neither a parameter"):
        switchyard.patch(copy.deepcopy(eager))
    for module in (eager, ours):
        torch.nn.utils.parametrize.remove_parametrizations(*owner(module, weight))
    assert off(ours, eager) < 1e-5


@pytest.mark.parametrize("family,name", [w[:2] for w in WRAPPED], ids=[w[1] for w in WRAPPED])
@torch.no_grad()
def test_weights_for_one_call(family, name):
    """Plain tensors in the place of parameters."""
    eager, ours = pair(family, name)
    for seed in range(2):
        weights = {n: draw(p, seed) for n, p in parameters(ours)}
        outs = [torch.func.functional_call(m, weights, tuple(m._its_inputs)) for m in (eager, ours)]
        expected, out = [out[0] if isinstance(out, tuple) else out for out in outs]
        assert _check_hf._error(out.double(), expected.double()) < 1e-5
        assert off(ours, eager) < 1e-5


@pytest.mark.parametrize("family,name", [w[:2] for w in WRAPPED], ids=[w[1] for w in WRAPPED])
def test_weights_that_are_not_loaded_are_refused(family, name):
    eager, _ = pair(family, name)
    with pytest.raises(switchyard.Unsupported, match="is on meta; load the weights first"):
        switchyard.patch(eager.to("meta"))


@torch.no_grad()
def test_weights_that_are_plain_attributes_are_refused():
    _, ours = pair("mixtral", "MixtralExperts")
    weight = ours.down_proj.detach().clone()
    del ours.down_proj
    ours.down_proj = weight
    with pytest.raises(switchyard.Unsupported, match=r"MixtralExperts.down_proj .*neither a parameter"):
        ours(*ours._its_inputs)


def grow(name, value):
    return lambda module: setattr(module, name, value)


@pytest.mark.parametrize(
    "change,named",
    [
        (grow("post_norm", torch.nn.RMSNorm(64)), "post_norm is a RMSNorm"),
        (grow("expert_scale", torch.nn.Parameter(torch.ones(8))), r"expert_scale \(\[8\]\)"),
        (grow("hidden_scale", torch.nn.Buffer(torch.ones(64))), r"hidden_scale \(\[64\]\)"),
        (grow("output_multiplier", 2.0), "output_multiplier is 2.0"),
        (grow("has_pre_expert_norm", True), "has_pre_expert_norm is True"),
        (grow("has_post_expert_norm", True), "has_post_expert_norm is True: a norm"),
        (grow("gate_dropout", torch.nn.functional.dropout), "gate_dropout is <function"),
        (grow("offsets", torch.ones(3)), r"offsets is a tensor of \[3\]"),
        (grow("act_fn", torch.nn.PReLU()), "PReLU|activation|act_fn.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@torch.no_grad()
def test_what_is_not_known_of_a_class_is_refused(change, named):
    eager, ours = pair("mixtral", "MixtralExperts")
    change(eager)
    with pytest.raises(switchyard.Unsupported, match=named):
        switchyard.patch(eager)
    change(ours)
    with pytest.raises(switchyard.Unsupported, match=named):
        ours(*ours._its_inputs)


def test_a_flag_that_a_newer_decorator_has_is_refused(monkeypatch):
    _, ours = pair("mixtral", "MixtralExperts")
    monkeypatch.setattr(_hf, "_flags", lambda: {"has_gate": True, "is_normed_twice": False, "has_down": True})
    ours.has_down = True
    with torch.no_grad():
        ours(*ours._its_inputs)
    _hf._made.clear()
    ours.has_down = False
    with pytest.raises(switchyard.Unsupported, match="MixtralExperts.has_down is False"):
        ours(*ours._its_inputs)


def test_a_newer_transformers_is_told_once(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.99.1")
    monkeypatch.setattr(_hf, "_warned", False)
    with pytest.warns(UserWarning, match=r"transformers 5.99.1 is newer than 5.24.*check-hf"):
        switchyard.register_with_transformers()
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        switchyard.register_with_transformers()
    monkeypatch.setattr("transformers.__version__", "5.24.0.dev0")
    monkeypatch.setattr(_hf, "_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        switchyard.register_with_transformers()


@pytest.mark.parametrize("family,name", [c[:2] for c in CLASSES if not c[2]], ids=lambda value: value)
def test_a_forward_of_another_signature_is_not_replaced(family, name, monkeypatch):
    eager, refusal = made(family, name)
    assert refusal is None
    module = copy.deepcopy(eager)
    monkeypatch.setattr(type(module), "forward", lambda self, hidden_states, routed, more: hidden_states)
    with pytest.raises(switchyard.Unsupported, match=rf"{name}.forward\(\) .* takes hidden_states, routed, more"):
        switchyard.patch(module)
    assert "forward" not in vars(module)
    monkeypatch.undo()
    module.forward = functools.partial(type(module).forward, module)
    with pytest.raises(switchyard.Unsupported, match="already replaced, by a partial; patch"):
        switchyard.patch(module)
    derived = type("Derived", (type(eager),), {"forward": lambda self, x: x})
    module = copy.deepcopy(eager)
    module.__class__ = derived
    with pytest.raises(switchyard.Unsupported, match="Derived has a forward"):
        switchyard.patch(module)


@torch.no_grad()
def test_what_is_refused_stays_as_it_is():
    """Also where it shares its config with what is patched."""
    config = transformers.Qwen3MoeConfig(**SMALL_MODEL, moe_intermediate_size=48, num_experts=8)
    config._experts_implementation = "eager"
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    first.act_fn = torch.nn.Tanh()
    ids = torch.arange(9)[None]
    expected = model(ids).logits
    with pytest.raises(switchyard.Unsupported, match="layers.0.mlp.experts: .*activation"):
        switchyard.patch(model)
    with pytest.raises(switchyard.InvalidArgument, match="partial is 'no'; use True or False"):
        switchyard.patch(model, partial="no")
    assert switchyard.patch(model, partial=True) == ["model.layers.1.mlp.experts"]
    for ours in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.allclose(ours(ids).logits, expected, atol=1e-5)
        first, second = (layer.mlp.experts for layer in ours.model.layers)
        assert first not in _hf._made and second in _hf._made


@pytest.mark.parametrize("change", [torch.bfloat16, torch.float64, "meta", "tf32", "autocast"], ids=str)
@torch.no_grad()
def test_settings_of_torch_do_not_matter(change, monkeypatch):
    """The default type and device, and what fp32 is multiplied in: modules are asked in fp32 on the host."""
    modules = [pair(*family)[1] for family in (("gpt_oss", "GptOssExperts"), ("nemotron_h", "NemotronHExperts"))]
    activations = [_hf._of_decorated(module).options["activation"] for module in modules]
    deepseek = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = deepseek.DeepseekV3Config(
        hidden_size=64, moe_intermediate_size=48, n_routed_experts=8, num_experts_per_tok=2, n_group=4,
        topk_group=2, n_shared_experts=1,
    )
    block = deepseek.DeepseekV3MoE(config).eval()
    for tensor in (*block.parameters(), *block.buffers()):
        tensor.data.normal_(std=0.3)
    routing = switchyard.MoeLayer.from_hf(block).routing
    assert routing.renormalize_epsilon == 1e-20
    context = torch.autocast("cpu", torch.bfloat16) if change == "autocast" else torch.no_grad()
    try:
        if change == "meta":
            torch.set_default_device("meta")
        elif change == "tf32":
            torch.set_float32_matmul_precision("medium")
        elif change != "autocast":
            torch.set_default_dtype(change)
        with context:
            assert [_hf._of_decorated(module).options["activation"] for module in modules] == activations
            assert switchyard.MoeLayer.from_hf(block).routing == routing
        assert torch.get_float32_matmul_precision() == ("medium" if change == "tf32" else "highest")
    finally:
        torch.set_default_device(None)
        torch.set_float32_matmul_precision("highest")
        torch.set_default_dtype(torch.float32)


def test_patching_twice_is_patching_once():
    eager, ours = pair("jetmoe", "JetMoeMoE")
    with torch.no_grad():
        off(ours, eager)
        assert switchyard.patch(ours) == [""]
        assert off(ours, eager) < 1e-5


COMPILED = [("mixtral", "MixtralExperts"), ("gpt_oss", "GptOssExperts")] + [c[:2] for c in CLASSES if not c[2]]


@pytest.mark.parametrize("family,name", COMPILED, ids=lambda value: value)
@torch.no_grad()
def test_compiled_code_follows_its_weights(family, name):
    torch._dynamo.reset()
    eager, ours = pair(family, name)
    ours.compile(backend="aot_eager", fullgraph=_hf._IN_GRAPHS)
    assert off(ours, eager) < 1e-5
    for seed, change in enumerate((in_place, through_data, other_data, load_and_assign)):
        for module in (eager, ours):
            change(module, seed)
        assert off(ours, eager) < 1e-5, change.__name__
    copied = copy.deepcopy(ours)
    copied.compile(backend="aot_eager", fullgraph=_hf._IN_GRAPHS)
    through_data(copied, 7)
    assert off(ours, eager) < 1e-5 < off(copied, eager)


@pytest.mark.skipif(not _hf._IN_GRAPHS, reason="this torch breaks the graph there")
@pytest.mark.parametrize("family,name", [w[:2] for w in WRAPPED], ids=[w[1] for w in WRAPPED])
@pytest.mark.parametrize("grad", [False, True])
def test_compiled_code_refuses_weights_for_one_call(family, name, grad):
    """Or else it would compute with the module's own."""
    torch._dynamo.reset()
    eager, ours = pair(family, name)
    with torch.set_grad_enabled(grad):
        compiled = torch.compile(
            lambda weights: torch.func.functional_call(ours, weights, tuple(ours._its_inputs)), backend="aot_eager"
        )
        own = dict(parameters(ours))
        expected, out = ours(*ours._its_inputs), compiled(own)
        expected, out = [o[0] if isinstance(o, tuple) else o for o in (expected, out)]
        assert torch.equal(out, expected)
        with pytest.raises(switchyard.Unsupported, match="given tensors in place of those of.*functional_call"):
            compiled({n: draw(p, 3) for n, p in own.items()})


@torch.no_grad()
def test_export_is_refused():
    """A program would have the module as a number of this process."""
    _, ours = pair("gpt_oss", "GptOssExperts")
    for strict in (False, True):
        with pytest.raises(Exception, match="torch.export would put GptOssExperts.*experts_implementation='eager'"):
            torch.export.export(ours, tuple(ours._its_inputs), strict=strict)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("made_before", [False, True])
def test_traces_and_transforms_are_refused(made_before, grad):
    _, ours = pair("gpt_oss", "GptOssExperts")
    x, ids, weights = ours._its_inputs
    with torch.set_grad_enabled(grad):
        if made_before:
            ours(x, ids, weights)
        with pytest.raises(switchyard.Unsupported, match="torch.jit traces"):
            torch.jit.trace(ours, (x, ids, weights))
        each = [torch.stack([t, t]) for t in (x, ids, weights)]
        with pytest.raises(switchyard.Unsupported, match="hidden_states is a tensor of a transform"):
            torch.vmap(ours)(*each)
        with pytest.raises(switchyard.Unsupported, match="top_k_weights is a tensor of a transform"):
            torch.func.grad(lambda weights: ours(x, ids, weights).sum())(weights)


def test_processes_have_numbers_of_their_own():
    """Or else a saved program would run another model's experts."""
    script = "from switchyard import _handle; print(_handle.next_number())"
    numbers = [int(python("-c", script).stdout) for _ in range(3)]
    assert len(set(numbers)) == 3 and min(numbers) > 2**40 and max(numbers) < 2**63


def test_a_gradient_of_weights_alone_is_refused():
    """Also where the layer reads views of them, which do not say that they want one."""
    for family, name in COMPILED:
        eager, ours = pair(family, name)
        for parameter in ours.parameters():
            parameter.requires_grad_(True)
        out = ours(*ours._its_inputs)
        out = out[0] if isinstance(out, tuple) else out
        with pytest.raises(switchyard.Unsupported, match="no backward pass"):
            out.sum().backward()


@torch.no_grad()
def test_threads_that_run_one_model():
    pairs = [pair("gpt_oss", "GptOssExperts") for _ in range(3)]
    config = pairs[0][1].config
    for seed, (eager, ours) in enumerate(pairs):
        ours.config = config  # one memory for all
        for module in (eager, ours):
            in_place(module, seed)
    worst = []

    def work(_):
        with torch.no_grad():
            worst.append(max(off(ours, eager) for _ in range(20) for eager, ours in pairs))

    in_threads(work, range(3))
    assert len(worst) == 3 and max(worst) < 1e-5
