"""Arrays of torch, numpy and everything that speaks DLPack, as descriptors of the C interface.

None of them is imported here: an array says by its type where it comes from.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from . import _abi
from ._values import count_text
from .errors import DTypeMismatch, InvalidArgument, MissingTensor, ShapeMismatch, Unsupported

# Outputs are of the kind of the inputs: checkers of types then know that a layer of tensors gives tensors.
Array = TypeVar("Array")

# Keys are the numbers of dtypes.
DTYPE_NAMES = ["none", "f32", "f16", "bf16", "f8_e4m3", "i32", "i64", "u8", "f8_e8m0", "f4_e2m1", "u4"]
# Bytes; of four-bit types 0, since two share one: see `_bytes`.
ITEM_SIZES = [0, 4, 2, 2, 1, 4, 8, 1, 1, 0, 0]
_NAMES = {
    "float32": _abi.F32, "float16": _abi.F16, "bfloat16": _abi.BF16, "float8_e4m3fn": _abi.F8_E4M3,
    "int32": _abi.I32, "int64": _abi.I64, "uint8": _abi.U8, "float8_e8m0fnu": _abi.F8_E8M0,
}
# Arrays that hold packed weights of four bits have these dtypes, too: their bytes are read.
_PACKED = {"int8": _abi.U8, "float4_e2m1fn_x2": _abi.U8}
_SHORT = {name: i for i, name in enumerate(DTYPE_NAMES)} | {
    "fp32": _abi.F32, "fp16": _abi.F16, "fp8": _abi.F8_E4M3,
}
# Layers compute in one of these.
COMPUTE = ("bf16", "f32", "f8_e4m3")
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
    try:
        code = DTYPES.get(dtype)
    except TypeError:
        code = None
    if code is not None:
        return code
    if getattr(dtype, "isnative", True) is False:
        # Its name is the same as in this machine's byte order.
        raise DTypeMismatch(
            f"{of or 'dtype'} has dtype {dtype.str!r}, of another byte order than this machine's; pass "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    name = dtype_name(dtype)
    code = _NAMES.get(name, _SHORT.get(name))
    if code is None or code == _abi.DTYPE_NONE:
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


def chosen_dtype(name: str, dtype: Any, may_be: tuple[str, ...], *, optional: bool = True) -> int:
    """The number of a dtype that an argument chooses; none for None, where that may be.

    Parameters
    ----------
    may_be : tuple of str
        The short names of the dtypes that the argument may choose.

    Raises
    ------
    InvalidArgument
        For others, naming the argument.
    """
    if dtype is None and optional:
        return _abi.DTYPE_NONE
    try:
        code = dtype_code(dtype)
    except DTypeMismatch:
        code = _abi.DTYPE_NONE
    if code == _abi.DTYPE_NONE or DTYPE_NAMES[code] not in may_be:
        *most, last = [*(["None"] if optional else []), *map(repr, may_be)]
        raise InvalidArgument(f"{name} is {dtype!r}; pass {', '.join(most)} or {last}")
    return code


def _code_of(dtype: Any, name: str, packed: bool) -> int:
    found = _PACKED.get(dtype_name(dtype)) if packed else None
    return dtype_code(dtype, name) if found is None else found


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


class _DLVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


# DLPack's numbers: https://dmlc.github.io/dlpack/latest/c_api.html
_DL_READ_ONLY, _DL_IS_COPY = 1, 2
_DL_DTYPES = {
    (2, 32): _abi.F32, (2, 16): _abi.F16, (4, 16): _abi.BF16, (10, 8): _abi.F8_E4M3,
    (14, 8): _abi.F8_E8M0, (0, 32): _abi.I32, (0, 64): _abi.I64, (1, 8): _abi.U8,
}
# CPU, CUDA, pinned host memory and managed memory.
_DL_DEVICES = {1: _abi.CPU, 2: _abi.CUDA, 3: _abi.CPU, 13: _abi.CUDA}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype = ctypes.c_char_p
_capsule_name.argtypes = [ctypes.py_object]


def _make(
    name: str,
    data: int,
    dtype: int,
    device: tuple[int, int],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> _abi.Tensor:
    if not 1 <= len(shape) <= 4:
        raise ShapeMismatch(f"{name} has {count_text(len(shape), 'dimension')}; Switchyard takes 1 to 4")
    if 0 in shape:
        # Nothing is there, so no stride means anything; numpy has strides of 0.
        strides = contiguous_strides(shape)
    elif ITEM_SIZES[dtype] and data % ITEM_SIZES[dtype]:
        raise InvalidArgument(
            f"{name} begins at an address that is no multiple of its elements' "
            f"{count_text(ITEM_SIZES[dtype], 'byte')}; pass an aligned copy"
        )
    tensor = _abi.Tensor(data, dtype, len(shape), *device)
    tensor.shape[: len(shape)] = shape
    tensor.strides[: len(shape)] = strides
    return tensor


def describe(
    name: str, array: Any, *, write: bool = False, packed: bool = False
) -> tuple[_abi.Tensor, Any]:
    """A descriptor of an array's memory, and what must be kept while it is used.

    All functions describe their arrays by this one.

    Parameters
    ----------
    name : str
        The argument's, for errors.
    write : bool
        Whether the library writes to it.
    packed : bool
        Whether its elements may be bytes that hold several numbers each: int8 is uint8 then.

    Raises
    ------
    InvalidArgument, ShapeMismatch, DTypeMismatch
        For what is no array, and for memory that cannot be used as it is: read-only where it is
        written, of another byte order, not aligned, not dense.
    """
    if is_torch(array):
        return _describe_torch(name, array, write, packed)
    if is_numpy(array):
        return _describe_numpy(name, array, write, packed)
    if hasattr(array, "__dlpack__"):
        return _describe_dlpack(name, array, write, packed)
    raise InvalidArgument(
        f"{name} is a {type(array).__name__}; pass a tensor of torch, an array of numpy, or another "
        "that has __dlpack__"
    )


def _describe_torch(name: str, array: Any, write: bool, packed: bool) -> tuple[_abi.Tensor, Any]:
    device = array.device
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"{name} is on {device}; Switchyard takes cpu and cuda")
    torch = sys.modules["torch"]
    refuse_nested(name, array)
    if array.layout is not torch.strided:
        raise InvalidArgument(f"{name} is {array.layout}, not dense; pass a dense copy")
    if array.is_neg() or array.is_conj():
        raise InvalidArgument(f"{name} is a negated view; pass {name}.resolve_neg()")
    refuse_untracked(name, array, write)
    dtype = _code_of(array.dtype, name, packed)
    try:
        data = array.data_ptr()
    except RuntimeError as error:
        raise InvalidArgument(
            f"{name} is a {type(array).__name__}, which has no memory of its own ({error}); pass a plain "
            "tensor"
        ) from error
    kind = (_abi.CUDA, device.index or 0) if device.type == "cuda" else (_abi.CPU, 0)
    return _make(name, data, dtype, kind, array.shape, array.stride()), array


def refuse_nested(name: str, array: Any) -> None:
    """Raise `InvalidArgument` for a nested tensor of torch, before its shape is read, which it may not have."""
    if is_torch(array) and array.is_nested:
        raise InvalidArgument(f"{name} is a nested tensor, whose rows may differ in length; pass a dense one")


def refuse_backward() -> NoReturn:
    """Raise `Unsupported`: a gradient is asked for."""
    raise Unsupported(
        "Switchyard has no backward pass yet, but a gradient of its experts is asked for; run under "
        "torch.no_grad() or torch.inference_mode(), detach its output, or train with another "
        "implementation of the experts"
    )


def refuse_gradient(*arrays: Any) -> None:
    """Raise `Unsupported` if a gradient of one of the arrays could be asked for."""
    if any(is_torch(array) and array.requires_grad for array in arrays) and sys.modules["torch"].is_grad_enabled():
        refuse_backward()


def is_transforming() -> Callable[[], bool]:
    """What tells whether a transform of torch.func or torch.vmap is under way, cheaply. torch is imported."""
    torch = sys.modules["torch"]
    active: Callable[[], bool] | None = getattr(torch._C, "_are_functorch_transforms_active", None)
    return active or (lambda: torch._C._functorch.maybe_current_level() is not None)


def refuse_transformed(name: str, array: Any) -> None:
    """Raise `Unsupported` for a tensor of torch.func or torch.vmap, which stands for others."""
    if not is_torch(array):
        return
    torch = sys.modules["torch"]
    if is_transforming()() and torch._C._functorch.is_functorch_wrapped_tensor(array):
        raise Unsupported(
            f"{name} is a tensor of a transform (torch.vmap, torch.func.grad, jvp), which the library does not see "
            "through; call it outside of the transform, with all tokens in one tensor"
        )


def refuse_untracked(name: str, array: Any, write: bool = False) -> None:
    """Refuse a tensor where torch follows what happens to it, which the library would not tell.

    Raises
    ------
    Unsupported
        If it is written and its gradient may be asked for, if it carries a tangent of forward-mode differentiation, if
        it is a tensor of a transform, or while torch.jit traces.
    """
    torch = sys.modules["torch"]
    if write and array.requires_grad and torch.is_grad_enabled():
        raise Unsupported(
            f"{name} requires a gradient, which would be wrong after it was written; pass {name}.detach(), or call "
            "under torch.no_grad()"
        )
    refuse_transformed(name, array)
    forward_ad = torch.autograd.forward_ad
    if getattr(forward_ad, "_current_level", -1) >= 0 and forward_ad.unpack_dual(array).tangent is not None:
        raise Unsupported(
            f"{name} has a tangent of torch.autograd.forward_ad, which the library would drop; pass its primal, or use "
            "another implementation"
        )
    if torch.jit.is_tracing():
        raise Unsupported(f"torch.jit traces, and would not see what happens to {name}; use torch.compile")


def _describe_numpy(name: str, array: Any, write: bool, packed: bool) -> tuple[_abi.Tensor, Any]:
    numpy = sys.modules["numpy"]
    if isinstance(array, numpy.ma.MaskedArray):
        raise InvalidArgument(f"{name} is masked, and masks are not read; pass {name}.filled(...)")
    if write and not array.flags.writeable:
        raise InvalidArgument(f"{name} is read-only, and would be written; pass a writeable array")
    dtype = _code_of(array.dtype, name, packed)
    size = ITEM_SIZES[dtype]
    if any(stride % size for stride in array.strides):
        raise InvalidArgument(
            f"{name} has strides that are no multiples of its elements; pass a contiguous copy"
        )
    strides = tuple(stride // size for stride in array.strides)
    data = array.__array_interface__["data"][0]
    return _make(name, data, dtype, (_abi.CPU, 0), array.shape, strides), array


def _capsule_of(name: str, array: Any) -> Any:
    # The capsule is not consumed: it frees its tensor when it goes.
    try:
        try:
            capsule = array.__dlpack__(max_version=(1, 0))
        except TypeError:  # older than versions
            capsule = array.__dlpack__()
        _capsule_name(capsule)  # ValueError for what is none
        return capsule
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{name} is a {type(array).__name__} whose __dlpack__ refuses: {error}; pass a plain array"
        ) from error


def _describe_dlpack(name: str, array: Any, write: bool, packed: bool) -> tuple[_abi.Tensor, Any]:
    capsule = _capsule_of(name, array)
    flags = 0
    if _capsule_name(capsule) == b"dltensor_versioned":
        versioned = _DLVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise InvalidArgument(
                f"{name} speaks DLPack {versioned.major}.{versioned.minor}; Switchyard knows version 1"
            )
        flags, dl = versioned.flags, versioned.tensor
    else:
        dl = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    if write and flags & (_DL_READ_ONLY | _DL_IS_COPY):
        raise InvalidArgument(
            f"{name} is a {type(array).__name__} that cannot be written in place; pass a writeable array"
        )
    kind = (dl.code, dl.bits)
    if packed and kind == (0, 8):
        kind = (1, 8)
    dtype = _DL_DTYPES.get(kind) if dl.lanes == 1 else None
    device_type = _DL_DEVICES.get(dl.device_type)
    if dtype is None or device_type is None:
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
    return _make(name, data, dtype, (device_type, device_id), shape, strides), (array, capsule)


def wrote(*arrays: Any) -> None:
    """Tell torch that tensors of the caller's were written, so that a gradient that needs what was
    there before fails, and whoever watches their version counters sees it."""
    tensors = tuple(array for array in arrays if is_torch(array))
    if tensors:
        sys.modules["torch"].autograd.graph.increment_version(tensors)


def version_of(array: Any) -> int | None:
    """The counter of in-place changes, of which inference tensors and other arrays have none."""
    return array._version if is_torch(array) and not array.is_inference() else None


def shown(array: Any) -> str:
    """An array's type, shape and device: "bfloat16 [8, 64] on cuda:0". Reads none of its elements, which may be
    gone with the memory that they were in."""
    if array is None:
        return "None"
    try:
        dtype = str(array.dtype).rpartition(".")[2]
        device = str(getattr(array, "device", "cpu"))
        return f"{dtype} {list(array.shape)}" + ("" if device == "cpu" else f" on {device}")
    except Exception:
        return type(array).__name__


class Kept:
    """The arrays that an object of the library reads at each call.

    It keeps their memory, sees when an array has other memory by now, and sees when an array changed of
    which the library may have laid out a copy.
    """

    def __init__(self) -> None:
        self._memory: list[Any] = []
        self._copies: list[Any] = []
        # Tensors, their addresses and names. The memory of other arrays stays where it is.
        self.places: list[tuple[Any, int, str]] = []
        # Tensors and their version counters.
        self._versions: list[tuple[Any, int]] = []
        # Whether an array has none, so that nobody sees its changes.
        self._uncounted = False
        # (from, to, how many times each row)
        self._repeated: list[tuple[Any, Any, int]] = []

    def describe(
        self, name: str, array: Any, *, copied: bool = False, packed: bool = False
    ) -> _abi.Tensor:
        """As `describe`. copied: whether the library may lay out a copy."""
        tensor, kept = describe(name, array, packed=packed)
        if is_torch(array):
            # The memory itself: the tensor may get another by `array.data = ...`.
            self._memory.append(array.untyped_storage())
            self.places.append((array, array.data_ptr(), name))
        else:
            (self._copies if copied else self._memory).append(kept)
        if copied:
            version = version_of(array)
            if version is None:
                self._uncounted = True
            else:
                self._versions.append((array, version))
        return tensor

    def repeat(self, name: str, scale: Any, times: int, rows: int) -> _abi.Tensor:
        """A copy of scales [n, R, C] with each row `times` times, of which there are `rows`."""
        copy = _repeat_rows(scale, times, rows)
        self._repeated.append((scale, copy, times))
        self._copies.append(copy)
        return describe(name, copy)[0]

    def keep(self, other: Any) -> None:
        self._memory.append(other)

    def forget_arrays(self) -> None:
        """Keep no tensor of the caller's and no matrix, for a cache that sees when they change or go."""
        self._memory = []
        self.places = []
        self._versions = []
        if not self._uncounted:
            self._repeated = []

    @property
    def tensors(self) -> list[Any]:
        """Those of torch."""
        return [tensor for tensor, _, _ in self.places]

    @property
    def repeats(self) -> bool:
        """Whether scales were repeated here."""
        return bool(self._repeated)

    @property
    def watched(self) -> bool:
        """Whether copies could become outdated."""
        return self._uncounted or bool(self._versions)

    def changed(self) -> bool:
        """Whether copies may be outdated; they are taken as laid out anew then."""
        found = self._uncounted
        for i, (tensor, version) in enumerate(self._versions):
            now = tensor._version
            if now != version:
                self._versions[i] = (tensor, now)
                found = True
        return found

    def refresh(self) -> None:
        for given, copy, times in self._repeated:
            copy[...] = _repeat_rows(given, times, copy.shape[1])

    def refuse_moved(self, noun: str, remedy: str) -> NoReturn:
        """Name the array that has other memory by now."""
        for tensor, address, name in self.places:
            if tensor.data_ptr() != address:
                raise InvalidArgument(
                    f"{name} has other memory than when the {noun} was made: it was moved, cast or "
                    f"replaced; {remedy}"
                )
        raise AssertionError("no array moved")


