"""Experts over tensors of every layout, dtype and kind, beside plain torch."""

import gc
import sys

import numpy
import pytest
import torch

from conftest import started
import switchyard
from reference import error, experts, routing
from switchyard import Activation, Diagnostics, Experts, Numerics, Placement

E, I, H, K, T = 6, 48, 64, 2, 17
F32_ERROR = 1e-5  # the order of sums


def weights(dtype=torch.float32, gated=True):
    gate, up = torch.randn(2, E, I, H) / 8
    down = torch.randn(E, H, I) / 7
    gate, up, down = (w.to(dtype) for w in (gate, up, down))
    return (gate if gated else None), up, down


def made(**more):
    """A layer, and the matrices that it was made of."""
    gate, up, down = weights()
    arguments = dict(w13=torch.cat((gate, up), dim=1), w2=down, top_k=K) | more
    return Experts(arguments.pop("w13"), arguments.pop("w2"), **arguments), (gate, up, down)


def check(layer, batch, gate, up, down, activation=Activation(), biases=(None, None, None)):
    """The layer computes what plain torch does."""
    x, *slots = batch
    assert error(layer(*batch), experts(x, gate, up, down, *slots, activation, biases)) < F32_ERROR


@pytest.fixture
def batch():
    ids, topk_weights = routing(T, E, K)
    return torch.randn(T, H), ids, topk_weights


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_layouts(batch, order, transposed, biased):
    gate, up, down = weights()
    biases = [torch.randn(E, I), torch.randn(E, I), torch.randn(E, H)] if biased else [None] * 3

    def joined(g, u):
        if order == "interleaved":
            return torch.stack((g, u), dim=2).flatten(1, 2)
        return torch.cat((g, u) if order == "gate_up" else (u, g), dim=1)

    w13, w2 = joined(gate, up), down
    if transposed:
        w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    layer = Experts(
        w13, w2, top_k=K, order=order, transposed=transposed,
        w13_bias=joined(biases[0][..., None], biases[1][..., None])[..., 0] if biased else None,
        w2_bias=biases[2],
    )
    check(layer, batch, gate, up, down, biases=biases)


@pytest.mark.parametrize(
    "activation",
    [
        Activation("silu"), Activation("silu", alpha=1.702, limit=0.7, up_bias=1.0),
        Activation("gelu"), Activation("gelu_tanh"), Activation("relu"),
        Activation("relu2", gated=False), Activation("identity", gated=False),
        Activation("situ", alpha=0.8), Activation("situ", alpha=0.5, limit=0.7, up_bias=0.25),
    ],
    ids=str,
)
def test_activations(batch, activation):
    gate, up, down = weights(gated=activation.gated)
    w13 = torch.cat((gate, up), dim=1) if activation.gated else up
    layer = Experts(w13, down, top_k=K, activation=activation)
    assert layer.activation.kind == activation.kind
    assert layer.activation.limit == pytest.approx(activation.limit)
    check(layer, batch, gate, up, down, activation)


def test_gate_and_up_may_be_two_arrays(batch):
    gate, up, down = weights()
    check(Experts((gate, up), down, top_k=K), batch, gate, up, down)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_torch(batch, dtype):
    gate, up, down = weights(dtype)
    x, ids, topk_weights = batch
    x = x.to(dtype)
    layer = Experts(torch.cat((gate, up), dim=1), down, top_k=K)
    out = layer(x, ids, topk_weights)
    assert out.dtype == dtype
    expected = experts(x, gate, up, down, ids, topk_weights, Activation())
    plain = experts(x, gate, up, down, ids, topk_weights, Activation(), dtype=dtype)
    assert error(out, expected) < 2 * error(plain, expected)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_types_of_routing(batch, ids_dtype, weights_dtype):
    x, ids, topk_weights = batch
    layer, matrices = made()
    check(layer, (x, ids.to(ids_dtype), topk_weights.to(weights_dtype)), *matrices)


