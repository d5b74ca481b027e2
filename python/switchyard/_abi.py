"""The library as ctypes sees it: include/switchyard/c.h, struct by struct."""

from __future__ import annotations

import ctypes
import operator
import os
import pathlib
from typing import Any, NoReturn
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)

from ._missing import explain

ABI_VERSION = 2

NONE, F32, F16, BF16, F8_E4M3, I32, I64, U8, F8_E8M0 = range(9)
DTYPE_NAMES = ["none", "f32", "f16", "bf16", "f8_e4m3", "i32", "i64", "u8", "f8_e8m0"]
ITEM_SIZES = [0, 4, 2, 2, 1, 4, 8, 1, 1]
CPU, CUDA = 1, 2
# The most ranks of a world.
MAX_RANKS = 64

# ----------------------------------------------------------------------------- numbers that fit

# ctypes takes integers modulo 2**32 and refuses floats in words of its own.
_INTEGERS: dict[object, tuple[int, int]] = {
    c_int32: (-(2**31), 2**31 - 1),
    c_int64: (-(2**63), 2**63 - 1),
    c_uint32: (0, 2**32 - 1),
    c_uint64: (0, 2**64 - 1),
}
# Fields whose arguments have other names in Python.
_ARGUMENTS = {
    "budget_seconds": "budget",
    "deadline_seconds": "deadline",
    "num_groups": "groups",
    "out_scale": "scale",
    "scale_cols": "block",
    "scale_rows": "block",
    "top_k_groups": "top_groups",
}


def count_text(count: int, noun: str) -> str:
    """Such as "1 token" and "12,345 tokens"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def refuse(message: str) -> NoReturn:
    from .errors import InvalidArgument

    raise InvalidArgument(message)


def integer(name: str, value: Any, low: int = -(2**63), high: int = 2**63 - 1) -> int:
    """A whole number in a range."""
    try:
        number = operator.index(value)
    except TypeError:
        refuse(f"{name} is {value!r}; use a whole number")
    if not low <= number <= high:
        refuse(f"{name} is {number}; use a whole number from {low} to {high}")
    return number


def number(name: str, value: Any) -> float:
    try:
        # A text would do, too.
        if hasattr(value, "__float__") or hasattr(value, "__index__"):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    refuse(f"{name} is {value!r}; use a number")


def is_flag(value: object) -> bool:
    """Whether a value is a bool, of Python or numpy."""
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")


def flag(name: str, value: Any) -> int:
    """1 or 0 of a truth value, which a text or a count is not."""
    if is_flag(value):
        return int(bool(value))
    refuse(f"{name} is {value!r}; use True or False")


def text(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        refuse(f"{name} is {value!r}; use a str")
    if "\0" in value:
        # C would take the part before it.
        refuse(f"the {name} has a zero byte; use printable characters")
    return value.encode("utf-8", "surrogateescape")


def path(name: str, value: Any) -> bytes:
    try:
        found = os.fsencode(value)
    except TypeError:
        refuse(f"{name} is {value!r}; use a path")
    if b"\0" in found:
        refuse(f"{name} is {value!r}, which has a zero byte; use a path")
    return found


def integers(name: str, kind: Any, values: Any) -> Any:
    """An array of C of whole numbers; of one element, which nobody reads, where there are none."""
    low, high = _INTEGERS[kind]
    try:
        found = values.tolist() if hasattr(values, "tolist") else list(values)
    except TypeError:
        refuse(f"{name} is {values!r}; use a sequence of whole numbers")
    checked = [integer(f"{name}[{i}]", value, low, high) for i, value in enumerate(found)]
    return (kind * max(len(checked), 1))(*checked)


class _Number:
    """A field of a struct that takes numbers which fit, and names the argument otherwise."""

    def __init__(self, field: Any, name: str, kind: Any) -> None:
        self._field, self._name = field, _ARGUMENTS.get(name, name)
        self._range = _INTEGERS.get(kind)

    def __get__(self, struct: Any, owner: Any = None) -> Any:
        return self._field.__get__(struct, owner)

    def __set__(self, struct: Any, value: Any) -> None:
        if self._range is None:
            value = number(self._name, value)
        else:
            value = integer(self._name, value, *self._range)
        self._field.__set__(struct, value)


class _Argument:
    """A number that a function of the library is given by value."""

    def __init__(self, name: str, kind: Any) -> None:
        self._name, self.kind = name, kind
        self._range = _INTEGERS.get(kind)

    def check(self, value: Any) -> Any:
        if self._range is None:
            return number(self._name, value)
        return integer(self._name, value, *self._range)


def _with_checks(function: Any, arguments: list[Any]) -> Any:
    """The function, with numbers that fit. An error of ctypes' own would hide which argument it is."""
    checks = [(i, a.check) for i, a in enumerate(arguments) if isinstance(a, _Argument)]
    if not checks:
        return function

    def checked(*values: Any) -> int:
        fitting = list(values)
        for i, check in checks:
            fitting[i] = check(fitting[i])
        return function(*fitting)

    return checked


class Tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("ndim", c_int32),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("shape", c_int64 * 4),
        ("strides", c_int64 * 4),
    ]


class _Sized(Structure):
    """A struct that begins with its size."""

    def __init__(self, **fields: object) -> None:
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)


class ErrorInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("code", c_int32),
        ("message", c_char_p),
        ("wait_failed", c_int32),
        ("waiter_rank", c_int32),
        ("peer_rank", c_int32),
        ("reserved", c_uint32),
        ("phase", c_char_p),
        ("epoch", c_uint64),
        ("slot", c_uint64),
        ("expected", c_uint64),
        ("observed", c_uint64),
        ("waited_seconds", c_double),
    ]


class WorldOptions(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("deadline_seconds", c_double),
        ("rendezvous", c_char_p),
        ("network_chunk_bytes", c_uint32),
        ("network_window", c_uint32),
        ("secret", c_char_p),
    ]


class WorldInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("rank", c_int32),
        ("size", c_int32),
        ("reserved", c_uint32),
        ("deadline_seconds", c_double),
        ("fabric", c_char_p),
    ]


class Activation(Structure):
    _fields_ = [
        ("kind", c_int32),
        ("gated", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
        ("up_bias", c_float),
        ("reserved", c_uint32),
    ]


class Routing(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("method", c_int32),
        ("score", c_int32),
        ("top_k_before_score", c_int32),
        ("renormalize", c_int32),
        ("renormalize_epsilon", c_float),
        ("has_correction_bias", c_int32),
        ("num_groups", c_int32),
        ("top_k_groups", c_int32),
        ("group_score", c_int32),
        ("scale", c_float),
        ("jitter_eps", c_float),
    ]


class LayerSpec(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("router_bias", c_int32),
        ("expert_bias", c_int32),
        ("shared_intermediate", c_int32),
        ("shared_sigmoid_gate", c_int32),
        ("weight_on_input", c_int32),
        ("capacity_factor", c_float),
        ("capacity_rule", c_int32),
        ("activation", Activation),
        ("routing", POINTER(Routing)),
    ]


class Matrices(Structure):
    _fields_ = [
        ("weight", Tensor),
        ("scale", Tensor),
        ("bias", Tensor),
        ("scale_rows", c_int64),
        ("scale_cols", c_int64),
    ]


class LayerWeights(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("gate", Matrices),
        ("up", Matrices),
        ("down", Matrices),
        ("router", Tensor),
        ("router_bias", Tensor),
        ("correction_bias", Tensor),
        ("hash_table", Tensor),
        ("shared_gate", Matrices),
        ("shared_up", Matrices),
        ("shared_down", Matrices),
        ("shared_sigmoid", Tensor),
        ("placement", Tensor),
    ]


class LayerOptions(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_int32),
        ("max_tokens", c_int32),
        ("num_threads", c_int32),
        ("device", c_int32),
        ("reserved_sms", c_int32),
        ("compute", c_int32),
        ("trace", c_int32),
        ("no_cooperative_launch", c_int32),
        ("bad_ids", c_int32),
        ("large_ids_are_none", c_int32),
        ("workspace_slot", c_int32),
        ("deadline_seconds", c_double),
        ("workspace", c_void_p),
        ("share_memory_with", c_void_p),
        ("recorded_steps", c_int32),
        ("pre_sum_per_host", c_int32),
        ("name", c_char_p),
        ("table_file", c_char_p),
    ]


