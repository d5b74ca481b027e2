"""A layer's weights, as descriptors of the C interface over the caller's arrays."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, Literal

from . import _abi, _arrays, _four_bit, _values
from ._activation import Activation, require_activation
from ._arrays import Kept
from ._values import count_text
from .errors import DTypeMismatch, InvalidArgument, MissingTensor, ShapeMismatch, Unsupported

Order = Literal["gate_up", "up_gate", "interleaved"]
ORDERS = ("gate_up", "up_gate", "interleaved")


def weights_of(
    w13: Any,
    w2: Any,
    activation: Activation,
    order: str,
    transposed: bool,
    w13_scale: Any,
    w2_scale: Any,
    block: Sequence[int] | None,
    w13_bias: Any,
    w2_bias: Any,
    weight_format: Any = None,
    w13_zero: Any = None,
    w2_zero: Any = None,
) -> tuple[_abi.LayerWeights, tuple[int, int, int], Kept]:
    """Descriptors of gate, up and down; (n, I, H); and what must be kept."""
    require_activation(activation)
    _values.choice("order", order, ORDERS)
    if order != "gate_up" and not activation.gated:
        raise InvalidArgument(f"order is {order!r}, but {activation} has no gate; leave it out")
    if block is not None and w13_scale is None and w2_scale is None:
        raise InvalidArgument(f"block is {block!r}, but there are no scales; leave it None, or pass them")
    _values.flag("transposed", transposed)
    both = isinstance(w13, tuple)
    form = _four_bit.format_of("w2", w2, weight_format)
    if not both and weight_format is None:
        _four_bit.require_one(form, _four_bit.format_of("w13", w13, None))
    _four_bit.refuse_block(form, block)
    _four_bit.refuse_zero(form, w13_zero=w13_zero, w2_zero=w2_zero)
    keep = Kept()

    def described(name: str, array: Any, ndim: int, copied: bool = False) -> _abi.Tensor:
        tensor = keep.describe(name, array, copied=copied)
        if tensor.ndim != ndim:
            raise ShapeMismatch(f"{name} is {_arrays.shape_of(tensor)}; it needs {ndim} dimensions")
        return tensor

    def matrix(name: str, array: Any) -> _abi.Tensor:
        if form is not None:
            return _four_bit.weight(name, array, form, transposed, keep)
        tensor = described(name, array, 3)
        return _arrays.transpose(tensor) if transposed else tensor

    if both and order != "gate_up":
        raise InvalidArgument(f"order is {order!r}, but w13 is (gate, up), which says which is which; leave it out")
    if both and form is not None:
        raise Unsupported("w13 as (gate, up) with scales is not there yet; pass one array")
    down = matrix("w2", w2)
    if both:
        return _of_two(w13, down, activation, transposed, (w13_scale, w2_scale, w13_bias, w2_bias), keep)
    up = matrix("w13", w13)
    count, rows, hidden = _arrays.shape_of(up)
    gated = activation.gated
    if gated and rows % 2:
        raise ShapeMismatch(f"w13 has {count_text(rows, 'row')}, but gate and up have as many each")
    intermediate = rows // 2 if gated else rows
    if _arrays.shape_of(down) != (count, hidden, intermediate):
        raise ShapeMismatch(
            f"w2 is {_arrays.shape_of(down)}, but w13 makes {count_text(count, 'expert')} with H {hidden} and I "
            f"{intermediate}{' (not transposed)' if transposed else ''}; it needs "
            f"({count}, {hidden}, {intermediate})"
        )
    for name, tensor, scale in (("w13", up, w13_scale), ("w2", down, w2_scale)):
        if tensor.dtype == _abi.F8_E4M3 and scale is None:
            raise MissingTensor(f"{name} is float8_e4m3fn; pass {name}_scale, too")
        if form is None and tensor.dtype != _abi.F8_E4M3 and scale is not None:
            raise DTypeMismatch(
                f"{name}_scale is given, but {name} is {_arrays.DTYPE_NAMES[tensor.dtype]}, which has "
                "no scales; leave it None"
            )
    _require_one_type(up, down)
    weights = _abi.LayerWeights()
    weights.down.weight = down
    if form is not None:
        _four_bit.put_scale("w2_scale", w2_scale, weights.down, form, keep)
    elif w2_scale is not None:
        put_scale("w2_scale", w2_scale, weights.down, block, keep)
    if w2_zero is not None:
        weights.down_zero = _four_bit.zero("w2_zero", w2_zero, weights.down.scale, keep)
    if w2_bias is not None:
        weights.down.bias = described("w2_bias", w2_bias, 2, copied=True)
        if _arrays.shape_of(weights.down.bias) != (count, hidden):
            raise ShapeMismatch(
                f"w2_bias is {_arrays.shape_of(weights.down.bias)}; it needs ({count}, {hidden})"
            )
    bias = None if w13_bias is None else described("w13_bias", w13_bias, 2, copied=True)
    if (w13_bias is None) != (w2_bias is None):
        missing = "w13_bias" if w13_bias is None else "w2_bias"
        raise MissingTensor(f"only one bias is given; pass {missing}, too (of zeros if there is none)")
    if bias is not None and _arrays.shape_of(bias) != (count, rows):
        raise ShapeMismatch(f"w13_bias is {_arrays.shape_of(bias)}; it needs ({count}, {rows})")
    whole, of_halves = _abi.Matrices(weight=up), False
    if form is not None:
        _four_bit.put_scale("w13_scale", w13_scale, whole, form, keep)
    elif w13_scale is not None:
        of_halves = put_scale("w13_scale", w13_scale, whole, block, keep, halves=intermediate if gated else 0)
    zero = None if w13_zero is None else _four_bit.zero("w13_zero", w13_zero, whole.scale, keep)
    if not gated:
        weights.up = whole
        if bias is not None:
            weights.up.bias = bias
        if zero is not None:
            weights.up_zero = zero
        return weights, (count, intermediate, hidden), keep

    # First row and step of gate and of up.
    step = 2 if order == "interleaved" else 1
    second = 1 if step == 2 else intermediate
    starts = {"gate": 0, "up": second} if order != "up_gate" else {"gate": second, "up": 0}
    for name, start in starts.items():
        matrices = getattr(weights, name)
        matrices.weight = _arrays.rows(up, start, intermediate, step)
        if bias is not None:
            matrices.bias = _arrays.rows(bias, start, intermediate, step)
        if w13_scale is not None:
            _put_part_of_scale(matrices, whole, start, intermediate, step, of_halves)
        if zero is not None:
            setattr(weights, f"{name}_zero", _arrays.rows(zero, start, intermediate, step))
    return weights, (count, intermediate, hidden), keep


def _require_one_type(w13: _abi.Tensor, w2: _abi.Tensor) -> None:
    if w13.dtype != w2.dtype:
        raise DTypeMismatch(
            f"w13 is {_arrays.DTYPE_NAMES[w13.dtype]} and w2 is {_arrays.DTYPE_NAMES[w2.dtype]}; pass both in one type"
        )


def compute_code(
    compute: Any, weights: int, of: str = "w2", may_be: tuple[str, ...] = _arrays.COMPUTE
) -> int:
    """The code of the type to compute in, with weights of a type; none: by the weights' type.

    `of`: the argument that has the weights, for the error.
    """
    code = _arrays.chosen_dtype("compute", compute, may_be)
    if code == _abi.F8_E4M3 and weights not in (_abi.F8_E4M3, _abi.F4_E2M1):
        raise InvalidArgument(
            f"compute is {compute!r}, but {of} is {_arrays.DTYPE_NAMES[weights]}; use 'bf16' or 'f32', or weights in "
            "FP8 or MXFP4"
        )
    return code


def put_placement(weights: _abi.LayerWeights, placement: Sequence[int] | None) -> None:
    """The library reads the table at once, and keeps no address of it."""
    if placement is None:
        return
    table = _values.integers("placement", ctypes.c_int32, placement)
    weights.placement = placement_of(table, len(placement))
    weights._table = table


def placement_of(table: Any, places: int) -> _abi.Tensor:
    """[places], of a table that stays until the library has read it."""
    return _arrays.view(
        _abi.Tensor(ctypes.addressof(table), _abi.I32, 1, _abi.CPU, 0), shape=(places,), strides=(1,)
    )


def _of_two(
    w13: tuple[Any, ...],
    down: _abi.Tensor,
    activation: Activation,
    transposed: bool,
    others: tuple[Any, ...],
    keep: Kept,
) -> tuple[_abi.LayerWeights, tuple[int, int, int], Kept]:
    """Gate and up as arrays of their own."""
    if len(w13) != 2 or not activation.gated:
        raise InvalidArgument("w13 is a tuple; pass (gate, up), with a gated activation")
    if any(other is not None for other in others):
        raise Unsupported("w13 as (gate, up) with scales or biases is not there yet; pass one array")
    weights = _abi.LayerWeights()
    for name, array in zip(("gate", "up"), w13):
        tensor = keep.describe(f"w13 ({name})", array)
        if tensor.ndim != 3:
            raise ShapeMismatch(f"{name} is {_arrays.shape_of(tensor)}; it needs 3 dimensions")
        getattr(weights, name).weight = _arrays.transpose(tensor) if transposed else tensor
    weights.down.weight = down
    count, intermediate, hidden = _arrays.shape_of(weights.up.weight)
    return weights, (count, intermediate, hidden), keep


def _block_of(block: Sequence[int] | None) -> tuple[int, int]:
    if block is None:
        return 128, 128
    if not isinstance(block, (tuple, list)) or len(block) != 2:
        raise InvalidArgument(f"block is {block!r}; pass (rows, columns) of a block, or None for 128 x 128")
    height, width = (_values.integer("block", size, 1) for size in block)
    return height, width


def put_scale(
    name: str,
    scale: Any,
    matrices: _abi.Matrices,
    block: Sequence[int] | None,
    keep: Kept,
    halves: int = 0,
) -> bool:
    """Scales of [n, rows, cols] weights, as [n, R, C] with the rows and columns of a block.

    halves: rows of gate, and of up, if the matrix has both. Returns whether gate and up have a scale each, whatever
    the order of their rows.
    """
    tensor = keep.describe(name, scale, copied=True)
    count, rows, cols = _arrays.shape_of(matrices.weight)
    given = _arrays.shape_of(tensor)
    shape, strides = list(given), list(tensor.strides[: tensor.ndim])
    while len(shape) < 3:
        shape.append(1)
        strides.append(1)
    if shape[0] != count:
        raise ShapeMismatch(f"{name} is {given}, but the number of experts is {count}")
    tensor = _arrays.view(tensor, shape=tuple(shape), strides=tuple(strides))
    height, width = _block_of(block)
    in_blocks = shape[1:] == [math.ceil(rows / height), math.ceil(cols / width)]
    # [n, 2, 1] may be either. Scales of three dimensions are those of blocks where they can be.
    of_halves = halves > 0 and shape[1:] == [2, 1] and rows != 2 and not (in_blocks and len(given) == 3)
    if shape[1:] == [1, 1]:
        per = (rows, cols)
    elif of_halves:
        per = (halves, cols)
    elif shape[1:] == [rows, 1]:
        per = (1, cols)
    elif in_blocks:
        per = (height, width)
    else:
        raise ShapeMismatch(
            f"{name} is {given}; weights of {rows} x {cols} take ({count},), ({count}, {rows}), or in "
            f"blocks of {height} x {width} ({count}, {math.ceil(rows / height)}, "
            f"{math.ceil(cols / width)}): set block if yours have another size"
        )
    if halves and per[0] not in (1, halves, rows) and halves % per[0]:
        # A block has rows of gate and of up: scales of smaller blocks say the same.
        smaller = math.gcd(halves, per[0])
        if not hasattr(scale, "repeat_interleave") and not _arrays.is_numpy(scale):
            raise Unsupported(
                f"blocks of {count_text(per[0], 'row')} do not divide the {halves} of gate; repeat the scales for "
                f"blocks of {count_text(smaller, 'row')} and pass block=({smaller}, {per[1]})"
            )
        tensor = keep.repeat(name, scale, per[0] // smaller, math.ceil(rows / smaller))
        per = (smaller, per[1])
    matrices.scale = tensor
    matrices.scale_rows, matrices.scale_cols = per
    return of_halves


def _put_part_of_scale(
    part: _abi.Matrices, whole: _abi.Matrices, start: int, count: int, step: int, of_halves: bool
) -> None:
    """Scales of every step-th row from `start` on. of_halves: there is one of gate and one of up."""
    height = whole.scale_rows
    part.scale_cols = whole.scale_cols
    if step == 1:
        part.scale_rows = min(height, count)
        first = start // height
        part.scale = _arrays.rows(whole.scale, first, math.ceil(count / part.scale_rows))
        return
    if height == 1:
        part.scale_rows = 1
        part.scale = _arrays.rows(whole.scale, start, count, step)
    elif of_halves:
        part.scale_rows = count
        part.scale = _arrays.rows(whole.scale, start, 1)
    elif height % step == 0:
        part.scale_rows = height // step
        part.scale = whole.scale
    else:
        raise Unsupported(
            f"interleaved rows with a scale for each {height} of them; use blocks of an even number"
        )
