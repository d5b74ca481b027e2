"""Weights of four bits: arrays that hold several numbers in each element, and what stands beside them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from . import _abi, _arrays
from ._arrays import Kept
from ._values import count_text
from .errors import DTypeMismatch, InvalidArgument, MissingTensor, ShapeMismatch

WeightFormat = Literal["mxfp4", "int4"]

# Weights in an element of an array.
_PER_ELEMENT = {_abi.U8: 2, _abi.I32: 8}
# A block of gpt-oss: 32 columns in 16 bytes.
_BLOCK_BYTES = 16


@dataclasses.dataclass(frozen=True)
class _Format:
    name: str
    dtype: int
    scales: dict[int, str]
    groups: tuple[int, ...]
    has_zero: bool


_FORMATS = {
    "mxfp4": _Format("mxfp4", _abi.F4_E2M1, {_abi.F8_E8M0: "float8_e8m0fnu", _abi.U8: "uint8"}, (32,), False),
    "int4": _Format(
        "int4", _abi.U4, {_abi.F32: "float32", _abi.BF16: "bfloat16", _abi.F16: "float16"}, (32, 128), True
    ),
}


def _is_float4(array: Any) -> bool:
    return _arrays.dtype_name(getattr(array, "dtype", None)) == "float4_e2m1fn_x2"


def named(weight_format: Any) -> _Format:
    """The format of this name; raises `InvalidArgument` for a name that is none."""
    if not isinstance(weight_format, str) or weight_format not in _FORMATS:
        raise InvalidArgument(
            f"weight_format is {weight_format!r}; use one of {', '.join(map(repr, _FORMATS))}, or leave it None for "
            "weights that are not packed"
        )
    return _FORMATS[weight_format]


def format_of(name: str, array: Any, weight_format: Any) -> _Format | None:
    """The format that an argument names, or that the array's dtype says; None: the weights are no four bits.

    Raises
    ------
    InvalidArgument
        For a name that is none.
    DTypeMismatch
        For an array of packed numbers of which nobody says what they are.
    """
    if weight_format is None:
        if _is_float4(array):
            return _FORMATS["mxfp4"]
        dtype = _arrays.dtype_name(getattr(array, "dtype", None))
        if dtype in ("uint8", "int8", "int32"):
            raise DTypeMismatch(
                f"{name} is {dtype}; if it holds weights of four bits, say how: weight_format='mxfp4' or 'int4'"
            )
        return None
    return named(weight_format)


def require_one(form: _Format | None, other: _Format | None) -> None:
    """Refuse arrays of which only one says by its type that it is packed."""
    if form is not other:
        raise DTypeMismatch("only one of w13 and w2 is float4_e2m1fn_x2; pass both, or say weight_format='mxfp4'")


def refuse_zero(form: _Format | None, **zeros: Any) -> None:
    """Refuse zero points where the format has none, or only some of those that go together."""
    given = [name for name, zero in zeros.items() if zero is not None]
    if not given:
        return
    if form is None or not form.has_zero:
        what = "weight_format is None" if form is None else f"weight_format is {form.name!r}, which has none"
        raise InvalidArgument(f"{given[0]} is given, but {what}; zero points are of 'int4' only: leave it None")
    missing = [name for name, zero in zeros.items() if zero is None]
    if missing:
        raise MissingTensor(f"{given[0]} is given without {missing[0]}; pass both (8 where a matrix has none)")


def refuse_block(form: _Format | None, block: Any) -> None:
    if form is not None and block is not None:
        raise InvalidArgument(
            f"block is {block!r}, but weight_format is {form.name!r}, whose groups follow from the shapes of weights "
            "and scales; leave it None"
        )


def weight(name: str, array: Any, form: _Format, transposed: bool, keep: Kept) -> _abi.Tensor:
    """[n, rows, columns], of an array [n, rows, columns / 2 or / 8], or of blocks [n, rows, columns / 32, 16]."""
    tensor = keep.describe(name, array, packed=True)
    shape, strides = list(_arrays.shape_of(tensor)), list(tensor.strides[: tensor.ndim])
    per = _PER_ELEMENT.get(tensor.dtype)
    if per is None:
        raise DTypeMismatch(
            f"{name} is {_arrays.DTYPE_NAMES[tensor.dtype]}, but weight_format is {form.name!r}; pass uint8 or int8 "
            "with two weights in each byte, or int32 with eight"
        )
    if _is_float4(array) and form.dtype != _abi.F4_E2M1:
        raise DTypeMismatch(f"{name} is float4_e2m1fn_x2, but weight_format is {form.name!r}; use 'mxfp4'")
    if len(shape) == 4 and not transposed:
        shape, strides = _without_blocks(name, shape, strides, per)
    if len(shape) != 3:
        raise ShapeMismatch(
            f"{name} is {tuple(shape)}; weights of {form.name!r} are [n, rows, columns / {per}], or, not transposed, "
            f"blocks of uint8 [n, rows, columns / 32, {_BLOCK_BYTES}]"
        )
    if transposed:
        shape[1:], strides[1:] = shape[:0:-1], strides[:0:-1]
    if shape[2] > 1 and strides[2] != 1:
        raise InvalidArgument(
            f"{name} has strides {tuple(tensor.strides[: tensor.ndim])}"
            f"{' and is transposed' if transposed else ''}: a row's columns are {count_text(strides[2], 'element')} "
            "apart, but neighbours share an element; pass rows that are contiguous, packed along the columns that are "
            "summed over"
        )
    if shape[1] > 1 and strides[1] < 0:
        raise InvalidArgument(
            f"{name} has strides {tuple(tensor.strides[: tensor.ndim])}, with its rows in reverse; pass a copy with "
            "rows in their order"
        )
    shape[2] *= per
    strides[:2] = (stride * per for stride in strides[:2])
    strides[2] = 1
    if shape[2] % form.groups[0]:
        raise ShapeMismatch(
            f"{name} is {_arrays.shape_of(tensor)}, which is {count_text(shape[2], 'column')}: no multiple of the "
            f"{form.groups[0]} that share a scale in {form.name!r}; pad weights, scales and tokens with zeros"
        )
    tensor.dtype = form.dtype
    return _arrays.view(tensor, shape=tuple(shape), strides=tuple(strides))


def _without_blocks(
    name: str, shape: list[int], strides: list[int], per: int
) -> tuple[list[int], list[int]]:
    if per != 2 or shape[3] != _BLOCK_BYTES:
        raise ShapeMismatch(
            f"{name} is {tuple(shape)}; blocks are of uint8, [n, rows, columns / 32, {_BLOCK_BYTES}]"
        )
    if 0 not in shape and (strides[3] != 1 or (shape[2] > 1 and strides[2] != _BLOCK_BYTES)):
        raise InvalidArgument(f"{name} has strides {tuple(strides)}; a row's blocks must be contiguous, pass a copy")
    return [*shape[:2], shape[2] * _BLOCK_BYTES], [*strides[:2], 1]


def put_scale(name: str, scale: Any, matrices: _abi.Matrices, form: _Format, keep: Kept) -> None:
    """Scales [n, rows, columns / group] of weights that are described already."""
    of = name.removesuffix("_scale")
    if scale is None:
        raise MissingTensor(f"{of} is of {form.name!r}; pass {name}, too")
    tensor = keep.describe(name, scale)
    if tensor.dtype not in form.scales:
        hint = ""
        if form.dtype == _abi.F4_E2M1:
            hint = "; numbers that are powers of two become such by .to(torch.float8_e8m0fnu)"
        raise DTypeMismatch(
            f"{name} is {_arrays.DTYPE_NAMES[tensor.dtype]}, but weight_format is {form.name!r}, whose scales are "
            f"{' or '.join(form.scales.values())}{hint}"
        )
    count, rows, cols = _arrays.shape_of(matrices.weight)
    given = _arrays.shape_of(tensor)
    fitting = [group for group in form.groups if cols % group == 0 and given == (count, rows, cols // group)]
    if not fitting:
        takes = " or ".join(str((count, rows, cols // group)) for group in form.groups if cols % group == 0)
        raise ShapeMismatch(
            f"{name} is {given}; weights of {rows} x {cols} in {form.name!r}, with a scale for "
            f"{' or '.join(map(str, form.groups))} columns of a row, take {takes}"
        )
    _require_rows(name, tensor)
    if form.dtype == _abi.F4_E2M1:
        tensor.dtype = _abi.F8_E8M0
    matrices.scale = tensor
    matrices.scale_rows, matrices.scale_cols = 1, fitting[0]


def _require_rows(name: str, tensor: _abi.Tensor) -> None:
    """Rows that are contiguous, and one behind the other."""
    if tensor.shape[2] > 1 and tensor.strides[2] != 1:
        raise InvalidArgument(
            f"{name} has strides {tuple(tensor.strides[:3])}, and is read where it is; pass one with contiguous rows"
        )
    if tensor.shape[1] > 1 and 0 not in tensor.shape[:3] and tensor.strides[1] < tensor.shape[2]:
        raise InvalidArgument(
            f"{name} has strides {tuple(tensor.strides[:3])}: its rows are {tensor.strides[1]} apart, and each has "
            f"{tensor.shape[2]} numbers; pass a contiguous copy"
        )


def zero(name: str, array: Any, scale: _abi.Tensor, keep: Kept) -> _abi.Tensor:
    """Zero points, one beside each scale."""
    tensor = keep.describe(name, array)
    if tensor.dtype != _abi.U8:
        raise DTypeMismatch(
            f"{name} is {_arrays.DTYPE_NAMES[tensor.dtype]}; pass uint8 with one zero point in each byte, unpacked"
        )
    given, wanted = _arrays.shape_of(tensor), _arrays.shape_of(scale)
    if given != wanted:
        raise ShapeMismatch(f"{name} is {given}; the scales are {wanted}, and each has one zero point")
    _require_rows(name, tensor)
    if given[1] > 1 and tensor.strides[1] != scale.strides[1]:
        raise InvalidArgument(
            f"{name} has a row stride of {tensor.strides[1]}, and the scales one of {scale.strides[1]}; pass both "
            "contiguous"
        )
    return tensor
