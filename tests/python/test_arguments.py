"""Every public function with each kind of array and each kind of value: it gives what it gives for plain
arguments, or raises one of Switchyard's errors that names the argument. Nothing is written on the way."""

import dataclasses
import inspect
import math
import pathlib
import re

import numpy
import pytest
import torch

from conftest import run_ranks
import switchyard
from switchyard import (
    Activation, Diagnostics, Exchange, Experts, GroupedGemm, Memory, Numerics, Placement, Routing, SymmetricHeap,
    Workspace, World,
)  # fmt: skip
from switchyard import tuner

T, H, I, E, K = 5, 128, 128, 4, 2


def _draw(seed, *shape):
    return numpy.random.default_rng(seed).standard_normal(shape, dtype=numpy.float32)


def _ids():
    return numpy.array([[0, 1], [2, 3], [1, 0], [3, 2], [0, 2]], dtype=numpy.int32)


WEIGHTS = dict(w13=_draw(1, E, 2 * I, H) / 8, w2=_draw(2, E, H, I) / 8)
BIASES = dict(w13_bias=_draw(3, E, 2 * I), w2_bias=_draw(4, E, H))
CALL = dict(x=_draw(5, T, H), topk_ids=_ids(), topk_weights=abs(_draw(6, T, K)))


@dataclasses.dataclass
class Case:
    """A public function: `run(**arrays)` gives what it computes. `outputs` are written."""

    run: object
    arrays: dict
    outputs: tuple = ()


def _experts_call(x, topk_ids, topk_weights, out):
    layer = Experts(**{n: torch.from_numpy(a) for n, a in WEIGHTS.items()}, top_k=K, max_tokens=T)
    return layer(x, topk_ids, topk_weights, out=out)


def _experts_weights(w13, w2, w13_bias, w2_bias):
    return Experts(w13, w2, w13_bias=w13_bias, w2_bias=w2_bias, top_k=K, max_tokens=T)(**CALL)


def _experts_function(x, w13, w2, topk_ids, topk_weights, out):
    return switchyard.experts(x, w13, w2, topk_ids, topk_weights, out=out)


def _from_logits(x, logits, ids_out, weights_out, out, correction_bias):
    routing = Routing(score="sigmoid")
    layer = Experts(
        **WEIGHTS, top_k=K, max_tokens=T, routing=routing, correction_bias=correction_bias
    )
    layer.from_logits(x, logits, ids_out=ids_out, weights_out=weights_out, out=out)
    return numpy.concatenate([_numbers(a) for a in (out, ids_out, weights_out)], 1)


def _grouped_gemm(x, w, ends, bias, out, row_weights):
    return GroupedGemm(w, bias=bias)(x, ends, out=out, row_weights=row_weights)


def _grouped_gemm_function(x, w, ends, index, products, out):
    activation = Activation()
    out = switchyard.grouped_gemm(
        x, w, ends, index=index, products=products, out=out, activation=activation
    )
    return numpy.concatenate([_numbers(a) for a in (out, products) if a is not None], 1)


def _permute(ids):
    found = switchyard.permute(ids, E)
    return numpy.concatenate([numpy.asarray(a).ravel() for a in (found.ends, found.tokens, found.positions)])


def _unpermute(rows, positions, weights, out):
    return switchyard.unpermute(rows, positions, weights, out=out)


def _topk(logits, correction_bias, ids_out, weights_out):
    switchyard.topk(
        logits, K, correction_bias=correction_bias, ids_out=ids_out, weights_out=weights_out, score="sigmoid"
    )
    return numpy.concatenate([_numbers(a) for a in (ids_out, weights_out)], 1)


def _exchange(x, ids, weights, out, scales_out=None):
    exchange = Exchange(World.single(), hidden=H, num_experts=E, top_k=K, max_tokens=T, dispatch="f32")
    got = exchange.dispatch(x, ids, weights)
    try:
        return exchange.combine(got.rows, got.handle, out=out)
    except switchyard.Error:
        # A refused call has ended nothing.
        plain = numpy.zeros((T, H), dtype=numpy.float32)
        assert numpy.isfinite(numpy.asarray(exchange.combine(got.rows, got.handle, out=plain))).all()
        raise


def _balancedness(counts):
    return numpy.array([tuner.balancedness(counts)])


def _numbers(array):
    if array is None:
        return numpy.zeros((T, 0), dtype=numpy.float32)
    array = array.array if isinstance(array, Borrowed) else array
    if isinstance(array, torch.Tensor):
        array = array.detach().numpy()
    return numpy.asarray(array, dtype=numpy.float32)


def _out(*shape, dtype=numpy.float32):
    return numpy.full(shape, 7, dtype=dtype)


