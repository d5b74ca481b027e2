"""permute, grouped_gemm and unpermute beside plain torch."""

import gc
import re

import numpy
import pytest
import torch

from conftest import in_threads
import switchyard
from reference import activate, error, routing
from switchyard import Activation, GroupedGemm, GroupedSchedule, grouped_gemm, permute, unpermute

E, N, K = 5, 48, 64
COUNTS = [3, 0, 7, 1, 20]
ENDS = torch.tensor(COUNTS).cumsum(0)
TOTAL = sum(COUNTS)
F32_ERROR = 1e-5  # the order of sums
LAYOUTS = ["packed", ("blocked", 8), ("padded", 20)]


def places(layout):
    """The row of each row in packed order."""
    kind, size = layout if isinstance(layout, tuple) else ("packed", 0)
    found, begin = [], 0
    for e, count in enumerate(COUNTS):
        if kind == "padded":
            begin = e * size
        found += range(begin, begin + count)
        begin += -(-count // size) * size if kind == "blocked" else count
    return torch.tensor(found)


def rows_of(layout):
    size = layout[1] if isinstance(layout, tuple) else 1
    return E * size if layout[0] == "padded" else sum(-(-count // size) * size for count in COUNTS)


def laid_out(x, layout):
    """Rows in packed order where the layout has them, and NaN elsewhere."""
    out = torch.full((rows_of(layout), x.shape[1]), float("nan"), dtype=x.dtype)
    out[places(layout)] = x
    return out


def expected(x, w, activation=None, order="gate_up", bias=None):
    """fp64, in packed order: the output and the products, gate and up as they stand in w."""
    x, w = x.double(), w.double()
    expert = torch.repeat_interleave(torch.arange(E), torch.tensor(COUNTS))
    products = torch.einsum("rk,rnk->rn", x, w[expert])
    if bias is not None:
        products = products + bias.double()[expert]
    if activation is None:
        return products, products
    if not activation.gated:
        return activate(activation, None, products), products
    if order == "interleaved":
        gate, up = products[:, 0::2], products[:, 1::2]
    else:
        gate, up = products.chunk(2, dim=1)[:: 1 if order == "gate_up" else -1]
    return activate(activation, gate, up), products


@pytest.fixture
def problem():
    return torch.randn(TOTAL, K), torch.randn(E, N, K) / 8


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("out_layout", [None, *LAYOUTS], ids=str)
def test_layouts(problem, layout, out_layout):
    x, w = problem
    y = grouped_gemm(laid_out(x, layout), w, ENDS, layout=layout, out_layout=out_layout)
    wanted = layout if out_layout is None else out_layout
    assert y.shape[0] >= rows_of(wanted)
    y = y[places(wanted)]
    assert error(y, expected(x, w)[0]) < F32_ERROR
    assert torch.equal(y, grouped_gemm(x, w, ENDS))


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "activation",
    [
        None, Activation("silu"), Activation("silu", alpha=1.702, limit=0.7, up_bias=1.0),
        Activation("gelu_tanh"), Activation("relu2", gated=False),
    ],
    ids=str,
)
def test_epilogues(problem, order, transposed, activation):
    x, w = problem
    bias = torch.randn(E, N)
    given = w.transpose(1, 2).contiguous() if transposed else w
    products = torch.empty(TOTAL, N) if activation is not None else None
    if order != "gate_up" and (activation is None or not activation.gated):
        with pytest.raises(switchyard.InvalidArgument, match="order"):
            grouped_gemm(x, given, ENDS, activation=activation, order=order, transposed=transposed)
        order = "gate_up"
    y = grouped_gemm(
        x, given, ENDS, activation=activation, order=order, transposed=transposed, bias=bias,
        products=products,
    )
    wanted, sums = expected(x, w, activation, order, bias)
    assert y.shape == wanted.shape
    assert error(y, wanted) < F32_ERROR
    if products is not None:
        assert error(products, sums) < F32_ERROR


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ends_type", [torch.int32, torch.int64])
def test_types(problem, dtype, ends_type):
    x, w = (a.to(dtype) for a in problem)
    y = grouped_gemm(x, w, ENDS.to(ends_type))
    assert y.dtype == dtype
    wanted = expected(x, w)[0]
    plain = wanted.to(dtype)  # rounded once
    assert error(y, wanted) <= 2 * error(plain, wanted) + F32_ERROR


def test_fp16_is_computed_in_fp32_on_a_cpu(problem):
    x, w = (a.half() for a in problem)
    gemm = GroupedGemm(w)
    assert gemm.compute == "f32"
    y = gemm(x, ENDS, out=torch.empty(len(x), N))
    assert error(y, expected(x, w)[0]) < F32_ERROR
    for name in ("f16", "float16", torch.float16):
        with pytest.raises(switchyard.Unsupported, match="compute type f16.*use f32"):
            GroupedGemm(w, compute=name)
    with pytest.raises(switchyard.Unsupported, match="compute type f16"):
        grouped_gemm(x, w, ENDS, compute="f16")


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no _grouped_mm")
def test_beside_torch(problem):
    """What torch computes itself, to bf16's accuracy."""
    x, w = (a.bfloat16() for a in problem)
    ends = ENDS.to(torch.int32)
    given = w.transpose(1, 2)  # [E, K, N], as torch takes it
    try:
        theirs = torch._grouped_mm(x, given, offs=ends)
    except (RuntimeError, NotImplementedError) as refusal:
        pytest.skip(f"torch._grouped_mm on a CPU: {refusal}")
    ours = grouped_gemm(x, given, ends, transposed=True)
    wanted = expected(x, w)[0]
    assert error(ours, wanted) <= 2 * error(theirs, wanted)


def test_fp8(problem):
    x, w = problem
    scale = w.abs().amax(dim=2) / 448
    codes = (w / scale[..., None]).to(torch.float8_e4m3fn)
    values = codes.float() * scale[..., None]
    gemm = GroupedGemm(codes, w_scale=scale)
    assert gemm.compute == "f8_e4m3"
    y = gemm(x.bfloat16(), ENDS)
    assert y.dtype == torch.bfloat16
    assert 1e-3 < error(y, expected(x.bfloat16(), values)[0]) < 0.1
    # Rows that are quantised already, as the operator would do it.
    wide = x.bfloat16().float()
    amax = wide.abs().amax(dim=1, keepdim=True)
    x_scale = amax * (1 / 448)
    # torch makes two roundings of 448 / amax.
    quantised = (wide * torch.full_like(amax, 448).div(amax)).to(torch.float8_e4m3fn)
    assert torch.equal(gemm(quantised, ENDS, x_scale=x_scale), y)
    wide_y = grouped_gemm(x, codes, ENDS, w_scale=scale, compute="f32")
    assert error(wide_y, expected(x, values)[0]) < F32_ERROR
    with pytest.raises(switchyard.MissingTensor, match="w_scale"):
        GroupedGemm(codes)
    with pytest.raises(switchyard.DTypeMismatch, match="w is f32"):
        GroupedGemm(w, w_scale=scale)


def test_indexes_and_row_weights(problem):
    tokens, w = torch.randn(9, K), problem[1]
    index = torch.randint(0, 9, (TOTAL,), dtype=torch.int32)
    x = tokens[index.long()]
    y = grouped_gemm(tokens, w, ENDS, index=index)
    assert torch.equal(y, grouped_gemm(x, w, ENDS))
    out = torch.full((TOTAL + 4, N), -1.0)
    where = torch.randperm(TOTAL + 4, dtype=torch.int32)[:TOTAL]
    where[5] = -1
    weights = torch.randn(TOTAL)
    assert grouped_gemm(x, w, ENDS, out=out, out_index=where, row_weights=weights) is out
    stored = where >= 0
    wanted = expected(x, w)[0] * weights.double()[:, None]
    assert error(out[where[stored].long()], wanted[stored]) < F32_ERROR
    untouched = torch.ones(TOTAL + 4, dtype=torch.bool)
    untouched[where[stored].long()] = False
    assert (out[untouched] == -1).all()


def test_arrays_of_numpy_and_dlpack(problem):
    class OnlyDLPack:
        def __init__(self, tensor):
            self.tensor = tensor
            self.shape = tensor.shape

        def __dlpack__(self, **_):
            return self.tensor.__dlpack__()

    x, w = problem
    y = grouped_gemm(x, w, ENDS)
    from_numpy = grouped_gemm(x.numpy(), w.numpy(), ENDS.numpy())
    assert isinstance(from_numpy, numpy.ndarray)
    assert numpy.array_equal(from_numpy, y.numpy())
    out = torch.empty_like(y)
    GroupedGemm(OnlyDLPack(w))(OnlyDLPack(x), OnlyDLPack(ENDS), out=out)
    assert torch.equal(out, y)
    ids = numpy.array([[1, 0], [1, 9]])
    order = permute(ids, 2)
    assert order.tokens.tolist() == [0, 0, 1]
    assert order.positions.tolist() == [[1, 0], [2, -1]]
    summed = unpermute(numpy.ones((3, 4), dtype=numpy.float32), order.positions)
    assert summed.tolist() == [[2] * 4, [1] * 4]


@pytest.mark.parametrize("layout", ["packed", ("blocked", 8), ("padded", 40)], ids=str)
@pytest.mark.parametrize("ids_type", [torch.int32, torch.int64])
def test_permute_and_unpermute(layout, ids_type):
    tokens, top_k, hidden = 17, 3, 32
    ids, weights = routing(tokens, E, top_k)
    ids[4] = -1
    ids = ids.to(ids_type)
    order = permute(ids, E, layout)
    assert order.layout == layout
    counts = torch.bincount(ids[ids >= 0], minlength=E)
    assert torch.equal(order.ends, counts.cumsum(0).int())
    x = torch.randn(tokens, hidden)
    for t in range(tokens):
        for k in range(top_k):
            row = order.positions[t, k]
            assert (row < 0) == (ids[t, k] < 0)
            if row >= 0:
                assert order.tokens[row] == t
    assert (order.tokens >= 0).sum() == (ids >= 0).sum()
    rows = torch.where(order.tokens[:, None] >= 0, x[order.tokens.long()], float("nan"))
    y = unpermute(rows, order.positions, weights)
    wanted = x.double() * (weights.double() * (ids >= 0)).sum(1, keepdim=True)
    assert error(y, wanted) < F32_ERROR
    out = torch.ones(tokens, hidden)
    assert unpermute(rows, order.positions, weights, out=out, accumulate=True, scale=2.0) is out
    assert error(out, 1 + 2 * wanted) < F32_ERROR


@pytest.mark.parametrize("layout", ["packed", ("blocked", 16), ("padded", 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_unfused_layer_has_the_bits_of_experts(layout, dtype):
    num_experts, hidden, intermediate, top_k, tokens = 6, 64, 48, 2, 64
    w13 = (torch.randn(num_experts, 2 * intermediate, hidden) / 8).to(dtype)
    w2 = (torch.randn(num_experts, hidden, intermediate) / 7).to(dtype)
    x = torch.randn(tokens, hidden).to(dtype)
    ids, weights = routing(tokens, num_experts, top_k)
    order = permute(ids, num_experts, layout)
    h = grouped_gemm(x, w13, order.ends, activation=Activation(), index=order.tokens, layout=layout)
    y = grouped_gemm(h, w2, order.ends, layout=layout)
    out = unpermute(y, order.positions, weights)
    fused = switchyard.experts(x, w13, w2, ids, weights)
    if dtype == torch.float32 or torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert torch.equal(out, fused)
    assert error(out, fused.double()) < 1e-2


def test_operators_are_cached_while_their_weights_are(problem):
    from switchyard import _cache

    x, w = problem
    w = w.clone()
    bias = torch.zeros(E, N)
    before = len(_cache._cache)
    first = grouped_gemm(x, w, ENDS, bias=bias)
    assert len(_cache._cache) == before + 1
    assert torch.equal(grouped_gemm(x, w, ENDS, bias=bias), first)
    assert len(_cache._cache) == before + 1
    bias += 1  # copied by the operator
    assert error(grouped_gemm(x, w, ENDS, bias=bias), first.double() + 1) < F32_ERROR
    w *= 2  # not copied
    assert error(grouped_gemm(x, w, ENDS, bias=bias), 2 * first.double() + 1) < F32_ERROR
    del w, bias
    gc.collect()
    assert len(_cache._cache) == before


def test_options_of_cached_operators_are_those_of_objects():
    """Also where they cannot be hashed, or are equal to others of another type."""
    x, ends = torch.randn(6, 128), torch.tensor([2, 6])
    w, s = (torch.randn(2, 128, 128) / 8).to(torch.float8_e4m3fn), torch.ones(2, 1, 1)
    expected = GroupedGemm(w, w_scale=s, block=(128, 128))(x, ends)
    for block in ((128, 128), [128, 128]):
        assert torch.equal(grouped_gemm(x, w, ends, w_scale=s, block=block), expected)
    w13, w2, w13_s = torch.cat([w, w], 1), w.clone(), torch.ones(2, 2, 1)
    ids, weights = torch.tensor([[0], [1]] * 3), torch.ones(6, 1)

    def of_gemm(**options):
        return grouped_gemm(x, w, ends, w_scale=s, **options)

    def of_experts(**options):
        return switchyard.experts(x, w13, w2, ids, weights, w13_scale=w13_s, w2_scale=s, **options)

    for call in (of_gemm, of_experts):
        call(block=(128, 128))
        call(block=[128, 128])
        for block in ((128.0, 128), [[128], 128], {128: 128}, numpy.array([128, 128])):
            with pytest.raises(switchyard.InvalidArgument, match="block is"):
                call(block=block)
        for transposed in (1, [False], {}):
            with pytest.raises(switchyard.InvalidArgument, match="transposed is"):
                call(transposed=transposed)
    for compute in (["f32"], [["f32"]]):
        with pytest.raises(switchyard.InvalidArgument, match=f"compute is {re.escape(repr(compute))}; pass None"):
            of_gemm(compute=compute)
    with pytest.raises(switchyard.InvalidArgument, match="compute is {}"):
        of_gemm(compute={})
    with pytest.raises(switchyard.InvalidArgument, match="splits is True"):
        GroupedSchedule(splits=True)


def test_schedules(problem):
    """A CPU has one. What they do is tested on GPUs."""
    x, w = problem
    plain = grouped_gemm(x, w, ENDS)
    by_rule = GroupedSchedule()
    assert torch.equal(grouped_gemm(x, w, ENDS, schedule=by_rule), plain)
    assert GroupedGemm(w, schedule=by_rule).schedule is by_rule
    for name, value, text in (
        ("tile_rows", 64, "64"),
        ("stages", 4, "4"),
        ("paired", True, "true"),
        ("paired", False, "false"),
        ("band", numpy.int64(1), "1"),
        ("splits", 2, "2"),
    ):
        schedule = GroupedSchedule(**{name: value})
        refused = rf"schedule.{name} is {text}, but the backend is cpu.*leave it to the rule"
        with pytest.raises(switchyard.InvalidArgument, match=refused):
            GroupedGemm(w, schedule=schedule)
        # Not the operator that was made of the same weights above.
        with pytest.raises(switchyard.InvalidArgument, match=refused):
            grouped_gemm(x, w, ENDS, schedule=schedule)
    for name in ("tile_rows", "stages", "band", "splits"):
        for value in (0, -1, 2.0, 2**32 + 16):
            bound = "2147483647 or less" if value > 2**31 else "1 or more"
            with pytest.raises(switchyard.InvalidArgument, match=f"{name} is {value}; use {bound}"):
                GroupedSchedule(**{name: value})
    for value in ("no", 1, 0, 1.0, numpy.ones(2)):
        with pytest.raises(switchyard.InvalidArgument, match=f"paired is {re.escape(repr(value))}; use True, False"):
            GroupedSchedule(paired=value)
    for made in (lambda **s: GroupedGemm(w, **s), lambda **s: grouped_gemm(x, w, ENDS, **s)):
        with pytest.raises(switchyard.InvalidArgument, match="schedule is {'splits': 2}; use a"):
            made(schedule={"splits": 2})
    assert len({GroupedSchedule(splits=2), GroupedSchedule(splits=2), by_rule}) == 2


def test_threads_take_turns(problem):
    x, w = problem
    gemm = GroupedGemm(w, num_threads=2)
    assert gemm.num_threads == 2
    wanted = gemm(x, ENDS)

    def call(_):
        for _ in range(20):
            assert torch.equal(gemm(x, ENDS), wanted)

    in_threads(call, range(4))


def test_refusals(problem):
    x, w = problem
    gemm = GroupedGemm(w, max_rows=40)
    assert (gemm.num_experts, gemm.n, gemm.k, gemm.output_columns) == (E, N, K, N)
    with pytest.raises(switchyard.ShapeMismatch, match="x is"):
        gemm(x[:, :5], ENDS)
    with pytest.raises(switchyard.ShapeMismatch, match="x has 30 rows"):
        gemm(x[:30], ENDS)
    with pytest.raises(switchyard.CapacityExceeded, match="41 rows"):
        gemm(torch.randn(41, K), ENDS + 10)
    with pytest.raises(switchyard.InvalidArgument, match=r"ends\[1\]"):
        gemm(x, torch.tensor([3, 2, 5, 5, 5]))
    with pytest.raises(switchyard.DTypeMismatch, match="ends"):
        gemm(x, ENDS.float())
    with pytest.raises(switchyard.InvalidArgument, match="layout is 'dense'"):
        gemm(x, ENDS, layout="dense")
    with pytest.raises(switchyard.InvalidArgument, match="layout"):
        gemm(x, ENDS, layout=("padded", 0))
    with pytest.raises(switchyard.InvalidArgument, match="room for 8"):
        gemm(x, ENDS, layout=("padded", 8))
    with pytest.raises(switchyard.InvalidArgument, match="out is None"):
        gemm(x, ENDS, out_index=torch.arange(TOTAL, dtype=torch.int32))
    with pytest.raises(switchyard.InvalidArgument, match=r"index\[2\] is 99"):
        gemm(x, ENDS, index=torch.full((TOTAL,), 99).int().index_fill_(0, torch.arange(2), 0))
    with pytest.raises(switchyard.InvalidArgument, match="order"):
        GroupedGemm(w, order="gate")
    with pytest.raises(switchyard.InvalidArgument, match="order is tensor"):
        GroupedGemm(w, order=torch.ones(2))
    with pytest.raises(switchyard.ShapeMismatch, match="3 dimensions"):
        GroupedGemm(w[0])
    with pytest.raises(switchyard.InvalidArgument, match="even"):
        GroupedGemm(w[:, :7], activation=Activation())
    with pytest.raises(switchyard.Unsupported, match="gradient|backward"):
        gemm(x.clone().requires_grad_(), ENDS)
    with torch.no_grad():
        gemm(x.clone().requires_grad_(), ENDS)
    with pytest.raises(switchyard.DTypeMismatch, match="x_scale is given, but x is f32"):
        gemm(x, ENDS, x_scale=torch.ones(len(x), 1))
    with pytest.raises(switchyard.ShapeMismatch, match=r"weights are \[2, 1\], but positions are \[1, 2\]"):
        unpermute(torch.ones(4, 3), torch.tensor([[0, 1]], dtype=torch.int32), torch.ones(2, 1))
    with pytest.raises(switchyard.InvalidArgument, match="num_experts is 0"):
        permute(torch.zeros(2, 2, dtype=torch.int64), 0)
    with pytest.raises(switchyard.DTypeMismatch, match="ids"):
        permute(torch.zeros(2, 2), 4)
    with pytest.raises(switchyard.ShapeMismatch, match=r"\[T, K\]"):
        permute(torch.zeros(4, dtype=torch.int64), 4)
    with pytest.raises(switchyard.InvalidArgument, match="contiguous"):
        permute(torch.zeros(2, 4, dtype=torch.int64)[:, ::2], 4)
    with pytest.raises(switchyard.InvalidArgument, match=r"positions\[1\] is 4"):
        unpermute(torch.ones(4, 3), torch.tensor([[0, 4]], dtype=torch.int32))
    with pytest.raises(switchyard.InvalidArgument, match="accumulate"):
        unpermute(torch.ones(4, 3), torch.tensor([[0, 1]], dtype=torch.int32), accumulate=True)
    gemm.close()
    gemm.close()
    assert gemm.closed
    with pytest.raises(switchyard.InvalidArgument, match="closed"):
        gemm(x, ENDS)