class Forward(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("accumulate", c_int32),
        ("out_scale", c_float),
        ("reserved", c_uint32),
        ("stream", c_void_p),
        ("x", Tensor),
        ("topk_ids", Tensor),
        ("topk_weights", Tensor),
        ("out", Tensor),
        ("x_scale", Tensor),
        ("logits", Tensor),
        ("token_ids", Tensor),
        ("ids_out", Tensor),
        ("weights_out", Tensor),
    ]


class LayerInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_int32),
        ("compute", c_int32),
        ("num_threads", c_int32),
        ("workspace_bytes", c_uint64),
        ("max_tokens", c_int32),
        ("device", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("has_router", c_int32),
        ("shared_intermediate", c_int32),
        ("activation", Activation),
        ("copies", c_int32),
    ]


class Stats(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("num_experts", c_int32),
        ("tokens_per_expert", POINTER(c_int64)),
        ("epoch", c_uint64),
        ("tokens", c_int64),
        ("dropped_slots", c_int64),
        ("nan_logits", c_int64),
        ("nan_tokens", c_int64),
        ("bad_slots", c_int64),
        ("dispatch_bytes", c_uint64),
        ("combine_bytes", c_uint64),
        ("signal_bytes", c_uint64),
        ("heap_bytes_used", c_uint64),
        ("heap_bytes_reserved", c_uint64),
        ("workspace_bytes_used", c_uint64),
        ("gate_seconds", c_double),
        ("plan_seconds", c_double),
        ("total_seconds", c_double),
    ]


ALLOCATE = CFUNCTYPE(c_void_p, c_uint64, c_void_p)
RELEASE = CFUNCTYPE(None, c_void_p, c_void_p)


class WorkspaceOptions(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_int32),
        ("max_tokens", c_int32),
        ("compute", c_int32),
        ("slots", c_int32),
        ("num_threads", c_int32),
        ("device", c_int32),
        ("reserved_sms", c_int32),
        ("allocate", ALLOCATE),
        ("release", RELEASE),
        ("user", c_void_p),
        ("pre_sum_per_host", c_int32),
        ("reserved", c_uint32),
    ]


class WorkspaceInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_int32),
        ("slots", c_int32),
        ("released", c_int32),
        ("bytes", c_uint64),
    ]


class LayerHandle(c_void_p):
    """With what has to stay until the layer is gone, and the lock of the layers in the same memory."""

    kept: object = None
    lock: Any = None


class RowLayout(Structure):
    _fields_ = [
        ("kind", c_int32),
        ("reserved", c_uint32),
        ("size", c_int64),
    ]


class GroupedGemmSpec(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("has_epilogue", c_int32),
        ("epilogue", Activation),
        ("order", c_int32),
        ("reserved", c_uint32),
        ("weights", Matrices),
    ]


class GroupedGemmOptions(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_int32),
        ("max_rows", c_int32),
        ("num_threads", c_int32),
        ("device", c_int32),
        ("reserved_sms", c_int32),
        ("compute", c_int32),
        ("reserved", c_uint32),
        ("tile_rows", c_int32),
        ("stages", c_int32),
        ("paired", c_int32),
        ("band", c_int32),
        ("splits", c_int32),
        ("reserved2", c_uint32),
        ("table_file", c_char_p),
    ]


class GroupedGemmInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_int32),
        ("compute", c_int32),
        ("num_threads", c_int32),
        ("num_experts", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("output_columns", c_int32),
        ("max_rows", c_int32),
        ("copies", c_int32),
    ]


class GroupedGemmCall(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("stream", c_void_p),
        ("x_layout", RowLayout),
        ("out_layout", RowLayout),
        ("x", Tensor),
        ("ends", Tensor),
        ("out", Tensor),
        ("x_scale", Tensor),
        ("index", Tensor),
        ("out_index", Tensor),
        ("row_weights", Tensor),
        ("products", Tensor),
        ("chosen", Tensor),
    ]