def quantised(w, block):
    """float8_e4m3fn codes and the scales [E, R, C] of blocks."""
    rows, cols = w.shape[1:]
    height, width = min(block[0], rows), min(block[1], cols)
    scales = torch.empty(E, -(-rows // height), -(-cols // width))
    codes = torch.empty(w.shape, dtype=torch.float8_e4m3fn)
    exact = torch.empty_like(w)
    for e in range(E):
        for r in range(scales.shape[1]):
            for c in range(scales.shape[2]):
                at = (e, slice(r * height, (r + 1) * height), slice(c * width, (c + 1) * width))
                # Powers of two, so that e8m0 has them, too.
                scale = 2.0 ** torch.ceil(torch.log2(w[at].abs().max() / 448))
                scales[e, r, c] = scale
                codes[at] = (w[at] / scale).to(torch.float8_e4m3fn)
                exact[at] = codes[at].float() * scale
    return codes, scales, exact


@pytest.mark.parametrize("order", ["gate_up", "interleaved"])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize(
    "form,block",
    [
        ("blocks", (32, 32)),
        ("blocks that gate and up share", (64, 32)),
        ("rows", (1, H)),
        ("matrices", (2 * I, H)),
    ],
)
def test_fp8_scales(batch, form, block, scale_dtype, order):
    gate, up, down = weights()
    if order == "interleaved":
        w13 = torch.stack((gate, up), dim=2).flatten(1, 2)
    else:
        w13 = torch.cat((gate, up), dim=1)
    codes, scales, exact = quantised(w13, block)
    w2_block = {"rows": (1, I), "matrices": (H, I)}.get(form, block)
    w2_codes, w2_scales, w2_exact = quantised(down, w2_block)
    if form == "matrices":
        scales, w2_scales = scales[:, 0, 0], w2_scales[:, 0, 0]
    layer = Experts(
        codes, w2_codes, top_k=K, order=order, w13_scale=scales.to(scale_dtype),
        w2_scale=w2_scales.to(scale_dtype), block=block if form.startswith("blocks") else None,
        numerics=Numerics(compute="f32"),
    )
    if order == "interleaved":
        gate, up = exact[:, 0::2], exact[:, 1::2]
    else:
        gate, up = exact.chunk(2, dim=1)
    check(layer, batch, gate, up, w2_exact)


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("rows", [16, 24, 32, 40, 64])
@pytest.mark.parametrize("given", [(32, 32), (16, 64), (64, 16), (32, 128), (128, 128), None])
def test_fp8_blocks_of_every_height_beside_rows_of_gate(rows, given, order):
    """A block may have as many rows as gate, more, fewer, or rows of both, and [n, 2, 1] is blocks where it can be."""
    block = given or (128, 128)
    rows *= 1 if given else 4
    codes, scales, exact = quantised(torch.randn(E, 2 * rows, H) / 8, block)
    w2_codes, w2_scales, down = quantised(torch.randn(E, H, rows) / 7, block)
    scales *= torch.rand(scales.shape) + 0.5  # so that no two are alike
    height, width = block
    exact = codes.float() * scales.repeat_interleave(height, 1).repeat_interleave(width, 2)[:, : 2 * rows, :H]
    layer = Experts(
        codes, w2_codes, top_k=K, order=order, w13_scale=scales, w2_scale=w2_scales, block=given,
        numerics=Numerics(compute="f32"),
    )
    gate, up = (exact[:, 0::2], exact[:, 1::2]) if order == "interleaved" else exact.chunk(2, dim=1)
    ids, topk_weights = routing(T, E, K)
    check(layer, (torch.randn(T, H), ids, topk_weights), *((up, gate) if order == "up_gate" else (gate, up)), down)


def test_w13_and_w2_of_two_types():
    gate, up, down = weights()
    with pytest.raises(switchyard.DTypeMismatch, match="w13 is f32 and w2 is bf16"):
        Experts(torch.cat((gate, up), dim=1), down.bfloat16(), top_k=K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["rows backwards", "columns backwards", "experts backwards", "rows overlap", "rows repeat"])
def test_strides_of_weights(batch, how, dtype):
    """Rows that are no further apart than they are long, or in another order."""
    gate, up, down = (w.to(dtype) for w in weights())
    w13 = torch.cat((gate, up), dim=1)
    if how == "rows overlap":
        w13 = torch.randn(E * 2 * I * 3 + H, dtype=dtype).as_strided((E, 2 * I, H), (2 * I * 3, 3, 1))
    elif how == "rows repeat":
        w13 = w13[:, :1].expand(E, 2 * I, H)
    matrices = *w13.float().chunk(2, dim=1), down.float()
    if "backwards" in how:
        axis = {"experts": 0, "rows": 1, "columns": 2}[how.split()[0]]
        flipped = (w13 if dtype == torch.float32 else w13.float()).flip(axis).numpy()
        w13, down = numpy.flip(flipped, axis), down.float().numpy()
        layer = Experts(w13, down, top_k=K)
        x, ids, topk_weights = batch
        result = torch.from_numpy(layer(x.numpy(), ids.numpy(), topk_weights.numpy()))
        assert error(result, experts(x, *matrices, ids, topk_weights, Activation())) < F32_ERROR
        return
    layer = Experts(w13, down, top_k=K, numerics=Numerics(compute="f32"))
    check(layer, batch, *matrices)


def test_fp8_with_a_scale_for_gate_and_one_for_up(batch):
    gate, up, down = weights()
    gate_codes, gate_scales, gate = quantised(gate, (I, H))
    up_codes, up_scales, up = quantised(up * 3, (I, H))
    w2_codes, w2_scales, down = quantised(down, (H, I))
    layer = Experts(
        torch.cat((gate_codes.view(torch.uint8), up_codes.view(torch.uint8)), dim=1).view(
            torch.float8_e4m3fn
        ),
        w2_codes,
        top_k=K,
        w13_scale=torch.cat((gate_scales[:, :, 0], up_scales[:, :, 0]), dim=1),
        w2_scale=w2_scales,
        numerics=Numerics(compute="f32"),
    )
    check(layer, batch, gate, up, down)


def test_weights_are_used_in_place(batch):
    gate, up, down = weights()
    w13 = torch.cat((gate, up), dim=1)
    layer = Experts(w13, down, top_k=K)
    layer(*batch)
    down.mul_(2)
    check(layer, batch, gate, up, down)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_other_batches_of_other_forms(batch, mode):
    """The description of tensors that is kept between calls is made anew when they change."""
    with mode():
        other_batches_of_other_forms(batch)


def other_batches_of_other_forms(batch):
    layer, matrices = made(max_tokens=64)
    x, ids, topk_weights = batch
    for _ in range(2):
        for tokens in (T, 3, 0, 1):
            part = (x[:tokens], ids[:tokens], topk_weights[:tokens])
            assert layer(*part).shape == (tokens, H)
            if tokens:
                check(layer, part, *matrices)
        check(layer, (torch.randn(T, 2 * H)[:, :H], ids, topk_weights), *matrices)
        out = torch.zeros(T, 3 * H)[:, H : 2 * H]
        assert layer(x, ids.int(), topk_weights.bfloat16(), out=out) is out
        expected = experts(x, *matrices, ids, topk_weights.bfloat16(), Activation())
        assert error(out, expected) < F32_ERROR
        strided = torch.stack((ids, ids), dim=2)[:, :, 0]
        check(layer, (x, strided, topk_weights), *matrices)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, ids, w: ((x.bfloat16(), ids, w), {}),
        lambda x, ids, w: ((x[:, ::2].repeat(1, 2), ids, w), {}),
        lambda x, ids, w: ((torch.cat((x, x), dim=1)[:, H:], ids, w), {}),
        lambda x, ids, w: ((x, ids.int(), w), {}),
        lambda x, ids, w: ((x, torch.stack((ids, ids), 2)[:, :, 1], w), {}),
        lambda x, ids, w: ((x, ids, w.bfloat16()), {}),
        lambda x, ids, w: ((x, ids, w.T.contiguous().T), {}),
        lambda x, ids, w: ((x, ids, w), {"scale": 0.5}),
        lambda x, ids, w: ((x, ids, w), {"out": torch.empty(T, 2 * H)[:, :H]}),
        lambda x, ids, w: ((x, ids, w), {"out": torch.empty(T, H, dtype=torch.bfloat16)}),
        lambda x, ids, w: ((x, ids, w), {"out": torch.zeros(T, H), "accumulate": True}),
        lambda x, ids, w: ((x[1:], ids[1:], w[1:]), {}),
    ],
)
def test_a_call_of_another_form_after_many_of_one(batch, change):
    """The plainest of calls takes a shorter way, for which nothing of its tensors may have changed."""
    layer, matrices = made()
    with torch.no_grad():
        for _ in range(3):
            check(layer, batch, *matrices)
        arguments, more = change(*batch)
        out = layer(*arguments, **more)
        other = more.get("scale", 1.0) * experts(arguments[0], *matrices, *arguments[1:], Activation())
        assert out.shape == arguments[0].shape and more.get("out", out) is out
        assert error(out, other) < (1e-2 if torch.bfloat16 in (out.dtype, arguments[0].dtype) else F32_ERROR)
        check(layer, batch, *matrices)