def _repeat_rows(scale: Any, times: int, rows: int) -> Any:
    if is_numpy(scale):
        return scale.repeat(times, axis=1)[:, :rows]
    return scale.detach().repeat_interleave(times, dim=1)[:, :rows]


def shape(name: str, array: Any, ndim: int) -> tuple[int, ...]:
    """The shape of an array of so many dimensions."""
    refuse_nested(name, array)
    found = array.shape if is_torch(array) or is_numpy(array) else shape_of(describe(name, array)[0])
    if len(found) != ndim:
        raise ShapeMismatch(f"{name} is {list(found)}; it needs {ndim} dimensions")
    return tuple(found)


def require_same_device(name: str, tensor: _abi.Tensor, other_name: str, other: _abi.Tensor) -> None:
    places = [(t.device_type, t.device_id) for t in (tensor, other)]
    if places[0] != places[1]:
        words = ["in host memory" if kind == _abi.CPU else f"on GPU {number}" for kind, number in places]
        raise InvalidArgument(
            f"{name} is {words[0]}, and {other_name} is {words[1]}; move it to the same place"
        )


def require_x_scale(x: _abi.Tensor) -> None:
    """Refuse FP8 activations without scales, or else the type of an output like x would be blamed."""
    if x.dtype == _abi.F8_E4M3:
        raise MissingTensor(
            f"x is float8_e4m3fn; pass x_scale, too: [{x.shape[0]}, {-(-x.shape[1] // 128)}] in float32, a scale for "
            "every 128 columns of a row"
        )


