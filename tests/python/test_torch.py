"""torch.compile(), gradients."""

import pytest
import torch

import switchyard
from reference import routing
from switchyard import Experts

E, I, H, K, T = 6, 32, 64, 2, 9


@pytest.fixture
def layer():
    return Experts(torch.randn(E, 2 * I, H) / 8, torch.randn(E, H, I) / 6, top_k=K, max_tokens=64)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiles_as_one_graph(layer, backend):
    def step(x, ids, weights):
        return layer(x + 1, ids, weights) * 2

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (T, 3, 20):
        x = torch.randn(tokens, H)
        r = routing(tokens, E, K)
        assert torch.allclose(compiled(x, *r), step(x, *r), atol=1e-5)


def test_compiled_code_does_not_depend_on_calls_before(layer):
    """What an eager call keeps for the next is nothing that compiled code guards."""
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(lambda *batch: layer(*batch), fullgraph=True, backend=backend)
    x, r = torch.randn(T, H), routing(T, E, K)
    with torch.no_grad():
        expected = compiled(x, *r)
        for _ in range(3):
            assert torch.allclose(layer(x, *r), expected, atol=1e-5)
        layer(x[1:], r[0][1:], r[1][1:])
        assert torch.allclose(compiled(x, *r), expected, atol=1e-5)
    assert len(frames) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_with_an_output_that_is_given(layer, backend):
    def step(x, ids, weights, out):
        layer(x, ids, weights, out=out)
        return out + 1

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    x, r = torch.randn(T, H), routing(T, E, K)
    out = torch.empty_like(x)
    assert torch.allclose(compiled(x, *r, out), layer(x, *r) + 1, atol=1e-5)
    assert torch.allclose(out, layer(x, *r), atol=1e-5)


def test_fake_tensors_have_the_right_form(layer):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, ids, weights = torch.empty(T, H), torch.empty(T, K).long(), torch.empty(T, K)
        out = torch.ops.switchyard.experts(x, ids, weights, None, [], 1.0, 0, layer._number)
        assert out.shape == (T, H) and out.dtype == torch.float32