class TopkCall(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("top_k", c_int32),
        ("stream", c_void_p),
        ("routing", POINTER(Routing)),
        ("logits", Tensor),
        ("correction_bias", Tensor),
        ("ids", Tensor),
        ("weights", Tensor),
    ]


class PermuteCall(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("num_experts", c_int32),
        ("stream", c_void_p),
        ("layout", RowLayout),
        ("ids", Tensor),
        ("ends", Tensor),
        ("positions", Tensor),
        ("tokens", Tensor),
        ("dropped", Tensor),
        ("workspace", Tensor),
    ]


class UnpermuteCall(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("accumulate", c_int32),
        ("stream", c_void_p),
        ("scale", c_float),
        ("reserved", c_uint32),
        ("rows", Tensor),
        ("positions", Tensor),
        ("weights", Tensor),
        ("out", Tensor),
    ]


class ExchangeSpec(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("hidden", c_int32),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("max_tokens", c_int32),
        ("dispatch", c_int32),
        ("combine", c_int32),
        ("weights", c_int32),
        ("pre_sum", c_int32),
        ("pre_sum_per_host", c_int32),
        ("layout", RowLayout),
        ("placement", Tensor),
        ("large_ids_are_none", c_int32),
    ]


class ExchangeOptions(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_int32),
        ("num_threads", c_int32),
        ("device", c_int32),
        ("max_sms", c_int32),
        ("trace", c_int32),
        ("deadline_seconds", c_double),
    ]


class ExchangeInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_int32),
        ("num_threads", c_int32),
        ("reserved", c_int32),
        ("own_begin", c_int32),
        ("own_end", c_int32),
        ("rows_needed", c_int64),
        ("layout", RowLayout),
    ]


class DispatchInput(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reuse", c_int32),
        ("stream", c_void_p),
        ("x", Tensor),
        ("x_scale", Tensor),
        ("ids", Tensor),
        ("weights", Tensor),
    ]


class DispatchOutput(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("stream", c_void_p),
        ("rows", Tensor),
        ("scales", Tensor),
        ("ends", Tensor),
        ("counts", Tensor),
        ("num_rows", Tensor),
        ("origins", Tensor),
        ("weights", Tensor),
    ]


class CombineInput(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("stream", c_void_p),
        ("rows", Tensor),
    ]


class CombineOutput(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("accumulate", c_int32),
        ("scale", c_float),
        ("reserved", c_uint32),
        ("stream", c_void_p),
        ("out", Tensor),
    ]


class ExchangeStats(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("dispatches", c_uint64),
        ("combines", c_uint64),
        ("tokens", c_int64),
        ("tokens_sent", c_int64),
        ("rows_received", c_int64),
        ("rows_returned", c_int64),
        ("dispatch_bytes", c_uint64),
        ("combine_bytes", c_uint64),
        ("signal_bytes", c_uint64),
        ("heap_bytes_reserved", c_uint64),
    ]


class HeapOptions(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_int32),
        ("device", c_int32),
        ("reserved", c_uint32),
        ("bytes", c_uint64),
        ("deadline_seconds", c_double),
    ]


class PeerMap(Structure):
    _fields_ = [
        ("rank", c_int32),
        ("size", c_int32),
        ("bytes", c_uint64),
        ("deadline_ns", c_uint64),
        ("bases", c_void_p * 64),
    ]


class HeapInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_int32),
        ("device", c_int32),
        ("reserved", c_uint32),
        ("bytes", c_uint64),
        ("bytes_reserved", c_uint64),
        ("bytes_allocated", c_uint64),
        ("most_allocated", c_uint64),
        ("largest_free", c_uint64),
        ("allocations", c_uint64),
        ("calls", c_uint64),
    ]


class TuneModel(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("unseen", c_int32),
        ("reserved", c_uint32),
    ]


