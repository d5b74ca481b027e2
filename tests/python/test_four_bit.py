"""Weights of four bits, MXFP4 and INT4, in every form that an array of them has, beside torch in fp64."""

import functools

import numpy
import pytest
import torch

import switchyard
from conftest import run_ranks
from reference import FP4, Packed, as_words, error, experts, four_bit_values, routing
from switchyard import Activation, Experts, GroupedGemm, Numerics, Placement

E, I, H, K, T = 5, 64, 288, 2, 19  # E is what Packed has
F32_ERROR = 1e-5  # the order of sums
GPT_OSS = Activation("silu", alpha=1.702, limit=7.0, up_bias=1.0)


def as_blocks(packed):
    """As gpt-oss' checkpoint has them."""
    return packed.unflatten(-1, (-1, 16))


class Dlpack:
    """An array that only speaks DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__()


STORED = {
    "uint8": lambda packed: packed,
    "int8": lambda packed: packed.view(torch.int8),
    "int32": as_words,
    "blocks": as_blocks,
    "numpy": lambda packed: packed.numpy(),
    "dlpack": lambda packed: Dlpack(packed.view(torch.int8)),
    "numpy words": lambda packed: as_words(packed).numpy(),
    "parameter": lambda packed: torch.nn.Parameter(packed, requires_grad=False),
    "strided": lambda packed: torch.cat((packed, packed), dim=2)[:, :, : packed.shape[2]],
    "rows apart": lambda packed: torch.stack((packed, packed), dim=2)[:, :, 0],
}


def made(form, order="gate_up", activation=Activation(), stored=STORED["uint8"], options=(), **weights):
    """A layer, and gate, up and down."""
    w13, w2 = Packed(form, 2 * I, H, **weights), Packed(form, H, I, **weights)
    layer = Experts(
        stored(w13.bytes), stored(w2.bytes), top_k=K, weight_format=form, w13_scale=w13.scale,
        w2_scale=w2.scale, w13_zero=w13.zero, w2_zero=w2.zero, order=order, activation=activation,
        **dict(options),
    )
    first, second = (w13.exact[:, 0::2], w13.exact[:, 1::2]) if order == "interleaved" else w13.exact.chunk(2, 1)
    gate, up = (second, first) if order == "up_gate" else (first, second)
    return layer, (gate, up, w2.exact)


def f32(**more):
    return dict(numerics=Numerics(compute="f32"), **more)


@pytest.fixture
def batch():
    ids, topk_weights = routing(T, E, K)
    return torch.randn(T, H), ids, topk_weights


def check(layer, batch, matrices, activation=Activation(), bound=F32_ERROR):
    x, *slots = batch
    assert error(layer(*batch), experts(x, *matrices, *slots, activation)) < bound


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("form", ["mxfp4", "int4"])
def test_arrays_of_every_kind(batch, form, stored):
    layer, matrices = made(form, stored=STORED[stored], options=f32())
    check(layer, batch, matrices)
    assert f"weights {'f4_e2m1' if form == 'mxfp4' else 'u4'}" in repr(layer)


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("weights", [dict(form="mxfp4"), dict(form="int4"), dict(form="int4", zero=True)], ids=str)
def test_orders_of_gate_and_up(batch, order, weights):
    layer, matrices = made(order=order, activation=GPT_OSS, options=f32(), **weights)
    check(layer, batch, matrices, GPT_OSS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero", [False, True])
def test_scales_of_int4(batch, dtype, zero):
    layer, matrices = made("int4", scale_dtype=dtype, zero=zero, options=f32())
    check(layer, batch, matrices)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("group", [32, 128])
def test_groups_and_zero_points_of_grouped_gemms(group, zero):
    w = Packed("int4", 48, 256, group=group, zero=zero)
    given = dict(weight_format="int4", w_scale=w.scale, w_zero=w.zero, compute="f32")
    x, ends = torch.randn(E, 256), torch.arange(1, E + 1)

    def exact():
        return (four_bit_values("int4", w.bytes, w.scale, w.zero) @ x.double()[:, :, None])[:, :, 0]

    gemm = GroupedGemm(w.bytes, **given)
    assert error(gemm(x, ends), exact()) < F32_ERROR
    for _ in range(2):
        assert error(switchyard.grouped_gemm(x, w.bytes, ends, **given), exact()) < F32_ERROR
        if zero:
            w.zero.copy_(15 - w.zero)  # in place, which both see
            assert error(gemm(x, ends), exact()) < F32_ERROR


def test_dtypes_of_torch_name_the_format(batch):
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("torch has no float4_e2m1fn_x2")
    w13, w2 = Packed("mxfp4", 2 * I, H), Packed("mxfp4", H, I)
    layer = Experts(
        w13.bytes.view(torch.float4_e2m1fn_x2), w2.bytes.view(torch.float4_e2m1fn_x2), top_k=K,
        w13_scale=w13.scale.view(torch.float8_e8m0fnu),
        w2_scale=w2.scale.view(torch.float8_e8m0fnu), **f32(),
    )
    check(layer, batch, (*w13.exact.chunk(2, 1), w2.exact))
    with pytest.raises(switchyard.DTypeMismatch, match="only one of w13 and w2 is float4_e2m1fn_x2"):
        Experts(w13.exact.float(), w2.bytes.view(torch.float4_e2m1fn_x2), top_k=K)
    with pytest.raises(switchyard.DTypeMismatch, match="w is float4_e2m1fn_x2, but weight_format is 'int4'"):
        GroupedGemm(w2.bytes.view(torch.float4_e2m1fn_x2), weight_format="int4", w_scale=w2.scale.float())


@pytest.mark.parametrize("form", ["mxfp4", "int4"])
def test_bf16_is_as_good_as_torch(batch, form):
    x, ids, weights = batch
    layer, matrices = made(form)
    assert layer.compute == "bf16"
    x = x.bfloat16()
    exact = experts(x, *matrices, ids, weights, Activation())
    of_torch = error(experts(x, *matrices, ids, weights, Activation(), dtype=torch.bfloat16), exact)
    assert error(layer(x, ids, weights), exact) < 2 * of_torch


def to_fp8(x):
    """Rounded to e4m3 with a scale for each 128 columns, as numbers."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 448
    rounded = (groups / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
    return rounded.flatten(-2)[..., : x.shape[-1]]


def test_fp8_times_mxfp4_is_as_good_as_torch(batch):
    x, ids, weights = batch
    layer, (gate, up, down) = made("mxfp4", options=dict(numerics=Numerics(compute="f8_e4m3")))
    assert layer.compute == "f8_e4m3"
    x = x.bfloat16()
    exact = experts(x, gate, up, down, ids, weights, Activation())
    of_torch = torch.zeros(T, H, dtype=torch.float64)
    rounded = to_fp8(x.double())
    for t in range(T):
        for k in range(K):
            e = ids[t, k]
            h = torch.nn.functional.silu(gate[e] @ rounded[t]) * (up[e] @ rounded[t])
            of_torch[t] += weights[t, k] * (down[e] @ to_fp8(h))
    assert error(layer(x, ids, weights), exact) < 2 * error(of_torch, exact)


def test_mxfp4_is_exact_in_bf16():
    """Each code times each scale of which bf16 has all products, by tokens that pick one column each."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    packed = (codes[0::2] | codes[1::2] << 4).expand(1, 256, 16).contiguous()
    scale = torch.arange(256).clamp(2, 252).to(torch.uint8)[None, :, None].contiguous()
    out = switchyard.grouped_gemm(
        torch.eye(32), packed, torch.tensor([32]), weight_format="mxfp4", w_scale=scale, compute="bf16"
    )
    expected = FP4[codes.long()][:, None] * 2.0 ** (scale[0, :, 0].double() - 127)
    assert torch.equal(out.double(), expected)


def test_plain_activations_and_biases(batch):
    w13, w2 = Packed("int4", I, H), Packed("int4", H, I)
    biases = torch.randn(E, I), torch.randn(E, H)
    activation = Activation("relu2", gated=False)
    layer = Experts(
        w13.bytes, w2.bytes, top_k=K, weight_format="int4", w13_scale=w13.scale, w2_scale=w2.scale,
        w13_bias=biases[0], w2_bias=biases[1], activation=activation, **f32(),
    )
    x, *slots = batch
    expected = experts(x, None, w13.exact, w2.exact, *slots, activation, (None, *biases))
    assert error(layer(*batch), expected) < F32_ERROR


def test_transposed_views_are_read_in_place(batch):
    """As triton_kernels holds them in host memory."""
    w13, w2 = Packed("mxfp4", 2 * I, H), Packed("mxfp4", H, I)
    layer = Experts(
        w13.bytes.transpose(1, 2), w2.bytes.transpose(1, 2), top_k=K, transposed=True, weight_format="mxfp4",
        w13_scale=w13.scale, w2_scale=w2.scale, **f32(),
    )
    check(layer, batch, (*w13.exact.chunk(2, 1), w2.exact))


def test_weights_and_scales_are_used_in_place(batch):
    w13, w2 = Packed("int4", 2 * I, H), Packed("int4", H, I)
    layer = Experts(
        w13.bytes, w2.bytes, top_k=K, weight_format="int4", w13_scale=w13.scale, w2_scale=w2.scale, **f32()
    )
    layer(*batch)
    w2.scale.mul_(2)
    check(layer, batch, (*w13.exact.chunk(2, 1), 2 * w2.exact))
    w2.bytes.fill_(0x99)
    check(layer, batch, (*w13.exact.chunk(2, 1), w2.scale.double().repeat_interleave(32, 2)))
    other13, other2 = Packed("int4", 2 * I, H), Packed("int4", H, I)
    layer.rebind(other13.bytes, other2.bytes, w13_scale=other13.scale, w2_scale=other2.scale)
    check(layer, batch, (*other13.exact.chunk(2, 1), other2.exact))
    with pytest.raises(switchyard.MissingTensor, match="w2 is of 'int4'; pass w2_scale, too"):
        layer.rebind(other13.bytes, other2.bytes, w13_scale=other13.scale)


def test_functions_keep_their_layers(batch):
    w13, w2 = Packed("int4", 2 * I, H, zero=True), Packed("int4", H, I, zero=True)
    x, ids, weights = batch
    numerics = Numerics(compute="f32")

    def run(zero):
        return switchyard.experts(
            x, words, w2.bytes, ids, weights, weight_format="int4", w13_scale=w13.scale, w2_scale=w2.scale,
            w13_zero=zero, w2_zero=w2.zero, numerics=numerics,
        )

    words = torch.nn.Parameter(as_words(w13.bytes), requires_grad=False)
    out = run(w13.zero)
    assert error(out, experts(x, *w13.exact.chunk(2, 1), w2.exact, ids, weights, Activation())) < F32_ERROR
    assert torch.equal(run(w13.zero), out)
    # Other zero points are another layer.
    assert not torch.equal(run(torch.full_like(w13.zero, 8)), out)

    w = Packed("mxfp4", 48, H)
    signed = torch.nn.Parameter(w.bytes.view(torch.int8), requires_grad=False)
    rows = torch.randn(E, H)
    for _ in range(2):
        out = switchyard.grouped_gemm(
            rows, signed, torch.arange(1, E + 1), weight_format="mxfp4", w_scale=w.scale, compute="f32"
        )
        assert error(out, (w.exact @ rows.double()[:, :, None])[:, :, 0]) < F32_ERROR


def test_ranks(batch):
    w13, w2 = Packed("mxfp4", 2 * I, H), Packed("mxfp4", H, I)

    def body(world):
        own = world.own_experts(E)
        mine = slice(own.start, own.stop)
        placement = Placement(world=world, num_experts=E)
        options = dict(top_k=K, weight_format="mxfp4", placement=placement, **f32())
        layer = Experts(
            w13.bytes[mine], w2.bytes[mine], w13_scale=w13.scale[mine], w2_scale=w2.scale[mine], **options
        )
        return layer(*batch)

    outs, failures = run_ranks(switchyard.World.threads(2), body)
    assert failures == [None, None]
    x, *slots = batch
    for out in outs:
        assert error(out, experts(x, *w13.exact.chunk(2, 1), w2.exact, *slots, Activation())) < F32_ERROR


# ----------------------------------------------------------------------------------- refusals


def arguments(form="mxfp4", **weights):
    w13, w2 = Packed(form, 2 * I, H, **weights), Packed(form, H, I, **weights)
    return dict(
        w13=w13.bytes, w2=w2.bytes, weight_format=form, w13_scale=w13.scale, w2_scale=w2.scale,
        w13_zero=w13.zero, w2_zero=w2.zero,
    )


int4 = functools.partial(arguments, "int4")
zeros = functools.partial(arguments, "int4", zero=True)


def strided(array):
    """The same numbers, columns two elements apart."""
    return torch.stack((array, array), dim=-1)[..., 0]


def reversed_rows(array):
    """The same numbers, rows of an expert from the last one on."""
    return numpy.ascontiguousarray(array.numpy()[:, ::-1])[:, ::-1]


def misaligned(array):
    memory = numpy.zeros(array.nbytes + 4, dtype=numpy.uint8)
    offset = 1 - memory.ctypes.data % 4
    view = memory[offset % 4 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


@pytest.mark.parametrize(
    "make,change,kind,text",
    [
        (arguments, lambda a: dict(weight_format="nvfp4"), switchyard.InvalidArgument,
         "weight_format is 'nvfp4'; use one of 'mxfp4', 'int4'"),
        (arguments, lambda a: dict(weight_format=4), switchyard.InvalidArgument, "weight_format is 4"),
        (arguments, lambda a: dict(weight_format=None), switchyard.DTypeMismatch,
         "w2 is uint8; if it holds weights of four bits, say how: weight_format="),
        (arguments, lambda a: dict(w13=a["w13"].view(torch.int8), w2=torch.zeros(E, H, I), weight_format=None),
         switchyard.DTypeMismatch, "w13 is int8; if it holds"),
        (arguments, lambda a: dict(w2=torch.zeros(E, H, I)), switchyard.DTypeMismatch,
         "w2 is f32, but weight_format is 'mxfp4'; pass uint8"),
        (arguments, lambda a: dict(w2=torch.zeros(E, H, I // 2, dtype=torch.int64)), switchyard.DTypeMismatch,
         "w2 is i64, but weight_format"),
        (arguments, lambda a: dict(w2=a["w2"][0]), switchyard.ShapeMismatch, "w2 is (288, 32); weights of 'mxfp4'"),
        (arguments, lambda a: dict(w2=a["w2"].view(E, H, 4, 8)), switchyard.ShapeMismatch,
         "w2 is (5, 288, 4, 8); blocks are of uint8, [n, rows, columns / 32, 16]"),
        (arguments, lambda a: dict(w2=as_words(a["w2"]).view(E, H, 2, 4)), switchyard.ShapeMismatch, "blocks are of"),
        (arguments, lambda a: dict(w2=strided(a["w2"])), switchyard.InvalidArgument,
         "a row's columns are 2 elements apart"),
        (arguments, lambda a: dict(w2=as_blocks(a["w2"]).repeat(1, 1, 2, 1)[:, :, ::2]), switchyard.InvalidArgument,
         "a row's blocks must be contiguous"),
        (arguments, lambda a: dict(w2=a["w2"][..., :24].contiguous()), switchyard.ShapeMismatch,
         "w2 is (5, 288, 24), which is 48 columns: no multiple of the 32 that share a scale in 'mxfp4'"),
        (arguments, lambda a: dict(transposed=True), switchyard.InvalidArgument, "and is transposed"),
        (arguments, lambda a: dict(w2=a["w2"][:, :256]), switchyard.ShapeMismatch, "w2 is (5, 256, 64), but w13"),
        (arguments, lambda a: dict(w13=(a["w13"], a["w13"])), switchyard.Unsupported, "w13 as (gate, up)"),
        (arguments, lambda a: dict(w2_scale=None), switchyard.MissingTensor,
         "w2 is of 'mxfp4'; pass w2_scale, too"),
        (arguments, lambda a: dict(w13_scale=a["w13_scale"][:, :, 1:]), switchyard.ShapeMismatch,
         "w13_scale is (5, 128, 8); weights of 128 x 288 in 'mxfp4', with a scale for 32 columns of a row, take "
         "(5, 128, 9)"),
        (arguments, lambda a: dict(w13_scale=a["w13_scale"].float()), switchyard.DTypeMismatch,
         "w13_scale is f32, but weight_format is 'mxfp4', whose scales are float8_e8m0fnu or uint8; numbers that"),
        (int4, lambda a: dict(w13_scale=a["w13_scale"].to(torch.float8_e8m0fnu)), switchyard.DTypeMismatch,
         "w13_scale is f8_e8m0, but weight_format is 'int4', whose scales are float32 or bfloat16 or float16"),
        (int4, lambda a: dict(w13_scale=a["w13_scale"][:, :, :3].contiguous()), switchyard.ShapeMismatch,
         "with a scale for 32 or 128 columns of a row, take (5, 128, 9)"),
        (int4, lambda a: dict(w13_scale=strided(a["w13_scale"])), switchyard.InvalidArgument,
         "w13_scale has strides (2304, 18, 2), and is read where it is"),
        (int4, lambda a: dict(w13_scale=misaligned(a["w13_scale"].float().numpy())), switchyard.InvalidArgument,
         "w13_scale begins at an address"),
        (int4, lambda a: dict(w13=misaligned(as_words(a["w13"]).numpy())), switchyard.InvalidArgument,
         "w13 begins at an address"),
        (arguments, lambda a: dict(w13=reversed_rows(a["w13"])), switchyard.InvalidArgument,
         "w13 has strides (18432, -144, 1), with its rows in reverse"),
        (arguments, lambda a: dict(w13_scale=reversed_rows(a["w13_scale"])), switchyard.InvalidArgument,
         "w13_scale has strides (1152, -9, 1): its rows are -9 apart, and each has 9 numbers; pass a contiguous copy"),
        (int4, lambda a: dict(w2_scale=a["w2_scale"][:, :1].expand(-1, H, -1)), switchyard.InvalidArgument,
         "w2_scale has strides (576, 0, 1): its rows are 0 apart, and each has 2 numbers"),
        (zeros, lambda a: dict(w13_zero=a["w13_zero"][:, :1].expand(-1, 2 * I, -1)), switchyard.InvalidArgument,
         "w13_zero has strides (1152, 0, 1): its rows are 0 apart"),
        (arguments, lambda a: dict(block=(1, 32)), switchyard.InvalidArgument,
         "block is (1, 32), but weight_format is 'mxfp4'"),
        (arguments, lambda a: dict(w2_zero=a["w2_scale"], w13_zero=a["w13_scale"]), switchyard.InvalidArgument,
         "w13_zero is given, but weight_format is 'mxfp4', which has none"),
        (zeros, lambda a: dict(w13_zero=None), switchyard.MissingTensor,
         "w2_zero is given without w13_zero; pass both (8 where"),
        (zeros, lambda a: dict(w13_zero=a["w13_zero"].int()), switchyard.DTypeMismatch,
         "w13_zero is i32; pass uint8 with one zero point in each byte"),
        (zeros, lambda a: dict(w13_zero=a["w13_zero"][:, :, 1:]), switchyard.ShapeMismatch,
         "w13_zero is (5, 128, 8); the scales are (5, 128, 9)"),
        (zeros, lambda a: dict(w13_zero=strided(a["w13_zero"])), switchyard.InvalidArgument, "w13_zero has strides"),
        (zeros, lambda a: dict(w13_zero=torch.stack((a["w13_zero"],) * 2, 2)[:, :, 0]), switchyard.InvalidArgument,
         "w13_zero has a row stride of 18, and the scales one of 9; pass both contiguous"),
        (int4, lambda a: dict(numerics=Numerics(compute="f8_e4m3")), switchyard.InvalidArgument,
         "compute is 'f8_e4m3', but w2 is u4; use 'bf16' or 'f32', or weights in FP8 or MXFP4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_argument(make, change, kind, text):
    given = make()
    Experts(top_k=K, **given).close()
    with pytest.raises(kind) as caught:
        Experts(top_k=K, **(given | change(given)))
    assert text in str(caught.value)


def test_values_that_are_no_numbers_are_named():
    given = arguments()
    given["w13_scale"][2, 70, 3] = 255
    with pytest.raises(
        switchyard.InvalidArgument, match=r"experts\[2\].up's scale of row 6, columns 96 to 127 is NaN \(f8_e8m0\)"
    ):
        Experts(top_k=K, **given)
    given = zeros()
    given["w2_zero"][1, 5, 1] = 16
    with pytest.raises(switchyard.InvalidArgument, match=r"experts\[1\].down's zero point of row 5, columns 32 to 63"):
        Experts(top_k=K, **given)
    w = Packed("int4", 8, 64)
    w.scale[1, 2, 1] = float("nan")
    with pytest.raises(switchyard.InvalidArgument, match=r"matrices\[1\]'s scale of row 2, columns 32 to 63 is NaN"):
        GroupedGemm(w.bytes, weight_format="int4", w_scale=w.scale)
    w = Packed("int4", 8, 64, zero=True)
    w.zero[1, 2, 1] = 16
    with pytest.raises(switchyard.InvalidArgument, match=r"matrices\[1\]'s zero point of row 2, columns 32 to 63 is 16"):
        GroupedGemm(w.bytes, weight_format="int4", w_scale=w.scale, w_zero=w.zero)


def test_grouped_gemms_refuse_what_layers_do():
    w = Packed("int4", 8, 64)
    zero = torch.zeros_like(w.scale, dtype=torch.uint8)
    for change, kind, text in [
        (dict(weight_format=None), switchyard.DTypeMismatch, "w is uint8; if it holds weights of four bits"),
        (dict(weight_format="fp4"), switchyard.InvalidArgument, "weight_format is 'fp4'"),
        (dict(w_scale=None), switchyard.MissingTensor, "w is of 'int4'; pass w_scale, too"),
        (dict(block=(1, 32)), switchyard.InvalidArgument, "block is (1, 32), but weight_format"),
        (dict(compute="f8_e4m3"), switchyard.InvalidArgument, "compute is 'f8_e4m3', but w is u4; use 'bf16' or"),
        (dict(w_scale=w.scale[:, :1].expand(-1, 8, -1)), switchyard.InvalidArgument,
         "w_scale has strides (16, 0, 1): its rows are 0 apart, and each has 2 numbers"),
        (dict(w=reversed_rows(w.bytes)), switchyard.InvalidArgument, "w has strides (256, -32, 1), with its rows in"),
        (dict(w=w.bytes[:, :, :24]), switchyard.ShapeMismatch, "which is 48 columns"),
        (dict(w_zero=zero[:, :, :1]), switchyard.ShapeMismatch, "w_zero is (5, 8, 1); the scales are (5, 8, 2)"),
        (dict(w_zero=zero.int()), switchyard.DTypeMismatch, "w_zero is i32; pass uint8"),
        (dict(weight_format="mxfp4", w_zero=zero), switchyard.InvalidArgument, "w_zero is given, but weight_format is 'mxfp4'"),
    ]:
        with pytest.raises(kind) as caught:
            GroupedGemm(**(dict(w=w.bytes, weight_format="int4", w_scale=w.scale) | change))
        assert text in str(caught.value)


def test_zero_points_need_a_format():
    gate_up, down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    with pytest.raises(switchyard.InvalidArgument, match="w2_zero is given, but weight_format is None"):
        Experts(gate_up, down, top_k=K, w2_zero=torch.zeros(E, H, 2, dtype=torch.uint8))