def test_errors_come_on_the_short_way_too(batch):
    layer, matrices = made()
    x, ids, topk_weights = batch
    with torch.no_grad():
        for _ in range(3):
            layer(*batch)
        with pytest.raises(switchyard.InvalidArgument, match="99"):
            layer(x, ids.clone().fill_(99), topk_weights)
        with pytest.raises(switchyard.InvalidArgument, match="topk_ids is a list"):
            layer(x, ids.tolist(), topk_weights)
        expected = experts(x, *matrices, ids, topk_weights, Activation())
        assert error(layer(x, ids.numpy(), topk_weights.numpy()), expected) < F32_ERROR
        layer.close()
        with pytest.raises(switchyard.InvalidArgument, match="closed"):
            layer(*batch)


def test_numpy(batch):
    gate, up, down = weights()
    x, ids, topk_weights = batch
    layer = Experts(torch.cat((gate, up), dim=1).numpy(), down.numpy(), top_k=K)
    out = layer(x.numpy(), ids.numpy(), topk_weights.numpy())
    assert isinstance(out, numpy.ndarray)
    expected = experts(x, gate, up, down, ids, topk_weights, Activation())
    assert error(torch.from_numpy(out), expected) < F32_ERROR


class OnlyDLPack:
    """An array of another library."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **arguments):
        return self.tensor.__dlpack__()


def test_dlpack(batch):
    gate, up, down = weights(torch.bfloat16)
    x, ids, topk_weights = batch
    x = x.bfloat16()
    w13 = torch.cat((gate, up), dim=1)
    layer = Experts(OnlyDLPack(w13), OnlyDLPack(down), top_k=K)
    out = torch.empty_like(x)
    layer(OnlyDLPack(x), OnlyDLPack(ids), OnlyDLPack(topk_weights), out=OnlyDLPack(out))
    assert torch.equal(out, Experts(w13, down, top_k=K)(x, ids, topk_weights))
    with pytest.raises(switchyard.InvalidArgument, match="pass out"):
        layer(OnlyDLPack(x), OnlyDLPack(ids), OnlyDLPack(topk_weights))


def test_function_keeps_a_layer_as_long_as_its_weights(batch):
    from switchyard import _cache

    gate, up, down = weights()
    w13 = torch.cat((gate, up), dim=1)
    x, ids, topk_weights = batch
    before = len(_cache._cache)
    first = switchyard.experts(x, w13, down, ids, topk_weights)
    assert len(_cache._cache) == before + 1
    assert torch.equal(switchyard.experts(x, w13, down, ids, topk_weights), first)
    assert len(_cache._cache) == before + 1
    # More tokens than the layer takes.
    many = switchyard.experts(
        x.repeat(90, 1), w13, down, ids.repeat(90, 1), topk_weights.repeat(90, 1)
    )
    assert torch.allclose(many[-T:], first, atol=1e-5)
    del w13
    gc.collect()
    assert len(_cache._cache) == before


def test_function_sees_changed_biases(batch):
    gate, up, down = weights()
    w13 = torch.cat((gate, up), dim=1)
    x, ids, topk_weights = batch
    biases = torch.zeros(E, 2 * I), torch.zeros(E, H)
    arguments = dict(w13_bias=biases[0], w2_bias=biases[1])
    switchyard.experts(x, w13, down, ids, topk_weights, **arguments)
    biases[1].add_(1)
    expected = experts(
        x, gate, up, down, ids, topk_weights, Activation(), (None, None, biases[1])
    )
    out = switchyard.experts(x, w13, down, ids, topk_weights, **arguments)
    assert error(out, expected) < F32_ERROR


@pytest.mark.parametrize(
    "arguments,kinds,text",
    [
        (dict(w2=torch.zeros(E, I, H)), (switchyard.ShapeMismatch, ValueError), r"w2 is \(6, 48, 64\)"),
        (dict(w13=torch.zeros(E, H)), (switchyard.ShapeMismatch, ValueError), "3 dimensions"),
        (dict(w13=torch.zeros(E, 2 * I, H, dtype=torch.float64)), (switchyard.DTypeMismatch, TypeError), "float64"),
        (dict(top_k=0), (switchyard.InvalidArgument, ValueError), "top_k"),
        (dict(top_k=E + 1), (switchyard.InvalidArgument, ValueError), "top_k"),
        (dict(max_tokens=0), (switchyard.InvalidArgument, ValueError), "max_tokens is 0"),
        (dict(order="down_up"), (switchyard.InvalidArgument, ValueError), "down_up"),
        (dict(order=torch.ones(2)), (switchyard.InvalidArgument, ValueError), "order is tensor"),
        (dict(numerics=Numerics(compute="f8_e4m3")), (switchyard.InvalidArgument, ValueError), "f8_e4m3"),
        (dict(numerics=5), (switchyard.InvalidArgument, ValueError), "numerics is 5; pass a switchyard.Numerics"),
        (dict(w13_bias=torch.zeros(E, 2 * I)), (switchyard.MissingTensor,), "w2_bias"),
        (dict(w13_scale=torch.zeros(E)), (switchyard.DTypeMismatch, TypeError), "w13_scale"),
        (dict(placement=Placement(experts=[0])), (switchyard.InvalidArgument, ValueError), "num_experts"),
        (dict(w13="no array"), (switchyard.InvalidArgument, ValueError), "w13 is a str"),
        (dict(placement=Placement(num_experts=2 * E)), (switchyard.ShapeMismatch, ValueError), "all 12 of num_experts"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_with_a_layer_is_said(arguments, kinds, text):
    with pytest.raises(switchyard.Error, match=text) as caught:
        made(**arguments)
    for kind in kinds:
        assert isinstance(caught.value, kind)
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.code


def test_what_is_wrong_with_a_call_is_said(batch):
    layer, _ = made(max_tokens=T)
    x, ids, topk_weights = batch
    with pytest.raises(switchyard.ShapeMismatch, match=r"x is \[17, 63\]; the layer takes \[T, 64\]"):
        layer(x[:, 1:], ids, topk_weights, out=x.clone())
    with pytest.raises(switchyard.ShapeMismatch, match="topk_ids"):
        layer(x, ids[:-1], topk_weights)
    with pytest.raises(switchyard.ShapeMismatch, match="out is"):
        layer(x, ids, topk_weights, out=x[1:].clone())
    with pytest.raises(switchyard.DTypeMismatch, match="topk_weights are f16"):
        layer(x, ids, topk_weights.half())
    with pytest.raises(switchyard.DTypeMismatch, match="topk_ids are f32"):
        layer(x, ids.float(), topk_weights)
    with pytest.raises(switchyard.CapacityExceeded, match="18 tokens"):
        layer(torch.cat((x, x[:1])), torch.cat((ids, ids[:1])), torch.cat((topk_weights, topk_weights[:1])))
    with pytest.raises(switchyard.InvalidArgument, match="twice"):
        layer(x, ids[:, :1].repeat(1, 2), topk_weights)
    with pytest.raises(switchyard.InvalidArgument, match=r"topk_ids\[0\]\[0\] is 99"):
        layer(x, torch.full_like(ids, 99), topk_weights)
    with pytest.raises(switchyard.InvalidArgument, match="out is None"):
        layer(x, ids, topk_weights, accumulate=True)
    # None of these is the end of the layer.
    assert layer(x, ids, topk_weights).isfinite().all()


def test_bad_ids_may_be_skipped(batch):
    x, ids, topk_weights = batch
    layer, matrices = made(numerics=Numerics(bad_ids="skip"))
    ids[0] = ids[0, 0]  # the second names it again
    ids[1] = 99
    expected_ids = ids.clone()
    expected_ids[0, 1] = -1
    expected = experts(x, *matrices, expected_ids, topk_weights, Activation())
    assert error(layer(x, ids, topk_weights), expected) < F32_ERROR
    assert layer.stats().bad_slots == 3


def test_ids_of_other_ranks_experts_mean_none(batch):
    layer, matrices = made(numerics=Numerics(large_ids_are_none=True))
    batch[1][:5] = E
    check(layer, batch, *matrices)
    assert layer.stats().bad_slots == 0


def test_a_closed_layer_says_so(batch):
    layer, _ = made()
    assert not layer.closed
    layer.close()
    layer.close()
    assert layer.closed
    for call in (lambda: layer(*batch), layer.stats, layer.check):
        with pytest.raises(switchyard.InvalidArgument, match="closed"):
            call()


def test_stats(batch):
    layer, _ = made()
    assert layer.stats().epoch == 0
    layer(*batch)
    stats = layer.stats()
    assert stats.epoch == 1 and stats.tokens == T
    assert list(stats.tokens_per_expert) == torch.bincount(batch[1].flatten(), minlength=E).tolist()
    assert stats.total_seconds > 0


def test_trace(batch):
    layer, _ = made(diagnostics=Diagnostics(trace=True))
    layer(*batch)
    events = layer.trace()["traceEvents"]
    assert any("GEMM" in event.get("name", "") or "gemm" in event.get("name", "") for event in events)
    with pytest.raises(switchyard.InvalidArgument, match="trace"):
        made()[0].trace()


def test_recording(batch):
    layer, _ = made(diagnostics=Diagnostics(recorded_steps=2, name="layers.5"))
    for _ in range(3):
        layer(*batch)
    recording = layer.recording()
    counts = torch.bincount(batch[1].flatten(), minlength=E).tolist()
    assert recording["layer"] == "layers.5" and recording["overwritten"] == 1
    assert [step["step"] for step in recording["steps"]] == [1, 2]
    assert all(step["counts"] == counts and step["tokens"] == T for step in recording["steps"])
    with pytest.raises(switchyard.InvalidArgument, match="recorded_steps"):
        made()[0].recording()


EXIT = """
import torch, switchyard
layers = [switchyard.Experts(torch.zeros(4, 64, 32), torch.zeros(4, 32, 32), top_k=2) for _ in range(3)]
x, ids = torch.zeros(5, 32), torch.tensor([[0, 1]] * 5)
for layer in layers:
    layer(x, ids, torch.ones(5, 2))