def require_contiguous(name: str, tensor: _abi.Tensor) -> None:
    shape = shape_of(tensor)
    steps = zip(shape, tensor.strides, contiguous_strides(shape))
    if any(length > 1 and stride != wanted for length, stride, wanted in steps):
        raise InvalidArgument(
            f"{name} {list(shape)} has strides that are not those of a contiguous array; pass a contiguous "
            "copy"
        )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= length
    return tuple(reversed(strides))


def shape_of(tensor: _abi.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape[: tensor.ndim])


def _bytes(dtype: int, elements: int) -> int:
    return elements // 2 if dtype in (_abi.F4_E2M1, _abi.U4) else elements * ITEM_SIZES[dtype]


def view(
    tensor: _abi.Tensor, *, offset: int = 0, shape: tuple[int, ...], strides: tuple[int, ...]
) -> _abi.Tensor:
    """Part of a tensor; `offset` in elements."""
    address = (tensor.data or 0) + _bytes(tensor.dtype, offset)
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


def empty(like: Any, name: str, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """A new array of the kind and device of another, contiguous, of its dtype or of a named one. Of arrays
    in host memory that only speak DLPack it is one of numpy."""
    if is_torch(like):
        import torch

        kind = like.dtype if dtype is None else getattr(torch, dtype)
        return torch.empty(shape, dtype=kind, device=like.device)
    described = describe(name, like)[0]
    if dtype is None:
        dtype = next(long for long, code in _NAMES.items() if code == described.dtype)
    if described.device_type == _abi.CPU and dtype in ("float32", "float16", "int32", "int64", "uint8"):
        import numpy

        return numpy.empty(shape, dtype=dtype)
    raise InvalidArgument(
        f"{name} is a {type(like).__name__}, and Switchyard cannot make an array of {dtype} beside it; pass "
        "out, or a tensor of torch"
    )