class TuneConfiguration(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("token_rows", c_int32),
        ("weight_rows", c_int32),
        ("splits", c_int32),
        ("blocks", c_int32),
        ("group_m", c_int32),
        ("is_rule", c_int32),
        ("num_values", c_int32),
        ("reserved", c_uint32),
        ("value_names", POINTER(c_char_p)),
        ("values", POINTER(c_int64)),
    ]


class TuneKernel(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("num_configurations", c_int32),
        ("name", c_char_p),
        ("version", c_int64),
        ("machine", c_char_p),
        ("l2_bytes", c_uint64),
        ("num_sms", c_int32),
        ("reserved", c_uint32),
        ("configurations", POINTER(TuneConfiguration)),
    ]


class TunePlan(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("generator", c_int32),
        ("seed", c_uint64),
        ("num_models", c_int32),
        ("num_tokens", c_int32),
        ("num_betas", c_int32),
        ("num_test_tokens", c_int32),
        ("num_test_betas", c_int32),
        ("reserved", c_uint32),
        ("models", POINTER(TuneModel)),
        ("tokens", POINTER(c_int32)),
        ("betas", POINTER(c_double)),
        ("test_tokens", POINTER(c_int32)),
        ("test_betas", POINTER(c_double)),
        ("recordings_file", c_char_p),
        ("most_recorded", c_int32),
        ("reserved2", c_uint32),
    ]


TUNE_TIME = CFUNCTYPE(
    c_int32,
    c_void_p,
    c_int32,
    c_int32,
    POINTER(c_int64),
    c_int32,
    POINTER(c_double),
    POINTER(c_double),
)
TUNE_PROGRESS = CFUNCTYPE(None, c_void_p, c_uint64, c_uint64, c_double, c_double, c_int32)


class TuneOptions(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("resume", c_int32),
        ("file", c_char_p),
        ("budget_seconds", c_double),
        ("time", TUNE_TIME),
        ("progress", TUNE_PROGRESS),
        ("user", c_void_p),
        ("prune", c_double),
    ]


# Infos come from the library, and the tensors of a call are described elsewhere.
for _struct in list(globals().values()):
    if isinstance(_struct, type) and issubclass(_struct, Structure) and _struct is not Tensor:
        for _name, _kind, *_ in getattr(_struct, "_fields_", ()):
            if _kind in _INTEGERS or _kind in (c_float, c_double):
                setattr(_struct, _name, _Number(getattr(_struct, _name), _name, _kind))


def _i32(name: str) -> _Argument:
    return _Argument(name, c_int32)


def _i64(name: str) -> _Argument:
    return _Argument(name, c_int64)


def _u64(name: str) -> _Argument:
    return _Argument(name, c_uint64)


def _address(name: str) -> _Argument:
    # An address is as wide as a pointer, which ctypes would cut to size.
    return _Argument(name, c_uint64)


