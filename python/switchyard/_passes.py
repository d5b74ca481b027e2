"""A layer of the library and its passes: what `Experts` and `MoeLayer` have in common."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from ctypes import byref
from typing import Any, NoReturn

from . import _abi, _arrays, _values
from ._activation import Activation
from ._arrays import Array, Kept
from ._handle import Reader, read_json
from ._library import check, library, raise_last
from ._values import count_text
from ._workspace import LayerHandle
from .errors import DTypeMismatch, InvalidArgument, ShapeMismatch, Unsupported

_forward = library.sy_layer_forward
# Names of torch that every call asks for; _use_torch() looks them up once the first tensor comes.
_torch: Any = None
_Tensor: Any = None
_is_compiling: Any = None
_is_dynamo_compiling: Any = None
_is_tracing: Any = None
_is_grad_enabled: Any = None
_empty_like: Any = None
_raw_stream: Any = None
_increment_version: Any = None
_forward_ad: Any = None
_is_transforming: Any = None


def _use_torch() -> None:
    global _torch, _Tensor, _is_compiling, _is_dynamo_compiling, _is_grad_enabled, _empty_like, _raw_stream
    global _increment_version, _is_tracing, _forward_ad, _is_transforming
    if _torch is not None:
        return
    import torch

    _Tensor = torch.Tensor
    _is_compiling = torch.compiler.is_compiling
    _is_dynamo_compiling = torch.compiler.is_dynamo_compiling
    # torch.jit.is_tracing() without asking first whether code is scripted.
    _is_tracing = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)
    _is_grad_enabled = torch.is_grad_enabled
    _empty_like = torch.empty_like
    # torch.autograd.graph.increment_version() without its checks of types.
    _increment_version = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)
    _forward_ad = torch.autograd.forward_ad
    _is_transforming = _arrays.is_transforming()
    # Not in builds without CUDA, which have no tensors on GPUs either.
    _raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    from . import _torch as operators

    _torch = operators


def _are_plain(x: Any, topk_ids: Any, topk_weights: Any, out: Any) -> bool:
    """Whether the memory of tensors is all that torch knows of them: no view that is negated, no tangent, no level of
    torch.func. Ways that pass addresses without a description ask first; descriptions say what is wrong. Only complex
    tensors are conjugated, and none is taken."""
    return not (
        x.is_neg()
        or topk_ids.is_neg()
        or topk_weights.is_neg()
        or out.is_neg()
        or _forward_ad._current_level >= 0
        or _is_transforming()
    )


@dataclasses.dataclass(frozen=True)
class Stats:
    """Of the last pass; zeros before the first.

    Attributes
    ----------
    epoch : int
        The number of the pass, from 1 on.
    tokens : int
        Tokens of this rank.
    tokens_per_expert : tuple of int
        [E], over all ranks.
    dropped_slots, nan_logits, nan_tokens, bad_slots : int
        Counts of this rank.
    dispatch_bytes, combine_bytes, signal_bytes : int
        Written into other ranks' memory.
    heap_bytes_used, heap_bytes_reserved, workspace_bytes_used : int
        Memory of this rank.
    gate_seconds, plan_seconds, total_seconds : float
        From the start of the pass. Zeros on GPUs for passes of graphs.
    """

    epoch: int
    tokens: int
    tokens_per_expert: tuple[int, ...]
    dropped_slots: int
    nan_logits: int
    nan_tokens: int
    bad_slots: int
    dispatch_bytes: int
    combine_bytes: int
    signal_bytes: int
    heap_bytes_used: int
    heap_bytes_reserved: int
    workspace_bytes_used: int
    gate_seconds: float
    plan_seconds: float
    total_seconds: float


class Handle(Reader):
    """A layer of the library: what `Experts` and `MoeLayer` have in common."""

    _noun = "layer"
    _remedy = "rebind() the layer, or make another"
    _lay_out = staticmethod(library.sy_layer_refresh)

    def __init__(self, handle: LayerHandle, keep: Kept | None) -> None:
        super().__init__(handle, library.sy_layer_destroy, lock=handle.lock)
        self._call = _abi.Forward(out_scale=1.0)
        self._call_address = ctypes.addressof(self._call)
        # Whether _call is in use: a signal's handler may make a call in the midst of one.
        self._in_call = False
        self._seen: Any = None
        self._fast: Any = None
        info = _abi.LayerInfo()
        check(library.sy_layer_get_info(handle, byref(info)))
        self.hidden: int = info.hidden
        self.intermediate: int = info.intermediate
        self.num_experts: int = info.num_experts
        self.top_k: int = info.top_k
        self.max_tokens: int = info.max_tokens
        self.activation = Activation._from_c(info.activation)
        self.compute: str = _arrays.DTYPE_NAMES[info.compute]
        self.backend: str = "cuda" if info.backend == _abi.CUDA else "cpu"
        self.device: int | None = info.device if info.device >= 0 else None
        self.workspace_bytes: int = info.workspace_bytes
        self._has_router = bool(info.has_router)
        self._copies = bool(info.copies)
        self._set_keep(keep or Kept())
        # By whoever makes it: the rank of its world, and what its weights are stored in.
        self._place = (0, 1)
        self._stored: str | None = None
        # These weights can be asked for a gradient.
        self._parameters: Iterable[Any] = keep.tensors if keep else ()
        if self._parameters:
            _use_torch()

    def _shown(self) -> str:
        stored = "" if self._stored is None else f"weights {self._stored}, "
        activation = self.activation.kind + (", gated" if self.activation.gated else "")
        return (
            f"H {self.hidden}, I {self.intermediate}, {count_text(self.num_experts, 'expert')}, top-{self.top_k}, "
            f"{activation}, up to {count_text(self.max_tokens, 'token')}; {stored}computing in {self.compute} on "
            f"{self.backend if self.device is None or self.backend == 'cpu' else f'cuda:{self.device}'}, "
            f"rank {self._place[0]} of {self._place[1]}"
        )

    def close(self) -> None:
        """Give memory and threads back, after the pass under way. May be called again."""
        with self._lock:
            super().close()
            self._seen = self._fast = None

    def _inherit(self) -> None:
        super()._inherit()
        self._seen = self._fast = None

    def check(self) -> None:
        """Raise what a pass that has ended failed with. On GPUs it waits for nothing.

        Call it when you replay graphs instead of calling the layer.

        Raises
        ------
        Timeout, Aborted, InvalidArgument
        """
        with self._lock:
            check(library.sy_layer_check(self._open()))

    def stats(self) -> Stats:
        """Of the last pass. On GPUs it waits for the device."""
        counts = (ctypes.c_int64 * self.num_experts)()
        stats = _abi.Stats(
            num_experts=self.num_experts,
            tokens_per_expert=ctypes.cast(counts, ctypes.POINTER(ctypes.c_int64)),
        )
        with self._lock:
            check(library.sy_layer_get_stats(self._open(), byref(stats)))
        values = {field.name: getattr(stats, field.name) for field in dataclasses.fields(Stats)}
        return Stats(**values | {"tokens_per_expert": tuple(counts)})

    def trace(self) -> dict[str, Any]:
        """What this rank did in the last pass, in the Trace Event Format, for ui.perfetto.dev.

        Raises
        ------
        InvalidArgument
            Unless the layer was made with ``Diagnostics(trace=True)``.
        """
        with self._lock:
            return read_json(library.sy_layer_trace, self._open())

    def recording(self) -> dict[str, Any]:
        """What the last passes routed, of all ranks' tokens; for ``tuner.write_recordings``.

        Returns
        -------
        dict
            `layer`, `rank`, `ranks`, `experts`, `top_k`, `n`, `k`; `overwritten`, the number of steps
            that are not there any more; and `steps`, the oldest first, of `step`, `epoch`, `tokens`
            (of this rank) and `counts` (the rows of each expert).

        Raises
        ------
        InvalidArgument
            Unless the layer was made with ``Diagnostics(recorded_steps=...)`` of 1 or more.
        """
        with self._lock:
            return read_json(library.sy_layer_recording, self._open(), None)["layers"][0]

    # ------------------------------------------------------------------------------- one pass

    def _run(
        self,
        x: Any,
        topk_ids: Any,
        topk_weights: Any,
        out: Any,
        x_scale: Any = None,
        accumulate: bool = False,
        scale: float = 1.0,
        **more: Any,
    ) -> None:
        """One pass of arrays of any kind."""
        with self._lock:
            if self._in_call:
                call = _abi.Forward(out_scale=1.0)
                self._run_with(call, x, topk_ids, topk_weights, out, x_scale, accumulate, scale, more)
                return
            self._in_call = True
            try:
                self._seen = self._fast = None
                self._run_with(
                    self._call, x, topk_ids, topk_weights, out, x_scale, accumulate, scale, more
                )
            finally:
                self._in_call = False

    def _run_with(
        self,
        call: _abi.Forward,
        x: Any,
        topk_ids: Any,
        topk_weights: Any,
        out: Any,
        x_scale: Any,
        accumulate: bool,
        scale: float,
        more: dict[str, Any],
    ) -> None:
        keep = []

        def put(name: str, array: Any, write: bool = False) -> None:
            if array is None:
                getattr(call, name).ndim = 0
                return
            tensor, kept = _arrays.describe(name, array, write=write)
            setattr(call, name, tensor)
            keep.append(kept)

        self._open()
        self._see_changes(x)
        put("x", x)
        self._require_columns(_arrays.shape_of(call.x))
        if x_scale is not None:
            self._require_scales(call.x)
        else:
            _arrays.require_x_scale(call.x)
        put("topk_ids", topk_ids)
        put("topk_weights", topk_weights)
        put("out", out, True)
        put("x_scale", x_scale)
        for name in ("logits", "token_ids"):
            put(name, more.get(name))
        for name in ("ids_out", "weights_out"):
            put(name, more.get(name), True)
        call.accumulate = _values.flag("accumulate", accumulate)
        call.out_scale = scale
        call.max_tokens_per_rank = _values.integer(
            "max_tokens_per_rank", more.get("max_tokens_per_rank", 0), 0, 2**31 - 1
        )
        call.stream = self._stream(x)
        if _forward(self._handle, ctypes.addressof(call)):
            raise_last()
        _arrays.wrote(out, more.get("ids_out"), more.get("weights_out"))
        del keep

    def _require_columns(self, shape: Sequence[int]) -> None:
        """Or else an `out` that was made like x would be blamed."""
        if len(shape) != 2 or shape[1] != self.hidden:
            raise ShapeMismatch(f"x is {list(shape)}; the layer takes [T, {self.hidden}]")

    def _refuse_no_routing(self, topk_ids: Any) -> NoReturn:
        name, what = ("topk_ids", "the experts") if topk_ids is None else ("topk_weights", "the weights")
        raise InvalidArgument(
            f"{name} is None; pass {what} of each token, [T, {self.top_k}], or logits to from_logits() of a layer that "
            "was made with routing"
        )

    def _require_scales(self, x: _abi.Tensor) -> None:
        if x.dtype != _abi.F8_E4M3:
            raise DTypeMismatch(
                f"x_scale is given, but x is {_arrays.DTYPE_NAMES[x.dtype]}, which has no scales; leave it None"
            )

    def _run_tensors(
        self, x: Any, topk_ids: Any, topk_weights: Any, out: Any, max_tokens_per_rank: int
    ) -> None:
        """As _run(), for tensors of torch and the plainest of calls, which servers make at each
        layer of each step. Tensors are described once, until they look different; then only addresses
        are passed.
        """
        try:
            seen = (
                x.shape, x.stride(), x.dtype, x.device, topk_ids.shape, topk_ids.stride(), topk_ids.dtype,
                topk_ids.device, topk_weights.stride(), topk_weights.shape,
                topk_weights.dtype, topk_weights.device, out.shape, out.stride(), out.dtype, out.device,
                max_tokens_per_rank,
            )
        except RuntimeError:
            # Some tensors have no strides or no shape, such as nested ones. To ask first would cost every call.
            for name, array in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights), ("out", out)):
                _arrays.describe(name, array)
            raise
        more = {"max_tokens_per_rank": max_tokens_per_rank}
        with self._lock:
            # True == 1, but is no number of tokens.
            usual = type(max_tokens_per_rank) is int and _are_plain(x, topk_ids, topk_weights, out)
            if self._in_call or not usual:
                self._run(x, topk_ids, topk_weights, out, **more)
                return
            self._in_call = True
            try:
                if seen != self._seen:
                    self._seen = self._fast = None
                    self._run_with(self._call, x, topk_ids, topk_weights, out, None, False, 1.0, more)
                    self._remember(seen, x, topk_ids, topk_weights, out)
                    return
                # Descriptions look at this, too.
                _arrays.refuse_untracked("out", out, write=True)
                self._see_changes(x)
                a, b, c, d = self._slots
                a.data = x.data_ptr()
                b.data = topk_ids.data_ptr()
                c.data = topk_weights.data_ptr()
                d.data = out.data_ptr()
                if self.backend == "cuda":
                    self._call.stream = _arrays.current_stream(x)
                if _forward(self._handle, self._call_address):
                    self._open()
                    raise_last()
            finally:
                self._in_call = False
        _increment_version((out,))

    def _remember(self, seen: Any, x: Any, topk_ids: Any, topk_weights: Any, out: Any) -> None:
        """That _call describes tensors that look like these."""
        call = self._call
        self._seen = seen
        self._slots = (call.x, call.topk_ids, call.topk_weights, call.out)
        tensors = (x, topk_ids, topk_weights, out)
        alike = out.shape == x.shape and out.dtype == x.dtype
        together = all(t.device == x.device and t.is_contiguous() for t in tensors)
        if alike and together and topk_weights.shape == topk_ids.shape:
            self._fast = (
                x.shape, x.dtype, x.device, topk_ids.shape, topk_ids.dtype, topk_weights.dtype,
                self._slots, self._handle, self._call_address,
                x.device.index if x.device.type == "cuda" else None,
            )

    def __call__(
        self,
        x: Array,
        topk_ids: Any,
        topk_weights: Any,
        *,
        x_scale: Any = None,
        out: Any = None,
        accumulate: bool = False,
        scale: float = 1.0,
        max_tokens_per_rank: int = 0,
    ) -> Array:
        """One pass; every rank of the world must call it.

        On CPUs it returns when `out` is complete. On GPUs it enqueues one kernel on torch's current
        stream of x's device: it does not synchronise, and allocates nothing but a missing `out`.

        Parameters
        ----------
        x : array [T, H]
            bf16, fp16, fp32, or float8_e4m3fn with `x_scale`; T may be 0.
        topk_ids : array [T, K]
            int32 or int64; -1: no expert.
        topk_weights : array [T, K]
            float32 or bfloat16.
        x_scale : array [T, ceil(H / 128)], float32
            Scales of FP8 activations.
        out : array [T, H], optional
            None: a new one, of x's type (bf16 for FP8 activations).
        accumulate : bool
            Add to `out` instead of replacing it.
        scale : float
            Multiplies the result.
        max_tokens_per_rank : int
            A promise that no rank has more tokens in this pass, T to the layer's `max_tokens`, and the
            same on all ranks; 0: none. With it, passes of at most eight tokens on all ranks together
            run a faster kernel on GPUs, which takes bf16 `x` and `out` without `accumulate`
            (`Unsupported` for others). Ranks that promise different numbers wait for each other up to
            the deadline. Passes of four-bit experts with few rows for each have a faster kernel, too.

        Returns
        -------
        array [T, H]
            Results, in `out` if it was given.

        Raises
        ------
        InvalidArgument, ShapeMismatch, DTypeMismatch, MissingTensor, CapacityExceeded
            Before anything is sent.
        Timeout, Aborted
            The layer is dead then; the world lives.
        Unsupported
            If a gradient is asked for: there is no backward pass. With `out` at once, otherwise by
            ``backward()``.
        """
        # Servers make this call at each layer of each step, without a gradient. torch.compile() must not see
        # attributes that change from call to call: it would guard them.
        if (
            type(x) is _Tensor
            and type(topk_ids) is _Tensor
            and type(topk_weights) is _Tensor
            and not _is_dynamo_compiling()
            and not _is_tracing()
            and self._fast is not None
            and x_scale is None
            and accumulate is False
            and scale == 1.0
            and not _is_grad_enabled()
            and (done := self._call_again(x, topk_ids, topk_weights, out, max_tokens_per_rank)) is not None
        ):
            return done
        if _torch is None and _arrays.is_torch(x):  # but no weight is
            _use_torch()
        if topk_ids is None or topk_weights is None:
            self._refuse_no_routing(topk_ids)
        if _torch is None or not isinstance(x, _Tensor):
            if out is None:
                out = self._new_out(x, x_scale, accumulate)
            self._run(
                x, topk_ids, topk_weights, out, x_scale, accumulate, scale,
                max_tokens_per_rank=max_tokens_per_rank,
            )
            return out
        if _is_compiling():
            return self._compiled(
                x, topk_ids, topk_weights, x_scale, out, accumulate, scale, max_tokens_per_rank
            )
        if _is_transforming():
            # Before torch would look for its own rules of transforms.
            for name, array in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights), ("out", out)):
                _arrays.refuse_transformed(name, array)
        if _is_grad_enabled() and (
            x.requires_grad
            or getattr(topk_weights, "requires_grad", False)
            or any(p.requires_grad for p in self._parameters)
        ):
            if out is not None:
                _arrays.refuse_backward()
            # A lambda here would make each of its names slower to read, in all calls.
            again = functools.partial(
                self, x, topk_ids, topk_weights, x_scale=x_scale, accumulate=accumulate, scale=scale,
                max_tokens_per_rank=max_tokens_per_rank,
            )
            return _torch.apply_without_backward(again, x, topk_weights, *self._parameters)
        if out is None:
            out = self._new_out(x, x_scale, accumulate)
        plain = x_scale is None and accumulate is False and scale == 1.0
        if (
            plain
            and isinstance(topk_ids, _Tensor)
            and isinstance(topk_weights, _Tensor)
            and isinstance(out, _Tensor)
        ):
            self._run_tensors(x, topk_ids, topk_weights, out, max_tokens_per_rank)
        else:
            self._run(
                x, topk_ids, topk_weights, out, x_scale, accumulate, scale,
                max_tokens_per_rank=max_tokens_per_rank,
            )
        return out

    def _call_again(
        self, x: Any, topk_ids: Any, topk_weights: Any, out: Any, max_tokens_per_rank: int
    ) -> Any:
        """A pass of tensors that look like those of the pass before; None if they do not."""
        with self._lock:
            if self._in_call:
                return None
            self._in_call = True
            try:
                if self._fast is None:
                    return None
                shape, dtype, device, ids_shape, ids_dtype, w_dtype, slots, handle, call, cuda = self._fast
                try:
                    if not (
                        x.shape == shape
                        and x.dtype is dtype
                        and x.device == device
                        and x.is_contiguous()
                        and self._call.max_tokens_per_rank == max_tokens_per_rank
                        and type(max_tokens_per_rank) is int
                        and topk_ids.shape == ids_shape
                        and topk_ids.dtype is ids_dtype
                        and topk_ids.device == device
                        and topk_ids.is_contiguous()
                        and topk_weights.shape == ids_shape
                        and topk_weights.dtype is w_dtype
                        and topk_weights.device == device
                        and topk_weights.is_contiguous()
                    ):
                        return None
                    if out is None:
                        result = _empty_like(x)
                    elif (
                        type(out) is _Tensor
                        and out.shape == shape
                        and out.dtype is dtype
                        and out.device == device
                        and out.is_contiguous()
                    ):
                        result = out
                    else:
                        return None
                except RuntimeError:  # of a tensor that has no shape, such as a nested one: a description says so
                    return None
                if not _are_plain(x, topk_ids, topk_weights, result):
                    return None
                for tensor, address, _ in self._places:
                    if tensor.data_ptr() != address:
                        self._see_changes(x)
                if self._watched:
                    self._see_changes(x)
                a, b, c, d = slots
                a.data = x.data_ptr()
                b.data = topk_ids.data_ptr()
                c.data = topk_weights.data_ptr()
                d.data = result.data_ptr()
                if cuda is not None:
                    self._call.stream = _raw_stream(cuda)
                if _forward(handle, call):
                    raise_last()
            finally:
                self._in_call = False
        if out is not None:
            _increment_version((out,))
        return result

    def _new_out(self, x: Any, x_scale: Any, accumulate: Any) -> Any:
        _values.refuse_accumulate(accumulate)
        shape = _arrays.shape("x", x, 2)
        self._require_columns(shape)
        if x_scale is not None:
            self._require_scales(_arrays.describe("x", x)[0])
        return _arrays.empty(x, "x", shape, "bfloat16" if x_scale is not None else None)

    def _compiled(
        self,
        x: Any,
        topk_ids: Any,
        topk_weights: Any,
        x_scale: Any,
        out: Any,
        accumulate: bool,
        scale: float,
        max_tokens_per_rank: int,
    ) -> Any:
        """As an operator that torch.compile() knows."""
        import torch

        wanted = torch.is_grad_enabled() and any(p.requires_grad for p in self._parameters)
        if out is not None:
            if wanted:
                raise Unsupported("out is given, but a gradient is asked for, which there is not")
            torch.ops.switchyard.experts_out(
                x, topk_ids, topk_weights, x_scale, out, accumulate, scale, max_tokens_per_rank,
                self._number,
            )
            return out
        _values.refuse_accumulate(accumulate)
        return torch.ops.switchyard.experts(
            x, topk_ids, topk_weights, x_scale, list(self._parameters) if wanted else [], scale,
            max_tokens_per_rank, self._number,
        )