def test_operator_passes_torchs_own_check(layer):
    x, r = torch.randn(T, H), routing(T, E, K)
    torch.library.opcheck(
        torch.ops.switchyard.experts.default,
        (x, *r, None, [], 1.0, 0, layer._number),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_compiled_code_says_when_the_layer_is_gone():
    layer = Experts(torch.zeros(E, 2 * I, H), torch.zeros(E, H, I), top_k=K)
    number = layer._number
    x, r = torch.randn(T, H), routing(T, E, K)
    del layer
    with pytest.raises(switchyard.InvalidArgument, match="is gone"):
        torch.ops.switchyard.experts(x, *r, None, [], 1.0, 0, number)


def test_a_gradient_is_refused(layer):
    x, r = torch.randn(T, H, requires_grad=True), routing(T, E, K)
    out = layer(x, *r)
    assert out.requires_grad
    assert torch.equal(out.detach(), layer(x.detach(), *r))
    with pytest.raises(switchyard.Unsupported, match="backward"):
        out.sum().backward()
    with pytest.raises(NotImplementedError):
        layer(x.detach(), r[0], r[1].requires_grad_()).sum().backward()
    with pytest.raises(switchyard.Unsupported):
        layer(x, *r, out=torch.empty(T, H))
    with torch.no_grad():
        assert not layer(x, *r).requires_grad
    with torch.inference_mode():
        layer(x, *r)


def calls_that_write():
    """Calls with an output of theirs, by the output's name."""
    x, (ids, weights) = torch.randn(T, H), routing(T, E, K)
    w13, w2 = torch.randn(E, 2 * I, H) / 8, torch.randn(E, H, I) / 6
    layer, gemm = Experts(w13, w2, top_k=K), switchyard.GroupedGemm(w13)
    routed = Experts(w13, w2, top_k=K, routing=switchyard.Routing())
    order = switchyard.permute(ids, E)
    rows, logits = x[order.tokens.long()], torch.randn(T, E)
    exchange = switchyard.Exchange(switchyard.World.single(), hidden=H, num_experts=E, top_k=K, max_tokens=T)
    received = exchange.dispatch(x.bfloat16(), ids, weights)
    return {
        "experts": ((T, H), lambda out: layer(x, ids, weights, out=out)),
        "logits": ((T, H), lambda out: routed.from_logits(x, logits, out=out)),
        "weights_out": ((T, K), lambda out: routed.from_logits(x, logits, weights_out=out)),
        "grouped_gemm": ((T * K, 2 * I), lambda out: gemm(rows, order.ends, out=out)),
        "unpermute": ((T, H), lambda out: switchyard.unpermute(rows, order.positions, weights, out=out)),
        "topk": ((T, K), lambda out: switchyard.topk(logits, K, weights_out=out)),
        "combine": ((T, H), lambda out: exchange.combine(received.rows, received.handle, out=out)),
    }


def test_an_output_that_requires_a_gradient_is_refused():
    """Its gradient would be that of what it was before."""
    for name, (shape, call) in calls_that_write().items():
        with torch.no_grad():
            call(torch.empty(shape))
        if name == "combine":
            continue  # a handle is combined once
        before = torch.ones(shape, requires_grad=True)
        out = before * 2
        with pytest.raises(switchyard.Unsupported, match="requires a gradient, which would be wrong|backward"):
            call(out)
        assert (out == 2).all(), name
        with torch.no_grad():
            call(out)
    _, combine = calls_that_write()["combine"]
    with pytest.raises(switchyard.Unsupported, match="out requires a gradient"):
        combine(torch.ones(T, H, requires_grad=True) * 2)


def test_choosing_experts_has_no_gradient():
    logits = torch.randn(T, E, requires_grad=True)
    with pytest.raises(switchyard.Unsupported, match="backward"):
        switchyard.topk(logits, K)
    with torch.no_grad():
        switchyard.topk(logits, K)


def test_a_cached_layer_knows_whose_gradient_is_asked_for():
    """A view that needs one has the memory of one that does not."""
    flat, w2 = torch.nn.Parameter(torch.randn(E * 2 * I * H)), torch.randn(E, H, I)
    x, (ids, weights) = torch.randn(T, H), routing(T, E, K)
    plain, trained = flat.detach().view(E, 2 * I, H), flat.view(E, 2 * I, H)
    assert not switchyard.experts(x, plain, w2, ids, weights).requires_grad
    assert switchyard.experts(x, trained, w2, ids, weights).requires_grad
    assert not switchyard.experts(x, plain, w2, ids, weights).requires_grad


def test_forward_mode_and_traces_are_refused(layer):
    x, (ids, weights) = torch.randn(T, H), routing(T, E, K)
    gemm = switchyard.GroupedGemm(torch.randn(E, I, H))
    for _ in range(3):  # a call like the one before takes a shorter way
        layer(x, ids, weights)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(switchyard.Unsupported, match="x has a tangent"):
                layer(dual, ids, weights)
            with pytest.raises(switchyard.Unsupported, match="x has a tangent"):
                gemm(dual, torch.tensor([1, 2, 3, 4, 5, T]))
        with torch.no_grad():
            layer(x, ids, weights)
            with pytest.raises(switchyard.Unsupported, match="torch.jit traces"):
                torch.jit.trace(lambda x: layer(x, ids, weights), (x,))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_calls_like_the_one_before_look_at_what_torch_knows(layer, grad, given):
    """All four tensors of both short ways."""
    x, (ids, weights) = torch.randn(T, H), routing(T, E, K)
    tensors = {"x": x, "topk_ids": ids, "topk_weights": weights} | ({"out": torch.empty_like(x)} if given else {})

    def call(**other):
        return layer(**tensors | other)

    forward_ad = torch.autograd.forward_ad
    with torch.set_grad_enabled(grad):
        expected = call().clone()
        for name, tensor in tensors.items():
            assert torch.equal(call(), expected)
            with pytest.raises(switchyard.InvalidArgument, match=f"{name} is a negated view"):
                call(**{name: torch._neg_view(tensor)})
            if tensor.is_floating_point():
                assert torch.equal(call(), expected)
                with forward_ad.dual_level():
                    dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
                    with pytest.raises(switchyard.Unsupported, match=f"{name} has a tangent"):
                        call(**{name: dual})
                    assert torch.equal(call(), expected)
            for transform in (torch.vmap, torch.func.vmap):
                assert torch.equal(call(), expected)
                with pytest.raises(switchyard.Unsupported, match=f"{name} is a tensor of a transform"):
                    transform(lambda each: call(**{name: each}))(torch.stack([tensor, tensor]))
        with pytest.raises(switchyard.Unsupported, match="x is a tensor of a transform"):
            torch.func.grad(lambda x: call(x=x).sum())(x)


@pytest.mark.parametrize("grad", [False, True])
def test_what_can_be_called_compiles(grad):
    """Operators and functions, too, at which a graph may break."""
    w13, w2, w = torch.randn(E, 2 * I, H) / 8, torch.randn(E, H, I) / 6, torch.randn(E, I, H)
    layer = Experts(w13, w2, top_k=K, max_tokens=64, routing=switchyard.Routing())
    gemm = switchyard.GroupedGemm(w)
    x, (ids, weights), logits = torch.randn(T, H), routing(T, E, K), torch.randn(T, E)
    ends, rows, places = torch.tensor([1, 2, 3, 4, 5, T]), torch.randn(T * K, H), switchyard.permute(ids, E).positions
    calls = {
        "Experts": lambda: layer(x, ids, weights),
        "from_logits": lambda: layer.from_logits(x, logits),
        "experts": lambda: switchyard.experts(x, w13, w2, ids, weights),
        "GroupedGemm": lambda: gemm(x, ends),
        "grouped_gemm": lambda: switchyard.grouped_gemm(x, w, ends),
        "permute": lambda: switchyard.permute(ids, E).positions,
        "unpermute": lambda: switchyard.unpermute(rows, places, weights),
    }
    with torch.set_grad_enabled(grad):
        for name, call in calls.items():
            compiled = torch.compile(call, backend="eager")
            for _ in range(2):
                assert torch.equal(compiled(), call()), name


@pytest.mark.parametrize("kind", [torch.Tensor.numpy, lambda tensor: tensor], ids=["numpy", "torch"])
def test_what_is_missing_is_named(layer, kind):
    x, ids, weights = map(kind, (torch.randn(T, H), *routing(T, E, K)))
    for _ in range(2):
        with pytest.raises(switchyard.InvalidArgument, match="topk_ids is None; pass the experts of each token"):
            layer(x, None, weights)
        with pytest.raises(switchyard.InvalidArgument, match="topk_weights is None; pass the weights"):
            layer(x, ids, None)
        layer(x, ids, weights)


def test_fp8_without_scales_says_what_to_pass(layer):
    x, r = torch.randn(T, H).to(torch.float8_e4m3fn), routing(T, E, K)
    gemm = switchyard.GroupedGemm(torch.randn(E, I, H))
    for out in (None, torch.empty(T, H, dtype=torch.bfloat16)):
        with pytest.raises(switchyard.MissingTensor, match=r"x is float8_e4m3fn; pass x_scale, too: \[9, 1\]"):
            layer(x, *r, out=out)
    with pytest.raises(switchyard.MissingTensor, match="pass x_scale"):
        gemm(x, torch.full((E,), T))


def test_flags_are_no_numbers(layer):
    x, r = torch.randn(T, H), routing(T, E, K)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            layer(x[:1], *(t[:1] for t in r), max_tokens_per_rank=1)
            with pytest.raises(switchyard.InvalidArgument, match="max_tokens_per_rank is True"):
                layer(x[:1], *(t[:1] for t in r), max_tokens_per_rank=True)
            for wrong in (False, 0.0):
                layer(x, *r)
                with pytest.raises(switchyard.InvalidArgument, match=f"max_tokens_per_rank is {wrong}"):
                    layer(x, *r, max_tokens_per_rank=wrong)
            layer(x, *r)
            with pytest.raises(switchyard.InvalidArgument, match="accumulate is 0"):
                layer(x, *r, accumulate=0)
    with pytest.raises(switchyard.InvalidArgument, match="top_k is True"):
        Experts(torch.zeros(E, 2 * I, H), torch.zeros(E, H, I), top_k=True)
    for wrong in (("padded", True), ("packed", False)):
        with pytest.raises(switchyard.InvalidArgument, match="layout is"):
            switchyard.permute(r[0], E, wrong)
        with pytest.raises(switchyard.InvalidArgument, match="layout is"):
            switchyard.GroupedGemm(torch.randn(E, I, H))(x, torch.full((E,), T), layout=wrong)


@pytest.mark.parametrize("order", ["up_gate", "interleaved"])
def test_an_order_of_two_arrays_is_refused(order):
    gate, up = torch.randn(2, E, I, H)
    with pytest.raises(switchyard.InvalidArgument, match=f"order is '{order}', but w13 is .gate, up."):
        Experts((gate, up), torch.randn(E, H, I), top_k=K, order=order)


def test_a_gradient_of_the_weights_is_refused():
    w13 = torch.nn.Parameter(torch.randn(E, 2 * I, H))
    layer = Experts(w13, torch.randn(E, H, I), top_k=K)
    with pytest.raises(switchyard.Unsupported):
        layer(torch.randn(T, H), *routing(T, E, K)).sum().backward()


@pytest.mark.parametrize("of_weights", [False, True])
def test_a_gradient_is_refused_when_compiled(of_weights):
    w13 = torch.nn.Parameter(torch.randn(E, 2 * I, H), requires_grad=of_weights)
    layer = Experts(w13, torch.randn(E, H, I), top_k=K)
    r = routing(T, E, K)
    compiled = torch.compile(lambda x: layer(x, *r) * 2, fullgraph=True, backend="aot_eager")
    out = compiled(torch.randn(T, H, requires_grad=not of_weights))  # forward alone is fine
    assert out.requires_grad
    with pytest.raises(switchyard.Unsupported):
        out.sum().backward()


def test_a_promise_is_of_its_call_alone(layer):
    """max_tokens_per_rank of each way to call, which keep what they described for the next call."""
    x, (ids, weights) = torch.randn(T, H), routing(T, E, K)
    compiled = torch.compile(
        lambda most, out: layer(x, ids, weights, out=out, max_tokens_per_rank=most), fullgraph=True, backend="eager"
    )

    def compiled_with_output(most):
        out = torch.empty_like(x)
        compiled(most, out)
        return out

    ways = {
        "tensors": lambda most: layer(x, ids, weights, max_tokens_per_rank=most),
        "arrays": lambda most: torch.from_numpy(
            layer(x.numpy(), ids.numpy(), weights.numpy(), max_tokens_per_rank=most)
        ),
        "compiled": lambda most: compiled(most, None),
        "compiled, with an output": compiled_with_output,
    }
    for grad in (True, False):
        torch._dynamo.reset()
        with torch.set_grad_enabled(grad):
            expected = layer(x, ids, weights)
            for name, run in ways.items():
                for _ in range(3):
                    assert torch.equal(run(T), expected), name
                with pytest.raises(switchyard.InvalidArgument, match=f"max_tokens_per_rank is 3 .*has {T} tokens"):
                    run(3)
                with pytest.raises(switchyard.InvalidArgument, match="max_tokens_per_rank is 65"):
                    run(65)
                assert torch.equal(run(0), expected), name
    with pytest.raises(switchyard.InvalidArgument, match="max_tokens_per_rank"):
        layer(x, ids, weights, max_tokens_per_rank=2.5)