worlds = switchyard.World.threads(2)
{more}
print("done")
"""


@pytest.mark.parametrize("more", ["", "layers[0].close()", "import sys; sys.exit(0)", "1 / 0"])
def test_layers_alive_at_exit(more):
    done = started(sys.executable, "-c", EXIT.format(more=more))
    assert done.returncode == (1 if "/" in more else 0), done.stderr
    if more == "1 / 0":
        assert "ZeroDivisionError" in done.stderr.strip().splitlines()[-1]
    else:
        assert done.stderr == ""


def test_topk():
    logits = torch.randn(9, 16)
    ids, w = switchyard.topk(logits, 4, renormalize=True)
    expected, expected_ids = logits.softmax(-1).topk(4)
    assert torch.equal(ids.long(), expected_ids)
    assert torch.allclose(w, expected / expected.sum(-1, keepdim=True), atol=1e-6)
    ids, w = switchyard.topk(
        logits.numpy(), 2, score="sigmoid", correction_bias=numpy.zeros(16, numpy.float32), scale=2.5
    )
    assert numpy.array_equal(ids, logits.topk(2).indices.numpy())
    assert numpy.allclose(w, 2.5 * torch.sigmoid(logits.topk(2).values).numpy(), atol=1e-5)
    with pytest.raises(switchyard.InvalidArgument, match="groups"):
        switchyard.topk(logits, 2, groups=5)
    with pytest.raises(switchyard.InvalidArgument, match="tanh"):
        switchyard.topk(logits, 2, score="tanh")
    with pytest.raises(switchyard.DTypeMismatch):
        switchyard.topk(logits.double(), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_logits(batch, dtype):
    x, _, _ = batch
    logits, bias = torch.randn(T, E).to(dtype), torch.randn(E) / 4
    rule = switchyard.Routing(score="sigmoid", renormalize=True)
    layer, matrices = made(routing=rule, correction_bias=bias)
    ids = torch.empty(T, K, dtype=torch.int32)
    w = torch.empty(T, K)
    out = layer.from_logits(x, logits, ids_out=ids, weights_out=w)
    scores = logits.float().sigmoid()
    expected_ids = (scores + bias).topk(K).indices
    values = scores.gather(1, expected_ids)
    assert torch.equal(ids.long(), expected_ids)
    assert torch.allclose(w, values / values.sum(-1, keepdim=True), atol=1e-6)
    assert error(out, experts(x, *matrices, ids, w, Activation())) < F32_ERROR
    assert layer.from_logits(x[:0], logits[:0]).shape == (0, H)
    with pytest.raises(switchyard.InvalidArgument, match="without routing"):
        made()[0].from_logits(x, logits)
    with pytest.raises(switchyard.ShapeMismatch, match="logits"):
        layer.from_logits(x, logits[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_scaled_and_added(batch, dtype):
    x, ids, topk_weights = batch
    x = x.to(dtype)
    layer, matrices = made()
    before = torch.randn(T, H).to(dtype)
    out = before.clone()
    assert layer(x, ids, topk_weights, out=out, accumulate=True, scale=2.5) is out
    expected = before.double() + 2.5 * experts(x, *matrices, ids, topk_weights, Activation())
    assert error(out, expected) < (F32_ERROR if dtype == torch.float32 else 4e-3)
    half = layer(x, ids, topk_weights, scale=0.5)
    assert torch.allclose(half * 2, layer(x, ids, topk_weights), rtol=1e-2, atol=1e-5)


def test_refresh_reads_biases_and_scales_anew(batch):
    biases = torch.zeros(E, 2 * I), torch.randn(E, H)
    layer, (gate, up, down) = made(w13_bias=biases[0], w2_bias=biases[1])
    biases[1].mul_(-2)
    layer.refresh()
    check(layer, batch, gate, up, down, biases=(None, None, biases[1]))

    codes, scales, exact = quantised(torch.cat((gate, up), dim=1), (32, 32))
    w2_codes, w2_scales, w2_exact = quantised(down, (32, 32))
    e8m0 = scales.to(torch.float8_e8m0fnu)  # which the layer keeps a copy of
    layer = Experts(
        codes, w2_codes, top_k=K, w13_scale=e8m0, w2_scale=w2_scales, block=(32, 32), numerics=Numerics(compute="f32")
    )
    e8m0.copy_((scales * 4).to(torch.float8_e8m0fnu))
    layer.refresh()
    gate, up = (exact * 4).chunk(2, dim=1)
    check(layer, batch, gate, up, w2_exact)


def test_rebind_uses_other_weights(batch):
    layer, _ = made()
    layer(*batch)
    gate, up, down = weights()
    w13 = torch.cat((gate, up), dim=1)
    layer.rebind(w13, down)
    del w13
    gc.collect()
    check(layer, batch, gate, up, down)
    with pytest.raises(switchyard.ShapeMismatch):
        layer.rebind(torch.cat((gate, up), dim=1)[:, :, 1:], down[:, 1:])
    check(layer, batch, gate, up, down)  # as it was


def test_experts_stand_where_a_placement_says(batch):
    gate, up, down = weights()
    places = [3, 1, 0, 2, 5, 4, 3]
    w13 = torch.cat((gate, up), dim=1)
    layer = Experts(w13[places], down[places], top_k=K, placement=Placement(num_experts=E, experts=places))
    check(layer, batch, gate, up, down)
    others = [0, 1, 2, 3, 4, 5, 5]
    layer.rebind(w13[others], down[others], placement=others)
    check(layer, batch, gate, up, down)
    with pytest.raises(switchyard.InvalidArgument, match="place"):
        Experts(w13[places], down[places], top_k=K, placement=Placement(num_experts=E, experts=[0] * 7))


@pytest.mark.parametrize("rule", ["slots", "tokens"])
def test_capacity(batch, rule):
    x, ids, topk_weights = batch
    layer, matrices = made(numerics=Numerics(capacity_factor=0.75, capacity_rule=rule))
    capacity = -(-3 * T * (K if rule == "slots" else 1) // (4 * E))
    kept, used = ids.clone(), [0] * E
    for t in range(T):
        for k in range(K):
            used[ids[t, k]] += 1
            if used[ids[t, k]] > capacity:
                kept[t, k] = -1
    dropped = int((kept < 0).sum())
    assert dropped > 0
    expected = experts(x, *matrices, kept, topk_weights, Activation())
    assert error(layer(x, ids, topk_weights), expected) < F32_ERROR
    assert layer.stats().dropped_slots == dropped


def test_capacity_rule_is_checked():
    with pytest.raises(switchyard.InvalidArgument, match="capacity_rule is 'gshard'"):
        made(numerics=Numerics(capacity_rule="gshard"))
