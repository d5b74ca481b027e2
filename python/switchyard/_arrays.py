"""Arrays of torch, numpy and everything that speaks DLPack, as descriptors of the C interface.

None of them is imported here: an array says by its type where it comes from.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from . import _abi
from .errors import DTypeMismatch, InvalidArgument, ShapeMismatch

_NAMES = {
    "float32": _abi.F32,
    "float16": _abi.F16,
    "bfloat16": _abi.BF16,
    "float8_e4m3fn": _abi.F8_E4M3,
    "int32": _abi.I32,
    "int64": _abi.I64,
    "uint8": _abi.U8,
    "float8_e8m0fnu": _abi.F8_E8M0,
}
_SHORT = {name: i for i, name in enumerate(_abi.DTYPE_NAMES)} | {
    "fp32": _abi.F32,
    "fp16": _abi.F16,
    "fp8": _abi.F8_E4M3,
}
# dtype -> number; torch's dtypes are put here as they come.
DTYPES: dict[Any, int] = {}


def dtype_name(dtype: Any) -> str:
    """The name of a dtype of torch or numpy, or of a scalar type of numpy; other names as they are."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(dtype, type) and issubclass(dtype, numpy.generic):
        dtype = numpy.dtype(dtype)
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def dtype_code(dtype: Any, of: str = "") -> int:
    """The number of a dtype of torch or numpy, or of a name: "bf16", "bfloat16", "fp8".

    `of`: what has it, for the error.
    """
    code = DTYPES.get(dtype)
    if code is not None:
        return code
    name = dtype_name(dtype)
    code = _NAMES.get(name, _SHORT.get(name))
    if code is None or code == _abi.NONE:
        known = ", ".join(_NAMES)
        what = f"{of} has dtype {dtype}, which" if of else f"dtype {dtype!r}"
        raise DTypeMismatch(
            f"{what} is not known to Switchyard; rows and weights are float32, float16, bfloat16 or "
            f"float8_e4m3fn, and ids int32 or int64 (all that it knows: {known})"
        )
    try:
        DTYPES[dtype] = code
    except TypeError:
        pass
    return code


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def is_numpy(array: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(array, numpy.ndarray)


def current_stream(x: Any) -> int | None:
    """The stream of torch that work on x's device goes to; of other arrays the default stream."""
    if not is_torch(x) or x.device.type != "cuda":
        return None
    torch = sys.modules["torch"]
    return torch._C._cuda_getCurrentRawStream(x.get_device())


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


# DLPack's numbers: https://dmlc.github.io/dlpack/latest/c_api.html
_DL_DTYPES = {
    (2, 32): _abi.F32,
    (2, 16): _abi.F16,
    (4, 16): _abi.BF16,
    (10, 8): _abi.F8_E4M3,
    (14, 8): _abi.F8_E8M0,
    (0, 32): _abi.I32,
    (0, 64): _abi.I64,
    (1, 8): _abi.U8,
}
# CPU, CUDA, pinned host memory and managed memory.
_DL_DEVICES = {1: _abi.CPU, 2: _abi.CUDA, 3: _abi.CPU, 13: _abi.CUDA}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _make(
    name: str,
    data: int,
    dtype: int,
    device: tuple[int, int],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> _abi.Tensor:
    if not 1 <= len(shape) <= 4:
        raise ShapeMismatch(f"{name} has {len(shape)} dimensions; Switchyard takes 1 to 4")
    tensor = _abi.Tensor(data, dtype, len(shape), *device)
    tensor.shape[: len(shape)] = shape
    tensor.strides[: len(shape)] = strides
    return tensor


def describe(name: str, array: Any) -> tuple[_abi.Tensor, Any]:
    """A descriptor of an array's memory, and what must be kept while it is used."""
    if is_torch(array):
        device = array.device
        if device.type not in ("cpu", "cuda"):
            raise InvalidArgument(f"{name} is on {device}; Switchyard takes cpu and cuda")
        kind = (_abi.CUDA, device.index or 0) if device.type == "cuda" else (_abi.CPU, 0)
        dtype = dtype_code(array.dtype, name)
        return _make(name, array.data_ptr(), dtype, kind, array.shape, array.stride()), array
    if is_numpy(array):
        dtype = dtype_code(array.dtype, name)
        size = _abi.ITEM_SIZES[dtype]
        if any(stride % size for stride in array.strides):
            raise InvalidArgument(f"{name} has strides that are no multiples of its elements")
        strides = tuple(stride // size for stride in array.strides)
        return _make(name, array.ctypes.data, dtype, (_abi.CPU, 0), array.shape, strides), array
    if hasattr(array, "__dlpack__"):
        # The capsule is not consumed: it frees its tensor when it goes.
        capsule = array.__dlpack__()
        address = _capsule_pointer(capsule, b"dltensor")
        dl = _DLTensor.from_address(address)
        dl_dtype = _DL_DTYPES.get((dl.code, dl.bits)) if dl.lanes == 1 else None
        device_type = _DL_DEVICES.get(dl.device_type)
        if dl_dtype is None or device_type is None:
            raise DTypeMismatch(
                f"{name} has DLPack type ({dl.code}, {dl.bits}, {dl.lanes}) on device "
                f"{dl.device_type}; Switchyard takes {', '.join(_NAMES)} on CPU and CUDA"
            )
        shape = tuple(dl.shape[i] for i in range(dl.ndim))
        if dl.strides:
            strides = tuple(dl.strides[i] for i in range(dl.ndim))
        else:
            strides = contiguous_strides(shape)
        device_id = dl.device_id if device_type == _abi.CUDA else 0
        data = (dl.data or 0) + dl.byte_offset
        return _make(name, data, dl_dtype, (device_type, device_id), shape, strides), (array, capsule)
    raise InvalidArgument(
        f"{name} is a {type(array).__name__}; pass a tensor of torch, an array of numpy, or another "
        "that has __dlpack__"
    )


def require_same_device(name: str, tensor: _abi.Tensor, other_name: str, other: _abi.Tensor) -> None:
    places = [(t.device_type, t.device_id) for t in (tensor, other)]
    if places[0] != places[1]:
        words = ["in host memory" if kind == _abi.CPU else f"on GPU {number}" for kind, number in places]
        raise InvalidArgument(
            f"{name} is {words[0]}, and {other_name} is {words[1]}; move it to the same place"
        )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= length
    return tuple(reversed(strides))


def shape_of(tensor: _abi.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape[: tensor.ndim])


def view(
    tensor: _abi.Tensor, *, offset: int = 0, shape: tuple[int, ...], strides: tuple[int, ...]
) -> _abi.Tensor:
    """Part of a tensor; `offset` in elements."""
    address = (tensor.data or 0) + offset * _abi.ITEM_SIZES[tensor.dtype]
    device = (tensor.device_type, tensor.device_id)
    return _make("a view", address, tensor.dtype, device, shape, strides)


def transpose(tensor: _abi.Tensor) -> _abi.Tensor:
    """The last two dimensions swapped."""
    shape, strides = list(shape_of(tensor)), list(tensor.strides[: tensor.ndim])
    shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
    return view(tensor, shape=tuple(shape), strides=tuple(strides))


def rows(tensor: _abi.Tensor, first: int, count: int, step: int = 1) -> _abi.Tensor:
    """Every step-th of the second dimension, `count` in all."""
    shape, strides = list(shape_of(tensor)), list(tensor.strides[: tensor.ndim])
    offset = first * strides[1]
    shape[1] = count
    strides[1] *= step
    return view(tensor, offset=offset, shape=tuple(shape), strides=tuple(strides))


def empty_like(array: Any, name: str, *, bf16: bool = False) -> Any:
    """A new array of the kind, device and shape of another, contiguous; of its type, or bf16."""
    if is_torch(array):
        import torch

        dtype = torch.bfloat16 if bf16 else array.dtype
        return torch.empty(array.shape, dtype=dtype, device=array.device)
    if is_numpy(array) and not bf16:
        import numpy

        return numpy.empty(array.shape, dtype=array.dtype)
    raise InvalidArgument(
        f"{name} is a {type(array).__name__}, of which Switchyard cannot make another; pass out"
    )