CASES = {
    "Experts()": Case(_experts_call, {**CALL, "out": _out(T, H)}, ("out",)),
    "Experts": Case(_experts_weights, {**WEIGHTS, **BIASES}),
    "experts": Case(_experts_function, {**CALL, **WEIGHTS, "out": _out(T, H)}, ("out",)),
    "Experts.from_logits": Case(
        _from_logits,
        dict(
            x=CALL["x"], logits=_draw(7, T, E), ids_out=_out(T, K, dtype=numpy.int32),
            weights_out=_out(T, K), out=_out(T, H), correction_bias=_draw(8, E),
        ),
        ("ids_out", "weights_out", "out"),
    ),
    "GroupedGemm": Case(
        _grouped_gemm,
        dict(
            x=_draw(9, 6, H), w=_draw(10, E, I, H) / 8,
            ends=numpy.array([1, 3, 3, 6], dtype=numpy.int32), bias=_draw(11, E, I), out=_out(6, I),
            row_weights=_draw(12, 6),
        ),
        ("out",),
    ),
    "grouped_gemm": Case(
        _grouped_gemm_function,
        dict(
            x=_draw(9, 6, H), w=_draw(10, E, I, H) / 8,
            ends=numpy.array([1, 3, 3, 6], dtype=numpy.int64),
            index=numpy.array([5, 0, 1, 2, 3, 4], dtype=numpy.int32), products=_out(6, I),
            out=_out(6, I // 2),
        ),
        ("products", "out"),
    ),
    "permute": Case(_permute, dict(ids=_ids())),
    "unpermute": Case(
        _unpermute,
        dict(
            rows=_draw(13, 10, H), positions=numpy.arange(10, dtype=numpy.int32).reshape(T, K),
            weights=_draw(14, T, K), out=_out(T, H),
        ),
        ("out",),
    ),
    "topk": Case(
        _topk,
        dict(
            logits=_draw(15, T, E), correction_bias=_draw(16, E),
            ids_out=_out(T, K, dtype=numpy.int32), weights_out=_out(T, K),
        ),
        ("ids_out", "weights_out"),
    ),
    "Exchange": Case(
        _exchange,
        dict(x=CALL["x"], ids=_ids(), weights=abs(_draw(17, T, K)), out=_out(T, H)),
        ("out",),
    ),
    "tuner.balancedness": Case(_balancedness, dict(counts=numpy.array([1, 5, 2, 9]))),
}
ARGUMENTS = [(case, name) for case, of in CASES.items() for name in of.arrays if case != "tuner.balancedness"]


class Borrowed:
    """An array that speaks DLPack, and nothing else."""

    def __init__(self, array, read_only=False):
        self.array, self.shape, self.ndim = array, array.shape, array.ndim
        self.read_only = read_only

    def __dlpack__(self, **options):
        if self.read_only:
            view = self.array.view()
            view.flags.writeable = False
            return view.__dlpack__(**options)
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def reshape(self, *shape):
        return Borrowed(self.array.reshape(*shape), self.read_only)


def _misaligned(array):
    raw = numpy.zeros(array.nbytes + 1, dtype=numpy.uint8)[1:]
    copy = raw.view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _read_only(array):
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _strided(array):
    """Every second element of the last dimension, the gaps poisoned."""
    wide = numpy.full((*array.shape[:-1], 2 * array.shape[-1]), -1, dtype=array.dtype)
    view = wide[..., ::2]
    view[...] = array
    return view


def _padded_rows(array):
    wide = numpy.full((*array.shape[:-1], array.shape[-1] + 3), -1, dtype=array.dtype)
    view = wide[..., : array.shape[-1]]
    view[...] = array
    return view


def _reversed(array):
    return numpy.ascontiguousarray(array[::-1])[::-1]


def _inference(array):
    with torch.inference_mode():
        return torch.from_numpy(array.copy()) + 0


def _jagged(array):
    rows = [torch.from_numpy(row.copy()) for row in numpy.atleast_2d(array)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


# Name -> what is made of a numpy array; None: it must be refused (as an output, as an input).
SAME, REFUSED, EITHER = "same", "refused", "either"
KINDS = {
    "numpy": (lambda a: a.copy(), SAME, SAME),
    "torch": (lambda a: torch.from_numpy(a.copy()), SAME, SAME),
    "parameter": (lambda a: torch.from_numpy(a.copy()).requires_grad_(a.dtype.kind == "f"), SAME, SAME),
    "inference tensor": (_inference, SAME, SAME),
    "dlpack": (lambda a: Borrowed(a.copy()), SAME, SAME),
    "fortran": (lambda a: numpy.asfortranarray(a), EITHER, EITHER),
    "strided": (_strided, EITHER, EITHER),
    "rows with gaps": (_padded_rows, EITHER, EITHER),
    "reversed": (_reversed, EITHER, EITHER),
    "read-only": (_read_only, SAME, REFUSED),
    "read-only dlpack": (lambda a: Borrowed(a.copy(), read_only=True), EITHER, REFUSED),
    "bytes": (lambda a: numpy.frombuffer(a.tobytes(), a.dtype).reshape(a.shape), SAME, REFUSED),
    "byte-swapped": (lambda a: a.astype(a.dtype.newbyteorder(">")), REFUSED, REFUSED),
    "misaligned": (_misaligned, REFUSED, REFUSED),
    "masked": (lambda a: numpy.ma.array(a.copy(), mask=a > 0), REFUSED, REFUSED),
    "float64": (lambda a: a.astype(numpy.float64), REFUSED, REFUSED),
    "complex": (lambda a: a.astype(numpy.complex64), REFUSED, REFUSED),
    "objects": (lambda a: a.astype(object), REFUSED, REFUSED),
    "bool": (lambda a: a > 0, REFUSED, REFUSED),
    "int16": (lambda a: a.astype(numpy.int16), REFUSED, REFUSED),
    "list": (lambda a: a.tolist(), REFUSED, REFUSED),
    "one dimension more": (lambda a: a[None].copy(), REFUSED, REFUSED),
    "five dimensions": (lambda a: a.reshape((1,) * (5 - a.ndim) + a.shape).copy(), REFUSED, REFUSED),
    "scalar": (lambda a: a.ravel()[0].copy(), REFUSED, REFUSED),
    "a column less": (lambda a: a[..., :-1].copy(), REFUSED, REFUSED),
    "sparse": (lambda a: torch.from_numpy(a.copy()).to_sparse(), REFUSED, REFUSED),
    "meta": (lambda a: torch.from_numpy(a.copy()).to("meta"), REFUSED, REFUSED),
    "expanded": (lambda a: torch.from_numpy(a[..., :1].copy()).expand(a.shape), EITHER, REFUSED),
    "nested": (lambda a: torch.nested.nested_tensor([torch.from_numpy(a.copy())]), REFUSED, REFUSED),
    "jagged": (_jagged, REFUSED, REFUSED),
    "negated view": (lambda a: torch._neg_view(torch.from_numpy(a.copy())), REFUSED, REFUSED),
    "None": (lambda a: None, EITHER, EITHER),
    "text": (lambda a: "array", REFUSED, REFUSED),
}


def run(case, name=None, kind=None):
    """What a case computes, with one of its arrays of another kind; and that array."""
    arrays = {n: a.copy() for n, a in CASES[case].arrays.items()}
    if name is not None:
        arrays[name] = KINDS[kind][0](CASES[case].arrays[name])
    with torch.no_grad():
        found = CASES[case].run(**arrays)
    return _numbers(found).astype(numpy.float64), arrays


@pytest.fixture(scope="module")
def plain():
    return {case: run(case)[0] for case in CASES}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case, name", ARGUMENTS, ids=lambda value: value)
def test_every_function_with_each_kind_of_array(plain, case, name, kind):
    output = name in CASES[case].outputs
    make, as_input, as_output = KINDS[kind]
    wanted = as_output if output else as_input
    if kind in ("int16", "float64", "bool") and CASES[case].arrays[name].dtype.kind == "i" and not output:
        wanted = EITHER if kind == "int16" else wanted
    if kind == "a column less" and case == "permute":
        wanted = EITHER  # one slot fewer for each token
    array = CASES[case].arrays[name]
    if kind == "a column less" and array.ndim == 1:
        wanted = EITHER  # rows fewer than weights
    try:
        found, arrays = run(case, name, kind)
    except switchyard.Error as error:
        assert wanted != SAME, error
        said = {name, name.removeprefix("topk_")}
        if kind == "a column less":
            said = set(CASES[case].arrays)  # the others do not fit any more
        assert any(re.search(rf"\b{re.escape(n)}\b", str(error)) for n in said), error
        assert "array([" not in str(error) and len(str(error)) < 600
        return
    assert wanted != REFUSED, f"{case} took {name}"
    if kind in ("None", "expanded", "a column less"):
        return  # other numbers
    numpy.testing.assert_allclose(found, plain[case], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["nested", "jagged", "sparse"])
@pytest.mark.parametrize("name", [*CALL, "out"])
def test_tensors_without_a_shape_or_strides_on_the_ways_of_servers(name, kind):
    """Where all others are tensors, too: a first call, and one that looks like the call before."""
    layer = Experts(**{n: torch.from_numpy(a) for n, a in WEIGHTS.items()}, top_k=K, max_tokens=T)
    given = {n: torch.from_numpy(a) for n, a in CALL.items()} | {"out": torch.zeros(T, H)}
    odd = KINDS[kind][0](given[name].numpy())
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(switchyard.InvalidArgument, match=f"{name} is .*; pass a dense"):
                layer(**given | {name: odd})
            wanted = layer(**given).clone()
            layer(**given)
        if name != "out":
            del given["out"]
            layer(**given)
            with pytest.raises(switchyard.InvalidArgument, match=f"{name} is .*; pass a dense"):
                layer(**given | {name: odd})
        assert torch.equal(layer(**given), wanted)


def test_the_table_has_every_public_function():
    """What takes arrays is above, or says here where it is tested."""
    elsewhere = {
        "MoeLayer": "test_from_hf.py",
        "Received": "made by Exchange",
        "Permutation": "made by permute",
        "patch": "test_transformers.py",
        "register_with_transformers": "test_transformers.py",
        "SymmetricHeap": "test_symmetric_heap.py, and below",
    }
    without_arrays = {
        "Activation", "DeviceAllocator", "Diagnostics", "ExchangeHandle", "ExchangeStats", "GroupedSchedule",
        "HeapStats", "Memory", "Numerics", "PeerMap", "Placement", "Routing", "Stats", "Workspace", "World", "has_cuda", "version", "tuner",
    }  # fmt: skip
    known = {re.split(r"[.(]", case)[0] for case in CASES} | set(elsewhere) | without_arrays
    errors = {n for n in switchyard.__all__ if n in dir(switchyard.errors)}
    assert set(switchyard.__all__) - known - errors == set()


# ------------------------------------------------------------------------------ empty batches


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_no_tokens_are_a_batch(library):
    make = (lambda a: a) if library == "numpy" else torch.from_numpy
    x = make(numpy.zeros((0, H), dtype=numpy.float32))
    ids = make(numpy.zeros((0, K), dtype=numpy.int32))
    weights = make(numpy.zeros((0, K), dtype=numpy.float32))
    layer = Experts(**WEIGHTS, top_k=K, max_tokens=T, routing=Routing())
    assert layer(x, ids, weights).shape == (0, H)
    assert layer.from_logits(x, make(numpy.zeros((0, E), dtype=numpy.float32))).shape == (0, H)
    assert switchyard.experts(x, *WEIGHTS.values(), ids, weights).shape == (0, H)
    ends = make(numpy.zeros(E, dtype=numpy.int32))
    assert switchyard.grouped_gemm(x, WEIGHTS["w13"], ends).shape == (0, 2 * I)
    order = switchyard.permute(ids, E)
    assert order.tokens.shape == (0,) and order.ends.tolist() == [0] * E
    assert switchyard.unpermute(make(_draw(1, 3, H)), order.positions, weights).shape == (0, H)
    found, _ = switchyard.topk(make(numpy.zeros((0, E), dtype=numpy.float32)), K)
    assert found.shape == (0, K)


def test_a_rank_without_tokens_of_numpy_takes_part():
    def body(world):
        own = world.own_experts(E)
        weights = {name: a[own.start : own.stop] for name, a in WEIGHTS.items()}
        layer = Experts(**weights, placement=Placement(num_experts=E, world=world), top_k=K, max_tokens=T)
        exchange = Exchange(world, hidden=H, num_experts=E, top_k=K, max_tokens=T, dispatch="f32")
        few = T if world.rank == 0 else 0
        call = {name: a[:few] for name, a in CALL.items()}
        out = layer(**call)
        got = exchange.dispatch(call["x"], call["topk_ids"], call["topk_weights"])
        back = exchange.combine(got.rows, got.handle)
        return out, back

    found, failures = run_ranks(World.threads(2, deadline=20), body)
    assert failures == [None, None]
    assert [out.shape[0] for out, _ in found] == [T, 0]
    numpy.testing.assert_allclose(found[0][0], Experts(**WEIGHTS, top_k=K)(**CALL), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------ overlapping memory


def overlapping(other, shape, shift):
    """An array of float32 that begins `shift` bytes behind the start of another's memory, and that other,
    moved there."""
    size = max(other.nbytes, shift + 4 * math.prod(shape)) + 64
    memory = numpy.zeros(size, dtype=numpy.uint8)
    moved = memory[: other.nbytes].view(other.dtype).reshape(other.shape)
    moved[...] = other
    return memory[shift : shift + 4 * math.prod(shape)].view(numpy.float32).reshape(shape), moved


@pytest.mark.parametrize("shift", [0, 4, 256, 512])
@pytest.mark.parametrize(
    "case, source",
    [
        (case, name)
        for case, of in CASES.items()
        if "out" in of.arrays
        for name in of.arrays
        if name not in ("out", "w", "bias", "w13", "w2") and case != "Exchange"
    ],
)
def test_an_output_over_an_input_is_refused_or_right(plain, case, source, shift):
    of = CASES[case]
    if shift >= of.arrays[source].nbytes:
        return
    out, moved = overlapping(of.arrays[source], of.arrays["out"].shape, shift)
    arrays = {n: a.copy() for n, a in of.arrays.items()} | {"out": out, source: moved}
    before = moved.copy()
    try:
        found = of.run(**arrays)
    except switchyard.Error as error:
        assert re.search(r"\bout\b", str(error)) and "overlap" in str(error), error
        assert numpy.array_equal(moved, before), "written before it was refused"
        return
    numpy.testing.assert_allclose(numpy.asarray(found), plain[case], rtol=1e-5, atol=1e-5)


def test_halves_of_one_buffer_do_not_overlap():
    both = numpy.zeros((T, 2 * H), dtype=numpy.float32)
    both[:, H:] = CALL["x"]
    layer = Experts(**WEIGHTS, top_k=K, max_tokens=T)
    layer(both[:, H:], CALL["topk_ids"], CALL["topk_weights"], out=both[:, :H])
    numpy.testing.assert_array_equal(both[:, H:], CALL["x"])
    numpy.testing.assert_array_equal(both[:, :H], layer(**CALL))


def test_what_torch_would_know_of_a_write(plain):
    """A written `out` counts as changed, so a gradient that needs what was there fails."""
    layer = Experts(**{n: torch.from_numpy(a) for n, a in WEIGHTS.items()}, top_k=K, max_tokens=T)
    x, ids, weights = (torch.from_numpy(a) for a in CALL.values())
    leaf = torch.ones(T, H, requires_grad=True)
    out = leaf * 1
    squared = out * out
    with torch.no_grad():
        for _ in range(3):
            version = out._version
            layer(x, ids, weights, out=out)
            assert out._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


# ------------------------------------------------------------------------------ numbers and words

GEMM_W = _draw(10, E, I, H)
SCALES = dict(
    w13=torch.zeros(E, 2 * I, H, dtype=torch.float8_e4m3fn),
    w2=torch.zeros(E, H, I, dtype=torch.float8_e4m3fn),
    w13_scale=torch.ones(E, 2 * I // 128, H // 128),
    w2_scale=torch.ones(E, H // 128, I // 128),
)


VALUES = {"numerics": Numerics, "placement": Placement, "memory": Memory, "diagnostics": Diagnostics}


def _layer_with(of):
    return lambda **fields: Experts(**WEIGHTS, top_k=K, max_tokens=T, **{of: VALUES[of](**fields)})


def _exchange_of(**options):
    world = World.single()
    return Exchange(world, **dict(hidden=H, num_experts=E, top_k=K, max_tokens=T) | options)


TOKENS = _draw(5, T, H)
EXCHANGE = _exchange_of(dispatch="f32")


def _combine(**options):
    got = EXCHANGE.dispatch(TOKENS, _ids())
    return EXCHANGE.combine(got.rows, got.handle, **options)


def _workspace_of(**options):
    sizes = dict(hidden=H, intermediate=I, experts=E, top_k=K, max_tokens=T, compute="f32")
    return Workspace(**sizes | options)


def _heap_of(**options):
    return SymmetricHeap(World.single(), **dict(bytes=4096) | options)


HEAP, WAITED = _heap_of(), _heap_of()
FLAG, RAISED = (heap.empty(1, torch.int64) for heap in (HEAP, WAITED))
WAITED.signal(RAISED, 2**63)

# Every public callable that has arguments which are numbers, truth values or texts, with those that it needs.
CALLABLES = {
    "World.single": (World.single, {}),
    "World.threads": (World.threads, dict(size=2)),
    "World.processes": (World.processes, dict(rank=0, size=1, rendezvous="arguments")),
    "World.own_experts": (World.single().own_experts, dict(num_experts=E)),
    "Experts": (Experts, dict(**WEIGHTS, top_k=K, max_tokens=T)),
    **{f"Experts, {of}": (_layer_with(of), {}) for of in VALUES},
    "Experts, FP8": (Experts, dict(**SCALES, top_k=K, max_tokens=T, block=(128, 128))),
    "Experts()": (Experts(**WEIGHTS, top_k=K, max_tokens=T).__call__, CALL),
    "experts": (switchyard.experts, dict(**CALL, **WEIGHTS)),
    "GroupedGemm": (GroupedGemm, dict(w=GEMM_W, max_rows=8)),
    "GroupedSchedule": (switchyard.GroupedSchedule, {}),
    "Activation": (Activation, {}),
    "Routing": (lambda **o: switchyard.topk(_draw(1, T, E), K, **o), {}),
    "topk": (switchyard.topk, dict(logits=_draw(15, T, E), k=K)),
    "permute": (switchyard.permute, dict(ids=_ids(), num_experts=E)),
    "permute, blocked": (lambda size: switchyard.permute(_ids(), E, ("blocked", size)), dict(size=4)),
    "permute, padded": (lambda size: switchyard.permute(_ids(), E, ("padded", size)), dict(size=16)),
    "unpermute": (switchyard.unpermute, {k: v for k, v in CASES["unpermute"].arrays.items() if k != "out"}),
    "Exchange": (_exchange_of, {}),
    "Exchange.dispatch": (EXCHANGE.dispatch, dict(x=TOKENS, ids=_ids())),
    "Exchange.combine": (_combine, {}),
    "Workspace": (_workspace_of, {}),
    "SymmetricHeap": (_heap_of, {}),
    "SymmetricHeap.empty": (_heap_of().empty, dict(shape=4, dtype="f32")),
    "SymmetricHeap.translate": (HEAP.translate, dict(array=FLAG, rank=0)),
    "SymmetricHeap.free": (HEAP.free, dict(array=0)),
    "SymmetricHeap.signal": (HEAP.signal, dict(flag=FLAG, value=1)),
    "SymmetricHeap.wait": (WAITED.wait, dict(flag=RAISED, value=1, peer=0)),
    "tuner.draw_counts": (
        tuner.draw_counts, dict(generator="distinct", tokens=8, num_experts=E, top_k=1, beta=0.5)
    ),
}  # fmt: skip
SIGNATURES = {
    "Routing": Routing,
    "Exchange": Exchange,
    "Exchange.combine": Exchange.combine,
    "Workspace": Workspace,
    "SymmetricHeap": SymmetricHeap,
    **{f"Experts, {of}": kind for of, kind in VALUES.items()},
}
ODD = {
    "int": [2**32 + 8, 2**32, 2**31, -1, -(2**31), 2**64 + 8, 2**63, 10**8, 1.5, math.nan, "8", [], b"8"],
    "float": [math.nan, -1.0, -math.inf, 1e39, 1e300, "1", [], 1j],
    "bool": [1, 2, "no", 1.0, [], -1],
    "str": [5, b"x", [], "a\0b", "\ud800"],
}
# Values that are odd, and have a meaning.
MEANT = {
    ("num_threads", -1), ("scale", -1.0), ("scale", math.nan), ("scale", -math.inf), ("scale", 1e300),
    ("up_bias", -1.0), ("alpha", -1.0), ("seed", 2**32 + 8), ("seed", 2**32), ("seed", 2**31),
    ("seed", 2**63), ("seed", 10**8), ("value", 2**32 + 8), ("value", 2**32), ("value", 2**31),
    ("value", 2**63), ("value", 10**8), ("max_tokens", 10**8), ("recorded_steps", 10**8),
    ("reserved_sms", 10**8), ("deadline", 1e300), ("network_chunk_bytes", 10**8), ("num_experts", 10**8),
}  # fmt: skip


# Arguments that are True or False.
FLAGS = ("paired", "exact", "accumulate", "trace", "transposed", "renormalize", "gated")


# A path, a shape without dimensions, and what takes seconds.
ELSEWISE = [("table", b"x"), ("shape", []), ("size", 10**8), ("tokens", 10**8)]


def _kind_of(annotation):
    text = str(annotation).split("|")[0].strip()
    return text if text in ODD else None


def _odd_values():
    for call, (function, given) in CALLABLES.items():
        signature = inspect.signature(SIGNATURES.get(call, function))
        for name, parameter in signature.parameters.items():
            kind = _kind_of(parameter.annotation)
            if kind is None and name in ("size", "array", "flag"):
                kind = "int"
            for value in ODD.get(kind, ()):
                if (name, value) not in ELSEWISE:
                    yield call, name, value


@pytest.mark.parametrize("call, name, value", list(_odd_values()), ids=lambda v: str(v)[:24])
def test_every_number_and_word_is_taken_as_it_is_or_refused(call, name, value):
    function, given = CALLABLES[call]
    try:
        with torch.no_grad():
            found = function(**{**given, name: value})
    except switchyard.CapacityExceeded:
        return  # there is less memory
    except switchyard.Error as error:
        said = (name, repr(value), str(value), hex(value) if isinstance(value, int) else "balancedness")
        assert any(text in str(error) for text in said), error
        assert not re.search(r"_seconds|struct_size|kInvalid|std::|sy_", str(error)), error
        return
    close = getattr(found, "close", None)
    # A number that is taken must not have become another one on the way.
    taken = getattr(found, name, None)
    assert value not in ODD["bool"] or name not in FLAGS, f"{call} took {name}={value!r}"
    if isinstance(taken, (int, float)) and not isinstance(taken, bool) and isinstance(value, (int, float)):
        assert taken == value or value <= 0 or name == "num_threads", (taken, value)
    elif (name, value) not in MEANT if isinstance(value, (int, float, str)) else True:
        pytest.fail(f"{call} took {name}={value!r}")
    if close:
        close()


@pytest.mark.parametrize("activation", ["gelu", "silu", 5, object()])
def test_an_activation_is_an_activation(activation):
    for make in (
        lambda: Experts(**WEIGHTS, top_k=K, activation=activation),
        lambda: GroupedGemm(GEMM_W, activation=activation),
        lambda: _workspace_of(activation=activation),
    ):
        with pytest.raises(switchyard.InvalidArgument, match=r"activation is .*switchyard\.Activation\('"):
            make()


@pytest.mark.parametrize("block", [(0, 0), (128, 0), (-1, 128), (128,), "128", 128, (2**40, 1.5)])
def test_a_block_is_two_sizes(block):
    with pytest.raises(switchyard.InvalidArgument, match="block"):
        Experts(**SCALES, top_k=K, block=block)


IGNORED = {
    "x_scale": lambda: Experts(**WEIGHTS, top_k=K)(
        **CALL, x_scale=numpy.ones((T, 1), dtype=numpy.float32)
    ),
    "device": lambda: Experts(**WEIGHTS, top_k=K, placement=Placement(device=3)),
    "block": lambda: Experts(**WEIGHTS, top_k=K, block=(64, 64)),
    "capacity_rule": lambda: Experts(**WEIGHTS, top_k=K, numerics=Numerics(capacity_rule="tokens")),
    "correction_bias": lambda: Experts(**WEIGHTS, top_k=K, correction_bias=_draw(1, E)),
    "slot": lambda: Experts(**WEIGHTS, top_k=K, memory=Memory(slot=1)),
    "order": lambda: Experts(
        WEIGHTS["w13"][:, :I], WEIGHTS["w2"], top_k=K, order="up_gate", activation=Activation("relu2", False)
    ),
    "reserved_sms": lambda: Experts(**WEIGHTS, top_k=K, placement=Placement(reserved_sms=4)),
    "table": lambda: GroupedGemm(GEMM_W, table="table.json"),
    "w13_scale": lambda: Experts(**WEIGHTS, top_k=K, w13_scale=numpy.ones(E, dtype=numpy.float32)),
    "w_scale": lambda: GroupedGemm(GEMM_W, w_scale=numpy.ones(E, dtype=numpy.float32)),
    "schedule": lambda: GroupedGemm(GEMM_W, schedule=switchyard.GroupedSchedule(splits=2)),
    "max_sms": lambda: _exchange_of(max_sms=4),
    "allocator": lambda: _workspace_of(allocator="torch"),
    "accumulate": lambda: Experts(**WEIGHTS, top_k=K)(**CALL, accumulate=True),
    "score": lambda: switchyard.topk(_draw(1, T, E), K, method="sparse_mixer", score="sigmoid"),
    "group_score": lambda: switchyard.topk(_draw(1, T, E), K, group_score="max"),
}


@pytest.mark.parametrize("name", IGNORED)
def test_no_argument_is_ignored(name):
    with pytest.raises(switchyard.Error, match=name):
        IGNORED[name]()


def test_limits_are_looked_at_before_memory():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for attempt in (
        lambda: World.threads(10**8),
        lambda: World.processes(0, 65, deadline=60),
        lambda: Experts(**WEIGHTS, top_k=K, placement=Placement(num_threads=10**6)),
        lambda: GroupedGemm(GEMM_W, num_threads=10**6),
        lambda: _exchange_of(num_threads=10**6),
        lambda: _workspace_of(num_threads=10**6),
        lambda: switchyard.topk(_draw(1, T, E), 2**31),
        lambda: switchyard.topk(_draw(1, T, E), E + 1),
        lambda: switchyard.permute(_ids(), E, ("blocked", 2**31)),
        lambda: switchyard.permute(_ids(), E, ("padded", 2**40)),
        lambda: switchyard.permute(_ids(), 2**31),
    ):
        with pytest.raises((switchyard.InvalidArgument, switchyard.CapacityExceeded)):
            attempt()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100_000, f"{grown} KiB"


TYPES = {
    "GroupedGemm, compute": lambda dtype: GroupedGemm(GEMM_W, compute=dtype),
    "Workspace, compute": lambda dtype: _workspace_of(compute=dtype),
    "Numerics, compute": lambda dtype: Numerics(compute=dtype),
    "from_checkpoint, compute": lambda dtype: switchyard.MoeLayer.from_checkpoint("nowhere", 0, compute=dtype),
    "Exchange, dispatch": lambda dtype: _exchange_of(dispatch=dtype),
    "Exchange, combine": lambda dtype: _exchange_of(combine=dtype),
}
OPTIONAL_TYPES = ("GroupedGemm, compute", "Numerics, compute", "from_checkpoint, compute", "Exchange, combine")


@pytest.mark.parametrize("dtype", ["x", "none", "int32", torch.int32, numpy.float64, 5, [], None], ids=str)
@pytest.mark.parametrize("argument", TYPES)
def test_a_type_that_cannot_be_chosen_is_refused_by_name(argument, dtype):
    if dtype is None and argument in OPTIONAL_TYPES:
        return
    name = argument.partition(", ")[2]
    with pytest.raises(switchyard.InvalidArgument) as caught:
        TYPES[argument](dtype)
    assert str(caught.value).startswith(f"{name} is {dtype!r}; pass ") and "'bf16'" in str(caught.value)
    assert ("None" in str(caught.value).partition(";")[2]) == (argument in OPTIONAL_TYPES)


def test_fp8_needs_weights_for_it():
    with pytest.raises(switchyard.InvalidArgument, match="compute is 'fp8', but w is f32; use 'bf16' or 'f32'"):
        GroupedGemm(GEMM_W, compute="fp8")


SCALED = {
    "Experts()": lambda scale: Experts(**WEIGHTS, top_k=K)(**CALL, scale=scale),
    "unpermute": lambda scale: switchyard.unpermute(*list(CASES["unpermute"].arrays.values())[:2], scale=scale),
    "Exchange.combine": lambda scale: _combine(scale=scale),
    "topk": lambda scale: switchyard.topk(_draw(1, T, E), K, scale=scale),
}


@pytest.mark.parametrize("call", SCALED)
def test_a_number_that_is_infinite_in_float32_is_named_as_it_was_given(call):
    for scale in (1e39, -1e39):
        if call != "topk" or scale > 0:
            with pytest.raises(switchyard.InvalidArgument, match=rf"scale is {re.escape(str(scale))}; .*3.40282e\+38"):
                SCALED[call](scale)
    SCALED[call](3e38)


@pytest.mark.parametrize("deadline", [1.0000001e12, 1e300])
def test_a_deadline_is_told_its_upper_limit(deadline):
    for make in (World.single, _exchange_of, _heap_of, Diagnostics):
        with pytest.raises(switchyard.InvalidArgument, match=rf"deadline is {re.escape(str(deadline))}; .*1e\+12"):
            make(deadline=deadline)
        make(deadline=1e12)


def test_a_refused_dispatch_has_sent_nothing():
    """A refused receive would leave a token on its way, and the next dispatch would find another number of calls."""
    before = EXCHANGE.stats().dispatches
    with pytest.raises(switchyard.InvalidArgument, match="exact is 'no'; use True or False"):
        EXCHANGE.dispatch(TOKENS, _ids(), exact="no")
    assert EXCHANGE.stats().dispatches == before


@pytest.mark.parametrize(
    "value, words",
    [(2**31, "2147483647 or less"), (2**64, "2147483647 or less"), (-(2**31) - 1, "-2147483648 or more"), (-1, r"\[1, ")],
)
def test_a_number_is_told_the_bound_that_it_crossed(value, words):
    """And not one at the other end, which may be refused in its turn."""
    with pytest.raises(switchyard.InvalidArgument, match=rf"max_tokens is {value}; use .*{words}") as refused:
        Experts(**WEIGHTS, top_k=K, max_tokens=value)
    assert value < 0 or "-" not in str(refused.value)


def test_documented_types_of_numbers():
    """Whole numbers of numpy are whole numbers."""
    traced = Diagnostics(trace=numpy.True_, recorded_steps=numpy.int64(2))
    layer = Experts(**WEIGHTS, top_k=numpy.int64(K), max_tokens=numpy.int32(T), diagnostics=traced)
    assert layer.max_tokens == T
    assert pathlib.Path(__file__).exists()
