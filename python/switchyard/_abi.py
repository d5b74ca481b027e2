"""The C interface as ctypes sees it. scripts/abi.py makes this file from include/switchyard/c.h."""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p,
    sizeof,
)
from typing import Any


class Sized(Structure):
    """A struct that begins with its size."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=sizeof(type(self)), **fields)


ABI_VERSION = 2
OK = 0
INVALID_ARGUMENT = 1
INVALID_CONFIG = 2
INVALID_FILE = 3
MISSING_TENSOR = 4
SHAPE_MISMATCH = 5
DTYPE_MISMATCH = 6
UNSUPPORTED = 7
CAPACITY_EXCEEDED = 8
SPEC_MISMATCH = 9
TIMEOUT = 10
ABORTED = 11
SYSTEM = 12
OUT_OF_MEMORY = 13
INTERNAL = 14
INTERRUPTED = 15
DTYPE_NONE = 0
F32 = 1
F16 = 2
BF16 = 3
F8_E4M3 = 4
I32 = 5
I64 = 6
U8 = 7
F8_E8M0 = 8
F4_E2M1 = 9
U4 = 10
CPU = 1
CUDA = 2
MAX_DIMS = 4
SILU = 0
GELU = 1
GELU_TANH = 2
RELU = 3
RELU2 = 4
IDENTITY = 5
SITU = 6
TOP_K = 0
SPARSE_MIXER = 1
HASH = 2
SOFTMAX = 0
SIGMOID = 1
SQRT_SOFTPLUS = 2
GROUP_MAX = 0
GROUP_SUM_TOP_TWO = 1
CAPACITY_OF_SLOTS = 0
CAPACITY_OF_TOKENS = 1
BAD_IDS_RAISE = 0
BAD_IDS_SKIP = 1
ROWS_PACKED = 0
ROWS_BLOCKED = 1
ROWS_PADDED = 2
GATE_UP = 0
UP_GATE = 1
INTERLEAVED = 2
BY_RULE = 0
YES = 1
NO = 2
WEIGHTS_BY_RECEIVER = 0
WEIGHTS_BY_SENDER = 1
WEIGHTS_NONE = 2
MAX_PEERS = 64
DISTINCT = 0
REPEATED = 1
FORM_TASKS = 0
FORM_WAVES = 1
FORM_ROUNDED_WAVES = 2
FORM_FULL = 3
FORM_ROUNDED_FULL = 4
FORM_EXPERTS = 5


class Error(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("code", c_int32), ("message", c_char_p), ("wait_failed", c_int32),
        ("waiter_rank", c_int32), ("peer_rank", c_int32), ("reserved", c_uint32), ("phase", c_char_p),
        ("epoch", c_uint64), ("slot", c_uint64), ("expected", c_uint64), ("observed", c_uint64),
        ("waited_seconds", c_double),
    ]


InterruptCheck = CFUNCTYPE(c_int32)


PythonEnsure = CFUNCTYPE(c_int32)


PythonRelease = CFUNCTYPE(None, c_int32)


PythonCheckSignals = CFUNCTYPE(c_int32)


PythonFetch = CFUNCTYPE(None, POINTER(c_void_p), POINTER(c_void_p), POINTER(c_void_p))


PythonRestore = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p)


class Python(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("reserved", c_uint32), ("ensure", PythonEnsure), ("release", PythonRelease),
        ("check_signals", PythonCheckSignals), ("fetch", PythonFetch), ("restore", PythonRestore),
    ]


class Tensor(Structure):
    _fields_ = [
        ("data", c_void_p), ("dtype", c_int32), ("ndim", c_int32), ("device_type", c_int32), ("device_id", c_int32),
        ("shape", c_int64 * 4), ("strides", c_int64 * 4),
    ]


class WorldOptions(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("reserved", c_uint32), ("deadline_seconds", c_double), ("rendezvous", c_char_p),
        ("network_chunk_bytes", c_uint32), ("network_window", c_uint32), ("secret", c_char_p),
    ]


class WorldInfo(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("rank", c_int32), ("size", c_int32), ("reserved", c_uint32),
        ("deadline_seconds", c_double), ("fabric", c_char_p),
    ]


class Activation(Structure):
    _fields_ = [
        ("kind", c_int32), ("gated", c_int32), ("alpha", c_float), ("limit", c_float), ("up_bias", c_float),
        ("reserved", c_uint32),
    ]


class Routing(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("method", c_int32), ("score", c_int32), ("top_k_before_score", c_int32),
        ("renormalize", c_int32), ("renormalize_epsilon", c_float), ("has_correction_bias", c_int32),
        ("num_groups", c_int32), ("top_k_groups", c_int32), ("group_score", c_int32), ("scale", c_float),
        ("jitter_eps", c_float),
    ]


class LayerSpec(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("hidden", c_int32), ("intermediate", c_int32), ("num_experts", c_int32),
        ("top_k", c_int32), ("router_bias", c_int32), ("expert_bias", c_int32), ("shared_intermediate", c_int32),
        ("shared_sigmoid_gate", c_int32), ("weight_on_input", c_int32), ("capacity_factor", c_float),
        ("capacity_rule", c_int32), ("activation", Activation), ("routing", POINTER(Routing)),
    ]


class Matrices(Structure):
    _fields_ = [
        ("weight", Tensor), ("scale", Tensor), ("bias", Tensor), ("scale_rows", c_int64), ("scale_cols", c_int64),
    ]


class LayerWeights(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("reserved", c_uint32), ("gate", Matrices), ("up", Matrices), ("down", Matrices),
        ("router", Tensor), ("router_bias", Tensor), ("correction_bias", Tensor), ("hash_table", Tensor),
        ("shared_gate", Matrices), ("shared_up", Matrices), ("shared_down", Matrices), ("shared_sigmoid", Tensor),
        ("placement", Tensor), ("gate_zero", Tensor), ("up_zero", Tensor), ("down_zero", Tensor),
    ]


class LayerOptions(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("backend", c_int32), ("max_tokens", c_int32), ("num_threads", c_int32),
        ("device", c_int32), ("reserved_sms", c_int32), ("compute", c_int32), ("trace", c_int32),
        ("no_cooperative_launch", c_int32), ("bad_ids", c_int32), ("large_ids_are_none", c_int32),
        ("workspace_slot", c_int32), ("deadline_seconds", c_double), ("workspace", c_void_p),
        ("share_memory_with", c_void_p), ("recorded_steps", c_int32), ("pre_sum_per_host", c_int32),
        ("name", c_char_p), ("table_file", c_char_p),
    ]


class Forward(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("accumulate", c_int32), ("out_scale", c_float),
        ("max_tokens_per_rank", c_int32), ("stream", c_void_p), ("x", Tensor), ("topk_ids", Tensor),
        ("topk_weights", Tensor), ("out", Tensor), ("x_scale", Tensor), ("logits", Tensor), ("token_ids", Tensor),
        ("ids_out", Tensor), ("weights_out", Tensor),
    ]


class LayerInfo(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("backend", c_int32), ("compute", c_int32), ("num_threads", c_int32),
        ("workspace_bytes", c_uint64), ("max_tokens", c_int32), ("device", c_int32), ("hidden", c_int32),
        ("intermediate", c_int32), ("num_experts", c_int32), ("top_k", c_int32), ("has_router", c_int32),
        ("shared_intermediate", c_int32), ("activation", Activation), ("copies", c_int32),
    ]


class Stats(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("num_experts", c_int32), ("tokens_per_expert", POINTER(c_int64)),
        ("epoch", c_uint64), ("tokens", c_int64), ("dropped_slots", c_int64), ("nan_logits", c_int64),
        ("nan_tokens", c_int64), ("bad_slots", c_int64), ("dispatch_bytes", c_uint64), ("combine_bytes", c_uint64),
        ("signal_bytes", c_uint64), ("heap_bytes_used", c_uint64), ("heap_bytes_reserved", c_uint64),
        ("workspace_bytes_used", c_uint64), ("gate_seconds", c_double), ("plan_seconds", c_double),
        ("total_seconds", c_double),
    ]


WorkspaceOptionsAllocate = CFUNCTYPE(c_void_p, c_uint64, c_void_p)


WorkspaceOptionsRelease = CFUNCTYPE(None, c_void_p, c_void_p)


class WorkspaceOptions(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("backend", c_int32), ("max_tokens", c_int32), ("compute", c_int32),
        ("slots", c_int32), ("num_threads", c_int32), ("device", c_int32), ("reserved_sms", c_int32),
        ("allocate", WorkspaceOptionsAllocate), ("release", WorkspaceOptionsRelease), ("user", c_void_p),
        ("pre_sum_per_host", c_int32), ("weights", c_int32),
    ]


class WorkspaceInfo(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("backend", c_int32), ("slots", c_int32), ("released", c_int32),
        ("bytes", c_uint64),
    ]


class TopkCall(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("top_k", c_int32), ("stream", c_void_p), ("routing", POINTER(Routing)),
        ("logits", Tensor), ("correction_bias", Tensor), ("ids", Tensor), ("weights", Tensor),
    ]


class RowLayout(Structure):
    _fields_ = [
        ("kind", c_int32), ("reserved", c_uint32), ("size", c_int64),
    ]


class GroupedGemmSpec(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("has_epilogue", c_int32), ("epilogue", Activation), ("order", c_int32),
        ("reserved", c_uint32), ("weights", Matrices), ("zero", Tensor),
    ]


class GroupedGemmOptions(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("backend", c_int32), ("max_rows", c_int32), ("num_threads", c_int32),
        ("device", c_int32), ("reserved_sms", c_int32), ("compute", c_int32), ("reserved", c_uint32),
        ("tile_rows", c_int32), ("stages", c_int32), ("paired", c_int32), ("band", c_int32), ("splits", c_int32),
        ("reserved2", c_uint32), ("table_file", c_char_p),
    ]


class GroupedGemmInfo(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("backend", c_int32), ("compute", c_int32), ("num_threads", c_int32),
        ("num_experts", c_int32), ("n", c_int32), ("k", c_int32), ("output_columns", c_int32),
        ("max_rows", c_int32), ("copies", c_int32),
    ]


class GroupedGemmCall(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("reserved", c_uint32), ("stream", c_void_p), ("x_layout", RowLayout),
        ("out_layout", RowLayout), ("x", Tensor), ("ends", Tensor), ("out", Tensor), ("x_scale", Tensor),
        ("index", Tensor), ("out_index", Tensor), ("row_weights", Tensor), ("products", Tensor), ("chosen", Tensor),
    ]


class PermuteCall(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("num_experts", c_int32), ("stream", c_void_p), ("layout", RowLayout),
        ("ids", Tensor), ("ends", Tensor), ("positions", Tensor), ("tokens", Tensor), ("dropped", Tensor),
        ("workspace", Tensor),
    ]


class UnpermuteCall(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("accumulate", c_int32), ("stream", c_void_p), ("scale", c_float),
        ("reserved", c_uint32), ("rows", Tensor), ("positions", Tensor), ("weights", Tensor), ("out", Tensor),
    ]


class ExchangeSpec(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("hidden", c_int32), ("num_experts", c_int32), ("top_k", c_int32),
        ("max_tokens", c_int32), ("dispatch", c_int32), ("combine", c_int32), ("weights", c_int32),
        ("pre_sum", c_int32), ("pre_sum_per_host", c_int32), ("layout", RowLayout), ("placement", Tensor),
        ("large_ids_are_none", c_int32),
    ]


class ExchangeOptions(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("backend", c_int32), ("num_threads", c_int32), ("device", c_int32),
        ("max_sms", c_int32), ("trace", c_int32), ("deadline_seconds", c_double),
    ]


class ExchangeInfo(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("backend", c_int32), ("num_threads", c_int32), ("reserved", c_int32),
        ("own_begin", c_int32), ("own_end", c_int32), ("rows_needed", c_int64), ("layout", RowLayout),
    ]


class DispatchInput(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("reuse", c_int32), ("stream", c_void_p), ("x", Tensor), ("x_scale", Tensor),
        ("ids", Tensor), ("weights", Tensor),
    ]


class DispatchOutput(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("reserved", c_uint32), ("stream", c_void_p), ("rows", Tensor),
        ("scales", Tensor), ("ends", Tensor), ("counts", Tensor), ("num_rows", Tensor), ("origins", Tensor),
        ("weights", Tensor),
    ]


class CombineInput(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("reserved", c_uint32), ("stream", c_void_p), ("rows", Tensor),
    ]


class CombineOutput(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("accumulate", c_int32), ("scale", c_float), ("reserved", c_uint32),
        ("stream", c_void_p), ("out", Tensor),
    ]


class ExchangeStats(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("reserved", c_uint32), ("dispatches", c_uint64), ("combines", c_uint64),
        ("tokens", c_int64), ("tokens_sent", c_int64), ("rows_received", c_int64), ("rows_returned", c_int64),
        ("dispatch_bytes", c_uint64), ("combine_bytes", c_uint64), ("signal_bytes", c_uint64),
        ("heap_bytes_reserved", c_uint64),
    ]


class HeapOptions(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("backend", c_int32), ("device", c_int32), ("reserved", c_uint32),
        ("bytes", c_uint64), ("deadline_seconds", c_double),
    ]


class PeerMap(Structure):
    _fields_ = [
        ("rank", c_int32), ("size", c_int32), ("bytes", c_uint64), ("deadline_ns", c_uint64),
        ("bases", c_void_p * 64),
    ]


class HeapInfo(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("backend", c_int32), ("device", c_int32), ("reserved", c_uint32),
        ("bytes", c_uint64), ("bytes_reserved", c_uint64), ("bytes_allocated", c_uint64),
        ("most_allocated", c_uint64), ("largest_free", c_uint64), ("allocations", c_uint64), ("calls", c_uint64),
    ]


class TuneModel(Structure):
    _fields_ = [
        ("name", c_char_p), ("num_experts", c_int32), ("top_k", c_int32), ("n", c_int32), ("k", c_int32),
        ("unseen", c_int32), ("reserved", c_uint32),
    ]


class TuneConfiguration(Structure):
    _fields_ = [
        ("name", c_char_p), ("token_rows", c_int32), ("weight_rows", c_int32), ("splits", c_int32),
        ("blocks", c_int32), ("group_m", c_int32), ("is_rule", c_int32), ("num_values", c_int32),
        ("reserved", c_uint32), ("value_names", POINTER(c_char_p)), ("values", POINTER(c_int64)),
    ]


class TuneKernel(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("num_configurations", c_int32), ("name", c_char_p), ("version", c_int64),
        ("machine", c_char_p), ("l2_bytes", c_uint64), ("num_sms", c_int32), ("reserved", c_uint32),
        ("configurations", POINTER(TuneConfiguration)),
    ]


class TunePlan(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("generator", c_int32), ("seed", c_uint64), ("num_models", c_int32),
        ("num_tokens", c_int32), ("num_betas", c_int32), ("num_test_tokens", c_int32), ("num_test_betas", c_int32),
        ("reserved", c_uint32), ("models", POINTER(TuneModel)), ("tokens", POINTER(c_int32)),
        ("betas", POINTER(c_double)), ("test_tokens", POINTER(c_int32)), ("test_betas", POINTER(c_double)),
        ("recordings_file", c_char_p), ("most_recorded", c_int32), ("reserved2", c_uint32),
    ]


TuneTime = CFUNCTYPE(c_int32, c_void_p, c_int32, c_int32, POINTER(c_int64), c_int32, POINTER(c_double), POINTER(c_double))


TuneProgress = CFUNCTYPE(None, c_void_p, c_uint64, c_uint64, c_double, c_double, c_int32)


class TuneOptions(Sized):
    _fields_ = [
        ("struct_size", c_uint32), ("resume", c_int32), ("file", c_char_p), ("budget_seconds", c_double),
        ("time", TuneTime), ("progress", TuneProgress), ("user", c_void_p), ("prune", c_double),
    ]


# Each function has the type of its result, and its parameters by name.
FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sy_abi_version": (c_uint32, {}),
    "sy_version": (c_char_p, {}),
    "sy_has_cuda": (c_int32, {}),
    "sy_status_name": (c_char_p, {"status": c_int32}),
    "sy_last_error": (c_int32, {"out": POINTER(Error)}),
    "sy_set_interrupt_check": (c_int32, {"check": InterruptCheck, "thread": c_uint64}),
    "sy_watch_python_signals": (c_int32, {"python": POINTER(Python), "main_thread": c_uint64}),
    "sy_raise_in_python": (c_int32, {}),
    "sy_world_single": (c_int32, {"options": POINTER(WorldOptions), "out": POINTER(c_void_p)}),
    "sy_world_threads": (c_int32, {"size": c_int32, "options": POINTER(WorldOptions), "out": POINTER(c_void_p)}),
    "sy_world_processes": (c_int32, {"rank": c_int32, "size": c_int32, "options": POINTER(WorldOptions), "out":
        POINTER(c_void_p)}),
    "sy_world_from_environment": (c_int32, {"options": POINTER(WorldOptions), "out": POINTER(c_void_p)}),
    "sy_world_get_info": (c_int32, {"world": c_void_p, "out": POINTER(WorldInfo)}),
    "sy_world_barrier": (c_int32, {"world": c_void_p}),
    "sy_world_abort": (c_int32, {"world": c_void_p}),
    "sy_world_destroy": (c_int32, {"world": POINTER(c_void_p)}),
    "sy_own_experts": (c_int32, {"num_experts": c_int32, "rank": c_int32, "num_ranks": c_int32, "begin":
        POINTER(c_int32), "end": POINTER(c_int32)}),
    "sy_layer_create": (c_int32, {"world": c_void_p, "spec": POINTER(LayerSpec), "weights": POINTER(LayerWeights),
        "options": POINTER(LayerOptions), "out": POINTER(c_void_p)}),
    "sy_layer_from_checkpoint": (c_int32, {"world": c_void_p, "directory": c_char_p, "layer_index": c_int32,
        "options": POINTER(LayerOptions), "out": POINTER(c_void_p)}),
    "sy_layer_destroy": (c_int32, {"layer": POINTER(c_void_p)}),
    "sy_layer_forward": (c_int32, {"layer": c_void_p, "call": POINTER(Forward)}),
    "sy_layer_check": (c_int32, {"layer": c_void_p}),
    "sy_layer_refresh": (c_int32, {"layer": c_void_p, "stream": c_void_p}),
    "sy_layer_rebind": (c_int32, {"layer": c_void_p, "weights": POINTER(LayerWeights)}),
    "sy_layer_get_info": (c_int32, {"layer": c_void_p, "out": POINTER(LayerInfo)}),
    "sy_layer_get_stats": (c_int32, {"layer": c_void_p, "out": POINTER(Stats)}),
    "sy_layer_trace": (c_int32, {"layer": c_void_p, "text": c_char_p, "size": POINTER(c_uint64)}),
    "sy_layer_recording": (c_int32, {"layer": c_void_p, "machine": c_char_p, "text": c_char_p, "size":
        POINTER(c_uint64)}),
    "sy_workspace_create": (c_int32, {"world": c_void_p, "specs": POINTER(LayerSpec), "num_specs": c_int32,
        "options": POINTER(WorkspaceOptions), "out": POINTER(c_void_p)}),
    "sy_workspace_get_info": (c_int32, {"workspace": c_void_p, "out": POINTER(WorkspaceInfo)}),
    "sy_workspace_release": (c_int32, {"workspace": c_void_p}),
    "sy_workspace_restore": (c_int32, {"workspace": c_void_p}),
    "sy_workspace_destroy": (c_int32, {"workspace": POINTER(c_void_p)}),
    "sy_topk": (c_int32, {"routing": POINTER(Routing), "top_k": c_int32, "logits": POINTER(Tensor),
        "correction_bias": POINTER(Tensor), "ids": POINTER(Tensor), "weights": POINTER(Tensor), "nan_logits":
        POINTER(c_int64)}),
    "sy_topk_run": (c_int32, {"call": POINTER(TopkCall)}),
    "sy_rows_needed": (c_int32, {"layout": POINTER(RowLayout), "num_experts": c_int32, "rows": c_int64, "out":
        POINTER(c_int64)}),
    "sy_grouped_gemm_create": (c_int32, {"spec": POINTER(GroupedGemmSpec), "options": POINTER(GroupedGemmOptions),
        "out": POINTER(c_void_p)}),
    "sy_grouped_gemm_destroy": (c_int32, {"gemm": POINTER(c_void_p)}),
    "sy_grouped_gemm_get_info": (c_int32, {"gemm": c_void_p, "out": POINTER(GroupedGemmInfo)}),
    "sy_grouped_gemm_run": (c_int32, {"gemm": c_void_p, "call": POINTER(GroupedGemmCall)}),
    "sy_grouped_gemm_refresh": (c_int32, {"gemm": c_void_p, "stream": c_void_p}),
    "sy_permute": (c_int32, {"ids": POINTER(Tensor), "num_experts": c_int32, "layout": POINTER(RowLayout), "ends":
        POINTER(Tensor), "positions": POINTER(Tensor), "tokens": POINTER(Tensor), "rows": POINTER(c_int64)}),
    "sy_unpermute": (c_int32, {"rows": POINTER(Tensor), "positions": POINTER(Tensor), "weights": POINTER(Tensor),
        "scale": c_float, "accumulate": c_int32, "out": POINTER(Tensor)}),
    "sy_permute_run": (c_int32, {"call": POINTER(PermuteCall)}),
    "sy_permute_workspace": (c_int32, {"slots": c_int64, "num_experts": c_int32, "bytes": POINTER(c_uint64)}),
    "sy_unpermute_run": (c_int32, {"call": POINTER(UnpermuteCall)}),
    "sy_exchange_create": (c_int32, {"world": c_void_p, "spec": POINTER(ExchangeSpec), "options":
        POINTER(ExchangeOptions), "out": POINTER(c_void_p)}),
    "sy_exchange_destroy": (c_int32, {"exchange": POINTER(c_void_p)}),
    "sy_exchange_get_info": (c_int32, {"exchange": c_void_p, "out": POINTER(ExchangeInfo)}),
    "sy_exchange_handle_create": (c_int32, {"exchange": c_void_p, "out": POINTER(c_void_p)}),
    "sy_exchange_handle_destroy": (c_int32, {"handle": POINTER(c_void_p)}),
    "sy_exchange_dispatch_send": (c_int32, {"exchange": c_void_p, "input": POINTER(DispatchInput), "handle":
        c_void_p}),
    "sy_exchange_dispatch_recv": (c_int32, {"exchange": c_void_p, "output": POINTER(DispatchOutput), "handle":
        c_void_p}),
    "sy_exchange_dispatch": (c_int32, {"exchange": c_void_p, "input": POINTER(DispatchInput), "output":
        POINTER(DispatchOutput), "handle": c_void_p}),
    "sy_exchange_combine_send": (c_int32, {"exchange": c_void_p, "input": POINTER(CombineInput), "handle":
        c_void_p}),
    "sy_exchange_combine_recv": (c_int32, {"exchange": c_void_p, "output": POINTER(CombineOutput), "handle":
        c_void_p}),
    "sy_exchange_combine": (c_int32, {"exchange": c_void_p, "input": POINTER(CombineInput), "output":
        POINTER(CombineOutput), "handle": c_void_p}),
    "sy_exchange_rows_needed": (c_int32, {"exchange": c_void_p, "handle": c_void_p, "stream": c_void_p, "out":
        POINTER(c_int64)}),
    "sy_exchange_check": (c_int32, {"exchange": c_void_p}),
    "sy_exchange_get_stats": (c_int32, {"exchange": c_void_p, "out": POINTER(ExchangeStats)}),
    "sy_exchange_trace": (c_int32, {"exchange": c_void_p, "text": c_char_p, "size": POINTER(c_uint64)}),
    "sy_heap_create": (c_int32, {"world": c_void_p, "options": POINTER(HeapOptions), "out": POINTER(c_void_p)}),
    "sy_heap_destroy": (c_int32, {"heap": POINTER(c_void_p)}),
    "sy_heap_allocate": (c_int32, {"heap": c_void_p, "bytes": c_uint64, "alignment": c_uint64, "out":
        POINTER(c_void_p)}),
    "sy_heap_free": (c_int32, {"heap": c_void_p, "pointer": c_void_p}),
    "sy_heap_reset": (c_int32, {"heap": c_void_p}),
    "sy_heap_translate": (c_int32, {"heap": c_void_p, "pointer": c_void_p, "rank": c_int32, "out":
        POINTER(c_void_p)}),
    "sy_heap_get_peer_map": (c_int32, {"heap": c_void_p, "out": POINTER(PeerMap)}),
    "sy_heap_signal": (c_int32, {"heap": c_void_p, "flag": POINTER(c_uint64), "value": c_uint64}),
    "sy_heap_wait": (c_int32, {"heap": c_void_p, "flag": POINTER(c_uint64), "value": c_uint64, "peer": c_int32}),
    "sy_heap_barrier": (c_int32, {"heap": c_void_p}),
    "sy_heap_check": (c_int32, {"heap": c_void_p}),
    "sy_heap_get_info": (c_int32, {"heap": c_void_p, "out": POINTER(HeapInfo)}),
    "sy_draw_counts": (c_int32, {"generator": c_int32, "tokens": c_int32, "num_experts": c_int32, "top_k": c_int32,
        "beta": c_double, "seed": c_uint64, "counts": POINTER(c_int64)}),
    "sy_tune_measure": (c_int32, {"kernel": POINTER(TuneKernel), "plan": POINTER(TunePlan), "options":
        POINTER(TuneOptions), "complete": POINTER(c_int32)}),
    "sy_tune_fit": (c_int32, {"profile_file": c_char_p, "form": c_int32, "relative": c_int32, "fit_file":
        c_char_p}),
    "sy_tune_evaluate": (c_int32, {"profile_file": c_char_p, "form": c_int32, "relative": c_int32, "text": c_char_p,
        "size": POINTER(c_uint64)}),
    "sy_tuner_open": (c_int32, {"kernel": POINTER(TuneKernel), "fit_file": c_char_p, "out": POINTER(c_void_p)}),
    "sy_tuner_select": (c_int32, {"tuner": c_void_p, "model": c_char_p, "counts": POINTER(c_int64), "num_experts":
        c_int32, "configuration": POINTER(c_int32), "predicted_us": POINTER(c_double)}),
    "sy_tuner_destroy": (c_int32, {"tuner": POINTER(c_void_p)}),
}
