"""The operators that a layer is made of, one by one: permute, grouped_gemm, unpermute."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from ctypes import byref
from numbers import Integral
from typing import Any, Literal, Union

from . import _abi, _arrays, _four_bit, _values
from ._activation import Activation, require_activation
from ._arrays import Array, Kept
from ._cache import find, fingerprint, options_key, remember
from ._four_bit import WeightFormat
from ._handle import Reader
from ._library import check, library
from ._values import count_text
from ._weights import ORDERS, Order, compute_code, put_scale
from .errors import DTypeMismatch, InvalidArgument, MissingTensor, ShapeMismatch

# "packed"; ("blocked", rows of a block); ("padded", an expert's room in rows)
Layout = Union[Literal["packed"], tuple[Literal["blocked", "padded"], int]]
_LAYOUTS = ("packed", "blocked", "padded")


def _layout(name: str, layout: Any) -> _abi.RowLayout:
    kind, size = (layout, 0) if isinstance(layout, str) else (None, None)
    if isinstance(layout, (tuple, list)) and len(layout) == 2:
        kind, size = layout
    # (A size may be anything, an array too, which is refused below.)
    is_zero = isinstance(size, Integral) and not _values.is_flag(size) and size == 0
    if not isinstance(kind, str) or kind not in _LAYOUTS or (kind == "packed") != is_zero:
        raise InvalidArgument(
            f"{name} is {layout!r}; use 'packed', ('blocked', rows of a block) or ('padded', rows of "
            "an expert)"
        )
    return _abi.RowLayout(_LAYOUTS.index(kind), 0, _values.integer(f"the size of {name}", size, 0))


def _rows_needed(layout: _abi.RowLayout, num_experts: int, rows: int) -> int:
    needed = ctypes.c_int64()
    check(library.sy_rows_needed(byref(layout), num_experts, rows, byref(needed)))
    return needed.value


# ------------------------------------------------------------------------------- grouped GEMM


@dataclasses.dataclass(frozen=True)
class GroupedSchedule:
    """How a grouped GEMM on a GPU cuts its work, in place of rules. None: the rule.

    Only `splits` changes the order of summation, and so bits of results.

    Parameters
    ----------
    tile_rows : int, optional
        The most token rows of a tile: a multiple of 16, up to 256 in bf16 and up to 224 with four-bit
        weights; 64 or 128 in FP8. The rule: the most.
    stages : int, optional
        The most stages of 64 columns that a block has in shared memory at a time: 2 to 12, fewer if
        they do not fit. Not in FP8. The rule: 12.
    paired : bool, optional
        Whether blocks work in pairs and load tokens once for both. The rule: from 96 rows per expert
        on, on average.
    band : int, optional
        The tiles of an expert that are multiplied with one block of weight rows before the next block
        has its turn: 1 or more. The rule: all.
    splits : int, optional
        The parts that K is cut into, summed in fp32 in their order: 1, 2, 4 or 8; fewer if a part
        would have no stage. The rule: 1.

    Raises
    ------
    InvalidArgument
        For a value that is none of any schedule. What a type or a backend does not have,
        `GroupedGemm` refuses.
    """

    tile_rows: int | None = None
    stages: int | None = None
    paired: bool | None = None
    band: int | None = None
    splits: int | None = None

    def __post_init__(self) -> None:
        for name in ("tile_rows", "stages", "band", "splits"):
            value = getattr(self, name)
            # 0 is the rule to the C interface, which has 32 bits.
            known = isinstance(value, Integral) and not _values.is_flag(value)
            bound = f"{_values.MOST_COUNT} or less" if known and value > 0 else "1 or more"
            if value is not None and not (known and 1 <= value <= _values.MOST_COUNT):
                raise InvalidArgument(f"{name} is {value!r}; use {bound}, or None for the rule")
        if self.paired is not None and not _values.is_flag(self.paired):
            raise InvalidArgument(f"paired is {self.paired!r}; use True, False, or None for the rule")

    def _put(self, options: _abi.GroupedGemmOptions) -> None:
        for name in ("tile_rows", "stages", "band", "splits"):
            setattr(options, name, int(getattr(self, name) or 0))
        options.paired = 0 if self.paired is None else 1 if self.paired else 2


def _check_schedule(schedule: Any) -> None:
    if schedule is None or isinstance(schedule, GroupedSchedule):
        return
    raise InvalidArgument(f"schedule is {schedule!r}; use a GroupedSchedule, or None for the rules")


class GroupedGemm(Reader):
    """The products of experts with their rows: ``out[r] = activation(w[e] @ x[r] + bias[e])``.

    On a CPU it copies no weight matrix; on a GPU those of four bits, and those of another type than it
    computes in. One call at a time runs; others wait.

    Parameters
    ----------
    w : array [E, N, K]
        bf16, fp16, fp32 or float8_e4m3fn, of up to 1024 experts. Any strides. Weights of four bits,
        as `weight_format` says: [E, N, K / 2] uint8 or int8, [E, N, K / 8] int32, or blocks
        [E, N, K / 32, 16] uint8, with contiguous rows.
    activation : Activation, optional
        Applied to the products. Gated: the output has N / 2 columns. None: products are the output.
    order : {"gate_up", "up_gate", "interleaved"}
        Order of a gated weight's rows: all of gate and then all of up, the other way round, or in turn.
    transposed : bool
        w is [E, K, N], as of ``torch._grouped_mm``.
    bias : array [E, N], optional
    w_scale : array, optional
        Scales of FP8 weights, f32 or float8_e8m0fnu: [E, ceil(N / block), ceil(K / block)], of blocks;
        [E, N] or [E, N, 1], of rows; [E] of whole matrices. Of weights of four bits, with contiguous
        rows, [E, N, K / 32] float8_e8m0fnu or uint8 of "mxfp4"; [E, N, K / 32 or K / 128] f32, bf16
        or fp16 of "int4".
    block : (int, int), optional
        Rows and columns of a block of w, not transposed. None: 128 x 128.
    weight_format : {"mxfp4", "int4"}, optional
        The format of a packed w: see docs/four_bit.md. None: it is not packed, or
        float4_e2m1fn_x2.
    w_zero : array, uint8, optional
        Zero points of "int4", 0 to 15, in the shape of w_scale. None: 8. Not on GPUs.
    compute : str or dtype, optional
        "bf16" or "f8_e4m3"; on a CPU also "f32", on a GPU also "f16". None: by the weights' type;
        for fp16 that is "f32" on a CPU and "f16" on a GPU. Other types of x and w are rounded to
        it; in "f16" numbers beyond its range become infinite, as in torch.
    max_rows : int
        Most rows of a call, over all experts.
    num_threads : int
        0: those of the hardware.
    schedule : GroupedSchedule, optional
        On a GPU. None: the rules.
    table : path, optional
        On a GPU: a table that ``switchyard tune --kernel grouped`` wrote for this shape, type and GPU.
        The kernel chooses from it by `ends`, also in a graph's replays. Of `schedule` only `paired`
        may be given beside it.

    Raises
    ------
    InvalidArgument, ShapeMismatch, DTypeMismatch, MissingTensor
        Naming the argument and its value.
    Unsupported
        For what the library does not do in this build, or on GPUs: see docs/operators.md.
    """

    _noun = "operator"

    def _shown(self) -> str:
        activation = "" if self.activation is None else f", {self.activation.kind}"
        where = self.backend if self.device is None else f"cuda:{self.device}"
        return (
            f"{count_text(self.num_experts, 'expert')}, N {self.n}, K {self.k}{activation}, up to "
            f"{count_text(self.max_rows, 'row')}; weights {self._stored}, computing in {self.compute} on {where}"
        )

    _lay_out = staticmethod(library.sy_grouped_gemm_refresh)

    def __init__(
        self,
        w: Any,
        *,
        activation: Activation | None = None,
        order: Order = "gate_up",
        transposed: bool = False,
        bias: Any = None,
        w_scale: Any = None,
        block: tuple[int, int] | None = None,
        weight_format: WeightFormat | None = None,
        w_zero: Any = None,
        compute: Any = None,
        max_rows: int = 65536,
        num_threads: int = 0,
        schedule: GroupedSchedule | None = None,
        table: str | os.PathLike[str] | None = None,
    ) -> None:
        order_code = _values.choice("order", order, ORDERS)
        if activation is not None:
            require_activation(activation)
        if order != "gate_up" and (activation is None or not activation.gated):
            raise InvalidArgument(f"order is {order!r}, but no activation has a gate; leave it out")
        if block is not None and w_scale is None:
            raise InvalidArgument(f"block is {block!r}, but there is no w_scale; leave it None, or pass it")
        _check_schedule(schedule)
        transposed = bool(_values.flag("transposed", transposed))
        keep = Kept()
        form = _four_bit.format_of("w", w, weight_format)
        _four_bit.refuse_block(form, block)
        _four_bit.refuse_zero(form, w_zero=w_zero)
        if form is not None:
            weight = _four_bit.weight("w", w, form, transposed, keep)
        else:
            weight = keep.describe("w", w)
            if weight.ndim != 3:
                raise ShapeMismatch(f"w is {_arrays.shape_of(weight)}; it needs 3 dimensions")
            weight = _arrays.transpose(weight) if transposed else weight
        spec = _abi.GroupedGemmSpec(order=order_code)
        if activation is not None:
            spec.has_epilogue = 1
            spec.epilogue = activation._to_c()
        spec.weights.weight = weight
        if weight.dtype == _abi.F8_E4M3 and w_scale is None:
            raise MissingTensor("w is float8_e4m3fn; pass w_scale, too")
        if form is not None:
            _four_bit.put_scale("w_scale", w_scale, spec.weights, form, keep)
            if w_zero is not None:
                spec.zero = _four_bit.zero("w_zero", w_zero, spec.weights.scale, keep)
        elif w_scale is not None:
            if weight.dtype != _abi.F8_E4M3:
                raise DTypeMismatch(
                    f"w_scale is given, but w is {_arrays.DTYPE_NAMES[weight.dtype]}, which has no "
                    "scales; leave it None"
                )
            put_scale("w_scale", w_scale, spec.weights, block, keep)
        if bias is not None:
            spec.weights.bias = keep.describe("bias", bias, copied=True)
        cuda = weight.device_type == _abi.CUDA
        options = _abi.GroupedGemmOptions(
            backend=_abi.CUDA if cuda else _abi.CPU, max_rows=max_rows, num_threads=num_threads,
            device=weight.device_id if cuda else -1,
            compute=compute_code(compute, weight.dtype, "w", ("bf16", "f16", "f32", "f8_e4m3")),
        )
        if schedule is not None:
            schedule._put(options)
        if table is not None:
            options.table_file = _values.path("table", table)
        handle = ctypes.c_void_p()
        check(library.sy_grouped_gemm_create(byref(spec), byref(options), byref(handle)))
        super().__init__(handle, library.sy_grouped_gemm_destroy)
        info = _abi.GroupedGemmInfo()
        check(library.sy_grouped_gemm_get_info(handle, byref(info)))
        self.num_experts: int = info.num_experts
        self.n: int = info.n
        self.k: int = info.k
        self.output_columns: int = info.output_columns
        self.max_rows: int = info.max_rows
        self.num_threads: int = info.num_threads
        self.compute: str = _arrays.DTYPE_NAMES[info.compute]
        self.backend: str = "cuda" if info.backend == _abi.CUDA else "cpu"
        self.activation = activation
        self.order: Order = order
        self.schedule = schedule
        self.device: int | None = weight.device_id if cuda else None
        self._copies = bool(info.copies)
        self._stored = _arrays.DTYPE_NAMES[weight.dtype]
        self._set_keep(keep)
        self._parameters = keep.tensors

    def __call__(
        self,
        x: Array,
        ends: Any,
        *,
        x_scale: Any = None,
        layout: Layout = "packed",
        index: Any = None,
        out: Any = None,
        out_layout: Layout | None = None,
        out_index: Any = None,
        row_weights: Any = None,
        products: Any = None,
        chosen: Any = None,
    ) -> Array:
        """The products of one batch.

        Parameters
        ----------
        x : array [rows of the layout, K], or with `index` [any, K]
            bf16, fp16, fp32, or float8_e4m3fn with `x_scale`. Rows of no expert are not read.
        ends : array [E], int32 or int64
            The number of rows of experts 0 to e together, whatever the layout.
        x_scale : array [rows, ceil(K / 128)], float32
            Scales of FP8 rows.
        layout : "packed", ("blocked", size) or ("padded", size)
            An expert's rows follow those of the expert before; begin at the next multiple of size;
            or begin at row e * size.
        index : array [rows of the layout], int32, optional
            The row of x that each row is. None: x has the rows themselves.
        out : array [rows of out_layout, N or N / 2], optional
            bf16, fp16 or fp32. None: a new one of x's type (bf16 for FP8 rows), of as many rows as
            out_layout may have, of which those that are no expert's hold anything.
        out_layout : optional
            None: as `layout`, or packed with `out_index`.
        out_index : array [rows, in packed order], int32, optional
            Each row's own place in `out`; -1: it is not stored.
        row_weights : array [rows, in packed order], float32, optional
            Multiply the rows of the output, before they are rounded.
        products : array [rows of out_layout, N], optional
            Filled with what the activation is applied to, in out's type.
        chosen : array [1], int32, optional
            On a GPU: filled with the entry of the table that was chosen; -1: none, by the rules.

        Returns
        -------
        array
            `out`.

        Raises
        ------
        InvalidArgument, ShapeMismatch, DTypeMismatch, MissingTensor, CapacityExceeded
            Before anything is written.
        Unsupported
            If a gradient is asked for: there is no backward pass.
        """
        _arrays.refuse_gradient(x, row_weights, *self._parameters)
        call = _abi.GroupedGemmCall(x_layout=_layout("layout", layout))
        if out_layout is not None:
            call.out_layout = _layout("out_layout", out_layout)
        elif out_index is None:
            call.out_layout = call.x_layout
        keep = []

        def put(name: str, array: Any, write: bool = False) -> None:
            if array is None:
                return
            tensor, kept = _arrays.describe(name, array, write=write)
            setattr(call, name, tensor)
            keep.append(kept)

        put("x", x)
        if call.x.ndim != 2 or (call.x.shape[1] != self.k):
            raise ShapeMismatch(f"x is {list(_arrays.shape_of(call.x))}; the operator takes [rows, {self.k}]")
        if x_scale is None:
            _arrays.require_x_scale(call.x)
        put("index", index)
        if out is None:
            if out_index is not None:
                raise InvalidArgument("out_index is given, but out is None; pass what it is an index of")
            rows = (call.x if index is None else call.index).shape[0]
            if bytes(call.out_layout) != bytes(call.x_layout):
                rows = _rows_needed(call.out_layout, self.num_experts, rows)
            fp8 = call.x.dtype == _abi.F8_E4M3
            out = _arrays.empty(x, "x", (rows, self.output_columns), "bfloat16" if fp8 else None)
        put("ends", ends)
        if x_scale is not None and call.x.dtype != _abi.F8_E4M3:
            raise DTypeMismatch(
                f"x_scale is given, but x is {_arrays.DTYPE_NAMES[call.x.dtype]}, which has no scales; leave it None"
            )
        put("x_scale", x_scale)
        put("out", out, True)
        put("out_index", out_index)
        put("row_weights", row_weights)
        put("products", products, True)
        put("chosen", chosen, True)
        call.stream = self._stream(x)
        with self._lock:
            handle = self._open()
            self._see_changes(x)
            check(library.sy_grouped_gemm_run(handle, byref(call)))
        _arrays.wrote(out, products, chosen)
        del keep
        return out


def grouped_gemm(
    x: Array,
    w: Any,
    ends: Any,
    *,
    activation: Activation | None = None,
    order: Order = "gate_up",
    transposed: bool = False,
    bias: Any = None,
    w_scale: Any = None,
    block: tuple[int, int] | None = None,
    weight_format: WeightFormat | None = None,
    w_zero: Any = None,
    x_scale: Any = None,
    layout: Layout = "packed",
    index: Any = None,
    out: Any = None,
    out_layout: Layout | None = None,
    out_index: Any = None,
    row_weights: Any = None,
    products: Any = None,
    compute: Any = None,
    schedule: GroupedSchedule | None = None,
) -> Array:
    """`GroupedGemm` as a function. Operators are made once for their weights and cached.

    An operator is kept while the arrays it was made of are: pass the same objects, not views made
    for each call. A scale or a bias that was changed in place is seen. Several threads may call it.

    Parameters
    ----------
    x : array [rows, K]
    w : array [E, N, K], or [E, K, N] with `transposed`
    ends : array [E], int32 or int64
    activation, order, transposed, bias, w_scale, block, weight_format, w_zero, compute, schedule
        See `GroupedGemm`.
    x_scale, layout, index, out, out_layout, out_index, row_weights, products
        See ``GroupedGemm.__call__``.

    Returns
    -------
    array [rows of out_layout, N or N / 2]

    Raises
    ------
    Error
        As `GroupedGemm` and ``GroupedGemm.__call__`` do.
    """
    _check_schedule(schedule)
    rows = _arrays.shape("x", x, 2)[0] if index is None else _arrays.shape("index", index, 1)[0]
    gemm = _cached(
        rows, w, bias, w_scale, w_zero, activation=activation, order=order, transposed=transposed, block=block,
        weight_format=weight_format, compute=compute, schedule=schedule,
    )
    return gemm(
        x, ends, x_scale=x_scale, layout=layout, index=index, out=out, out_layout=out_layout,
        out_index=out_index, row_weights=row_weights, products=products,
    )


def _cached(rows: int, w: Any, bias: Any, w_scale: Any, w_zero: Any, **options: Any) -> GroupedGemm:
    names, small = ("bias", "w_scale", "w_zero"), (bias, w_scale, w_zero)
    arrays = (w, *small)
    key = ("grouped_gemm", *map(fingerprint, ("w", *names), arrays), options_key(options.items()))
    gemm = find(key, small, lambda made: rows <= made.max_rows)
    if gemm is None:
        most = max(65536, 1 << (rows - 1).bit_length())
        gemm = GroupedGemm(w, **dict(zip(names, small)), max_rows=most, **options)
        # The cache must not keep weights alive: it forgets the operator when one of them goes.
        gemm._forget_arrays()
        gemm._parameters = []
        remember(key, gemm, (w,), small)
    _arrays.refuse_gradient(*arrays)
    return gemm


# ------------------------------------------------------------------------- permute, unpermute


@dataclasses.dataclass(frozen=True)
class Permutation:
    """The order of slots (token, k) by expert: first all of expert 0, token by token, and so on.

    Attributes
    ----------
    ends : array [E], int32
        See `grouped_gemm`.
    tokens : array [rows of the layout], int32
        Whose row it is, -1 for nobody's: the `index` of `grouped_gemm`. On a GPU there are as many as
        the layout may need, -1 behind those that it has.
    positions : array [T, K], int32
        The slot's row in the layout; -1: it has no expert.
    layout : "packed", ("blocked", size) or ("padded", size)
    dropped : array [1], int32, or None
        On a GPU, in a padded layout: how many slots were dropped, because their expert has no room.
        They have position -1. On the host such a call is refused.
    """

    ends: Any
    tokens: Any
    positions: Any
    layout: Layout
    dropped: Any = None

    def __repr__(self) -> str:
        # A tensor's own text would wait for its GPU.
        arrays = ("ends", "tokens", "positions", "dropped")
        fields = ", ".join(f"{name} {_arrays.shown(getattr(self, name, None))}" for name in arrays)
        return f"<Permutation: {fields}, layout {getattr(self, 'layout', None)!r}>"


def permute(ids: Any, num_experts: int, layout: Layout = "packed") -> Permutation:
    """Sort slots by expert, where the ids are: on the host, or on their GPU's current stream.

    On a GPU it waits for nothing, and may be captured.

    Parameters
    ----------
    ids : array [T, K], int32 or int64, contiguous
        Negative ones, and those of num_experts or more, are none.
    num_experts : int
        1 to 1024.
    layout : "packed", ("blocked", size) or ("padded", size)

    Returns
    -------
    Permutation
        It holds tensors of torch if ids are one, else arrays of numpy.

    Raises
    ------
    InvalidArgument, ShapeMismatch, DTypeMismatch
        On the host also for a padded expert without room for its rows. On a GPU see
        `Permutation.dropped`.
    Unsupported
        For tensors on a GPU that the library does not run on.
    """
    described, keep = _arrays.describe("ids", ids)
    if described.ndim != 2:
        raise ShapeMismatch(f"ids are {_arrays.shape_of(described)}; pass [T, K]")
    c_layout = _layout("layout", layout)
    shape = _arrays.shape_of(described)
    num_experts = _values.integer("num_experts", num_experts, 1, 1024)
    most = _rows_needed(c_layout, num_experts, shape[0] * shape[1])
    cuda = described.device_type == _abi.CUDA
    shapes = ((num_experts,), (most,), shape)
    ends, tokens, positions = arrays = [_arrays.empty(ids, "ids", shape, "int32") for shape in shapes]
    c_ends, c_tokens, c_positions = (_arrays.describe("an output", array)[0] for array in arrays)
    if cuda:
        size = ctypes.c_uint64()
        check(library.sy_permute_workspace(shape[0] * shape[1], num_experts, byref(size)))
        workspace = _arrays.empty(ids, "ids", (size.value,), "uint8")
        call = _abi.PermuteCall(
            num_experts=num_experts, stream=_arrays.current_stream(ids), layout=c_layout,
            ids=described, ends=c_ends, positions=c_positions, tokens=c_tokens,
            workspace=_arrays.describe("the workspace", workspace)[0],
        )
        dropped = None
        if c_layout.kind == _LAYOUTS.index("padded"):
            dropped = _arrays.empty(ids, "ids", (1,), "int32")
            call.dropped = _arrays.describe("dropped", dropped)[0]
        check(library.sy_permute_run(byref(call)))
        del keep
        return Permutation(ends, tokens, positions, layout, dropped)
    rows = ctypes.c_int64()
    check(
        library.sy_permute(
            byref(described), num_experts, byref(c_layout), byref(c_ends), byref(c_positions),
            byref(c_tokens), byref(rows),
        )
    )
    del keep
    return Permutation(ends, tokens[: rows.value], positions, layout)


def unpermute(
    rows: Array,
    positions: Any,
    weights: Any = None,
    *,
    out: Any = None,
    scale: float = 1.0,
    accumulate: bool = False,
) -> Array:
    """``out[t] = scale * sum_k weights[t, k] * rows[positions[t, k]]``, where the rows are.

    On a GPU it goes to the current stream, waits for nothing, and may be captured.

    Parameters
    ----------
    rows : array [any, H]
        bf16, fp16 or fp32.
    positions : array [T, K], int32, contiguous
        -1: none. On a GPU, where they cannot be refused, others that are no row are none, too.
    weights : array [T, K], float32 or bfloat16, contiguous, optional
        None: 1.
    out : array [T, H], optional
        bf16, fp16 or fp32. None: a new one of the type of rows.
    scale : float
        Multiplies the result.
    accumulate : bool
        Add to `out` instead of replacing it.

    Returns
    -------
    array [T, H]
        `out`.

    Raises
    ------
    InvalidArgument, ShapeMismatch, DTypeMismatch
        Before anything is written.
    Unsupported
        For tensors on a GPU that the library does not run on, and if a gradient is asked for.
    """
    _arrays.refuse_gradient(rows, weights)
    c_rows, keep_rows = _arrays.describe("rows", rows)
    c_positions, keep_positions = _arrays.describe("positions", positions)
    if c_rows.ndim != 2 or c_positions.ndim != 2:
        raise ShapeMismatch(
            f"rows are {_arrays.shape_of(c_rows)} and positions {_arrays.shape_of(c_positions)}; pass "
            "[any, H] and [T, K]"
        )
    c_weights, keep_weights = (None, None) if weights is None else _arrays.describe("weights", weights)
    if out is None:
        _values.refuse_accumulate(accumulate)
        out = _arrays.empty(rows, "rows", (c_positions.shape[0], c_rows.shape[1]))
    c_out, keep_out = _arrays.describe("out", out, write=True)
    call = _abi.UnpermuteCall(
        accumulate=_values.flag("accumulate", accumulate), scale=scale, rows=c_rows, positions=c_positions, out=c_out
    )
    if c_weights is not None:
        call.weights = c_weights
    for name, tensor in (("positions", c_positions), ("weights", c_weights), ("out", c_out)):
        if tensor is not None:
            _arrays.require_same_device(name, tensor, "rows", c_rows)
    if c_rows.device_type == _abi.CUDA:
        call.stream = _arrays.current_stream(rows)
    check(library.sy_unpermute_run(byref(call)))
    _arrays.wrote(out)
    del keep_rows, keep_positions, keep_weights, keep_out
    return out