_HANDLE = c_void_p
_FUNCTIONS: dict[str, list[object]] = {
    "sy_last_error": [POINTER(ErrorInfo)],
    "sy_world_single": [POINTER(WorldOptions), POINTER(_HANDLE)],
    "sy_world_threads": [_i32("size"), POINTER(WorldOptions), POINTER(_HANDLE)],
    "sy_world_processes": [_i32("rank"), _i32("size"), POINTER(WorldOptions), POINTER(_HANDLE)],
    "sy_world_from_environment": [POINTER(WorldOptions), POINTER(_HANDLE)],
    "sy_world_get_info": [_HANDLE, POINTER(WorldInfo)],
    "sy_world_barrier": [_HANDLE],
    "sy_world_abort": [_HANDLE],
    "sy_world_destroy": [POINTER(_HANDLE)],
    "sy_own_experts": [
        _i32("num_experts"),
        _i32("rank"),
        _i32("size"),
        POINTER(c_int32),
        POINTER(c_int32),
    ],
    "sy_layer_create": [
        _HANDLE,
        POINTER(LayerSpec),
        POINTER(LayerWeights),
        POINTER(LayerOptions),
        POINTER(_HANDLE),
    ],
    "sy_layer_from_checkpoint": [
        _HANDLE,
        c_char_p,
        _i32("layer"),
        POINTER(LayerOptions),
        POINTER(_HANDLE),
    ],
    "sy_layer_destroy": [POINTER(_HANDLE)],
    "sy_layer_forward": [_HANDLE, c_void_p],
    "sy_layer_check": [_HANDLE],
    "sy_layer_refresh": [_HANDLE, c_void_p],
    "sy_layer_rebind": [_HANDLE, POINTER(LayerWeights)],
    "sy_layer_get_info": [_HANDLE, POINTER(LayerInfo)],
    "sy_layer_get_stats": [_HANDLE, POINTER(Stats)],
    "sy_layer_recording": [_HANDLE, c_char_p, c_void_p, POINTER(c_uint64)],
    "sy_layer_trace": [_HANDLE, c_void_p, POINTER(c_uint64)],
    "sy_workspace_create": [
        _HANDLE,
        POINTER(LayerSpec),
        c_int32,
        POINTER(WorkspaceOptions),
        POINTER(_HANDLE),
    ],
    "sy_workspace_get_info": [_HANDLE, POINTER(WorkspaceInfo)],
    "sy_workspace_release": [_HANDLE],
    "sy_workspace_restore": [_HANDLE],
    "sy_workspace_destroy": [POINTER(_HANDLE)],
    "sy_topk": [
        POINTER(Routing),
        c_int32,
        POINTER(Tensor),
        POINTER(Tensor),
        POINTER(Tensor),
        POINTER(Tensor),
        POINTER(c_int64),
    ],
    "sy_rows_needed": [POINTER(RowLayout), _i32("num_experts"), _i64("rows"), POINTER(c_int64)],
    "sy_grouped_gemm_create": [
        POINTER(GroupedGemmSpec),
        POINTER(GroupedGemmOptions),
        POINTER(_HANDLE),
    ],
    "sy_grouped_gemm_destroy": [POINTER(_HANDLE)],
    "sy_grouped_gemm_get_info": [_HANDLE, POINTER(GroupedGemmInfo)],
    "sy_grouped_gemm_refresh": [_HANDLE, c_void_p],
    "sy_grouped_gemm_run": [_HANDLE, POINTER(GroupedGemmCall)],
    "sy_permute": [
        POINTER(Tensor),
        _i32("num_experts"),
        POINTER(RowLayout),
        POINTER(Tensor),
        POINTER(Tensor),
        POINTER(Tensor),
        POINTER(c_int64),
    ],
    "sy_unpermute": [
        POINTER(Tensor),
        POINTER(Tensor),
        POINTER(Tensor),
        c_float,
        c_int32,
        POINTER(Tensor),
    ],
    "sy_topk_run": [POINTER(TopkCall)],
    "sy_permute_run": [POINTER(PermuteCall)],
    "sy_permute_workspace": [_i64("slots"), _i32("num_experts"), POINTER(c_uint64)],
    "sy_unpermute_run": [POINTER(UnpermuteCall)],
    "sy_exchange_create": [
        _HANDLE,
        POINTER(ExchangeSpec),
        POINTER(ExchangeOptions),
        POINTER(_HANDLE),
    ],
    "sy_exchange_destroy": [POINTER(_HANDLE)],
    "sy_exchange_get_info": [_HANDLE, POINTER(ExchangeInfo)],
    "sy_exchange_handle_create": [_HANDLE, POINTER(_HANDLE)],
    "sy_exchange_handle_destroy": [POINTER(_HANDLE)],
    "sy_exchange_dispatch_send": [_HANDLE, POINTER(DispatchInput), _HANDLE],
    "sy_exchange_dispatch_recv": [_HANDLE, POINTER(DispatchOutput), _HANDLE],
    "sy_exchange_dispatch": [
        _HANDLE,
        POINTER(DispatchInput),
        POINTER(DispatchOutput),
        _HANDLE,
    ],
    "sy_exchange_combine_send": [_HANDLE, POINTER(CombineInput), _HANDLE],
    "sy_exchange_combine_recv": [_HANDLE, POINTER(CombineOutput), _HANDLE],
    "sy_exchange_combine": [
        _HANDLE,
        POINTER(CombineInput),
        POINTER(CombineOutput),
        _HANDLE,
    ],
    "sy_exchange_rows_needed": [_HANDLE, _HANDLE, c_void_p, POINTER(c_int64)],
    "sy_exchange_check": [_HANDLE],
    "sy_exchange_get_stats": [_HANDLE, POINTER(ExchangeStats)],
    "sy_exchange_trace": [_HANDLE, c_void_p, POINTER(c_uint64)],
    "sy_heap_create": [_HANDLE, POINTER(HeapOptions), POINTER(_HANDLE)],
    "sy_heap_destroy": [POINTER(_HANDLE)],
    "sy_heap_allocate": [_HANDLE, _u64("size"), _u64("alignment"), POINTER(c_void_p)],
    "sy_heap_free": [_HANDLE, _address("array")],
    "sy_heap_reset": [_HANDLE],
    "sy_heap_translate": [_HANDLE, _address("array"), _i32("rank"), POINTER(c_void_p)],
    "sy_heap_get_peer_map": [_HANDLE, POINTER(PeerMap)],
    "sy_heap_signal": [_HANDLE, _address("flag"), _u64("value")],
    "sy_heap_wait": [_HANDLE, _address("flag"), _u64("value"), _i32("peer")],
    "sy_heap_barrier": [_HANDLE],
    "sy_heap_check": [_HANDLE],
    "sy_heap_get_info": [_HANDLE, POINTER(HeapInfo)],
    "sy_draw_counts": [
        c_int32,
        _i32("tokens"),
        _i32("num_experts"),
        _i32("top_k"),
        _Argument("beta", c_double),
        _u64("seed"),
        POINTER(c_int64),
    ],
    "sy_tune_measure": [
        POINTER(TuneKernel),
        POINTER(TunePlan),
        POINTER(TuneOptions),
        POINTER(c_int32),
    ],
    "sy_tune_fit": [c_char_p, c_int32, c_int32, c_char_p],
    "sy_tune_evaluate": [c_char_p, c_int32, c_int32, c_void_p, POINTER(c_uint64)],
    "sy_tuner_open": [POINTER(TuneKernel), c_char_p, POINTER(_HANDLE)],
    "sy_tuner_select": [
        _HANDLE,
        c_char_p,
        POINTER(c_int64),
        c_int32,
        POINTER(c_int32),
        POINTER(c_double),
    ],
    "sy_tuner_destroy": [POINTER(_HANDLE)],
}


def _path() -> pathlib.Path:
    """The library beside this file, or where SWITCHYARD_LIBRARY says: a build that is worked on."""
    named = os.environ.get("SWITCHYARD_LIBRARY")
    if named:
        return pathlib.Path(named)
    return pathlib.Path(__file__).parent / "lib" / "libswitchyard_c.so"


def _load() -> ctypes.CDLL:
    path = _path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(explain(str(path), str(error))) from error
    try:
        found = library.sy_abi_version()
        missing = [name for name in _FUNCTIONS if not hasattr(library, name)]
    except AttributeError:
        raise ImportError(
            f"{path} has no function sy_abi_version: it is no library of Switchyard's; leave SWITCHYARD_LIBRARY "
            "unset, or let it name a libswitchyard_c.so"
        ) from None
    if found != ABI_VERSION or missing:
        what = f"lacks {missing[0]}" if found == ABI_VERSION else f"has version {found} of the C interface"
        raise ImportError(
            f"{path} {what}, and this package needs version {ABI_VERSION} with all its functions: library and "
            "package come from different versions. Install the package anew, or build what SWITCHYARD_LIBRARY names "
            "anew if it is set."
        )
    library.sy_version.restype = c_char_p
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes = [a.kind if isinstance(a, _Argument) else a for a in arguments]
        function.restype = c_int32
        setattr(library, name, _with_checks(function, arguments))
    return library


library = _load()


def version() -> str:
    return library.sy_version().decode()


def has_cuda() -> bool:
    return bool(library.sy_has_cuda())


def last_error() -> ErrorInfo:
    error = ErrorInfo()
    library.sy_last_error(ctypes.byref(error))
    return error
