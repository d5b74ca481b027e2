"""One layer's experts over the caller's tensors."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import byref
from typing import Any, Literal

from . import _abi, _arrays, _values
from ._library import check, library, raise_last
from ._values import count_text
from ._activation import Activation, require_activation
from .errors import DTypeMismatch, InvalidArgument, MissingTensor, ShapeMismatch, Unsupported
from ._arrays import Array, Kept
from ._handle import Reader, in_child, read_json
from ._routing import Routing
from ._workspace import LayerHandle, Workspace, choose_memory, creating, world_of
from ._world import World, checked_world

Order = Literal["gate_up", "up_gate", "interleaved"]
BadIds = Literal["raise", "skip"]
CapacityRule = Literal["slots", "tokens"]

_forward = library.sy_layer_forward
# Of torch, once it is there: set by _torch.py.
_torch_module: Any = None
_Tensor: Any = None
_is_compiling: Any = None
_is_dynamo_compiling: Any = None
_is_grad_enabled: Any = None
_empty_like: Any = None
_raw_stream: Any = None
_strided: Any = None
_increment_version: Any = None
ORDERS = ("gate_up", "up_gate", "interleaved")


@dataclasses.dataclass(frozen=True)
class Stats:
    """Of the last pass; zeros before the first.

    Attributes
    ----------
    epoch : int
        The number of the pass, from 1 on.
    tokens : int
        Of this rank.
    tokens_per_expert : tuple of int
        [E], over all ranks.
    dropped_slots, nan_logits, nan_tokens, bad_slots : int
        Of this rank.
    dispatch_bytes, combine_bytes, signal_bytes : int
        Written into other ranks' memory.
    heap_bytes_used, heap_bytes_reserved, workspace_bytes_used : int
        Of this rank.
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


# Layers by number, for operators of torch, which take numbers but no objects.
_by_number: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()


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
        _by_number[self._number] = self

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
            Unless the layer was made with ``trace=True``.
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
            Unless the layer was made with ``recorded_steps`` of 1 or more.
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
        call.stream = self._stream(x)
        if _forward(self._handle, ctypes.addressof(call)):
            raise_last()
        _arrays.wrote(out, more.get("ids_out"), more.get("weights_out"))
        del keep

    def _require_columns(self, shape: Sequence[int]) -> None:
        """Or else an `out` that was made like x would be blamed."""
        if len(shape) != 2 or shape[1] != self.hidden:
            raise ShapeMismatch(f"x is {list(shape)}; the layer takes [T, {self.hidden}]")

    def _require_scales(self, x: _abi.Tensor) -> None:
        if x.dtype != _abi.F8_E4M3:
            raise DTypeMismatch(
                f"x_scale is given, but x is {_arrays.DTYPE_NAMES[x.dtype]}, which has no scales; leave it None"
            )

    def _run_tensors(self, x: Any, topk_ids: Any, topk_weights: Any, out: Any) -> None:
        """As _run(), for tensors of torch and the plainest of calls, which servers make at each
        layer of each step. Tensors are described once, until they look different; then only addresses
        are passed.
        """
        seen = (
            x.shape,
            x.stride(),
            x.dtype,
            x.device,
            x.is_neg() or topk_weights.is_neg() or out.is_neg(),
            topk_ids.shape,
            topk_ids.stride(),
            topk_ids.dtype,
            topk_ids.device,
            topk_weights.stride(),
            topk_weights.shape,
            topk_weights.dtype,
            topk_weights.device,
            out.shape,
            out.stride(),
            out.dtype,
            out.device,
        )
        with self._lock:
            if self._in_call:
                self._run(x, topk_ids, topk_weights, out)
                return
            self._in_call = True
            try:
                if seen != self._seen:
                    self._seen = self._fast = None
                    self._run_with(self._call, x, topk_ids, topk_weights, out, None, False, 1.0, {})
                    self._remember(seen, x, topk_ids, topk_weights, out)
                    return
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
                x.shape,
                x.dtype,
                x.device,
                topk_ids.shape,
                topk_ids.dtype,
                topk_weights.dtype,
                self._slots,
                self._handle,
                self._call_address,
                x.device.index if x.device.type == "cuda" else None,
            )


def layer_of(number: int) -> Handle:
    """The layer with a number.

    Raises
    ------
    InvalidArgument
        If it is gone: compiled code does not keep layers alive.
    """
    layer = _by_number.get(number)
    if layer is None:
        raise InvalidArgument(
            f"layer {number} is gone, but compiled code calls it; keep the Experts object"
        )
    return layer


class Experts(Handle):
    """One layer's experts over the caller's tensors: it owns and copies no weight matrix.

    ``out[t] = sum_k topk_weights[t, k] * down_e(act(gate_e x[t], up_e x[t]))``, with
    ``e = topk_ids[t, k]``. Collective: every rank of the world makes it, and calls it.

    Parameters
    ----------
    w13 : array [n, 2 I, H], or [n, I, H] where the activation is plain
        Gate and up projections, in `order`; bf16, fp16, fp32 or float8_e4m3fn. n is the number of
        this rank's experts, or of all. Any strides. Or two arrays, gate and up, of [n, I, H] each.
    w2 : array [n, H, I]
        Down projections.
    top_k : int
        Experts of a token, K.
    max_tokens : int
        Most tokens of a call on this rank; the same on all ranks.
    activation : Activation
    order : {"gate_up", "up_gate", "interleaved"}
        Of w13's rows: all of gate and then all of up, the other way round, or gate and up in turn.
    transposed : bool
        w13 is [n, H, 2 I] and w2 [n, I, H], as in GPT-OSS and Llama-4.
    w13_scale, w2_scale : array
        Of FP8 weights, f32 or float8_e8m0fnu: [n, ceil(2 I / block), ceil(H / block)], of blocks;
        [n, 2 I] or [n, 2 I, 1], of rows; [n], [n, 1], [n, 1, 1] or, gate and up apart, [n, 2], of
        whole matrices.
    block : (int, int), optional
        Rows and columns of a block of w13 and w2, not transposed. None: 128 x 128 where a scale's
        shape says that it is of blocks.
    w13_bias, w2_bias : array [n, 2 I], [n, H]
        Optional.
    num_experts : int, optional
        Of all ranks. None: n, in a world of one.
    placement : sequence of int [places], optional
        The expert at each place, for experts that do not stand in shards, or more than once: after
        load balancing. Places are numbered over all ranks, rank r has those of
        ``world.own_experts(places)``, and n is of places. The same on all ranks.
    routing : Routing, optional
        How `from_logits` chooses experts.
    correction_bias : array [E], optional
        Of that routing.
    world : World, optional
        None: that of `workspace`, or a world of one.
    workspace : Workspace, optional
        The memory to work in, with room for this layer. None: memory of its own.
    workspace_slot : int
        Of `workspace`: 0 to its slots - 1.
    share_memory_with : Experts, optional
        Work in that layer's memory, which has to have room.
    compute : str or dtype, optional
        "bf16", "f32" or "f8_e4m3". None: by the weights' type.
    weight_on_input : bool
        The routing weight multiplies the expert's input, as in Llama-4.
    capacity_factor : float
        0: nothing is dropped. Otherwise an expert keeps so many times its even share of a rank's slots,
        the first ones in the order of tokens, and the rest contribute nothing and count in
        ``stats().dropped_slots``.
    capacity_rule : {"slots", "tokens"}
        An even share of T tokens is T top_k / E, as in GShard, or T / E, as in FlashDMoE; rounded up
        with its factor.
    bad_ids : {"raise", "skip"}
        What becomes of an id that no expert has, or that a token names twice: an error, or a slot
        that contributes nothing and counts in ``stats().bad_slots``.
    large_ids_are_none : bool
        Ids of num_experts or more mean "no expert", as -1 does.
    pre_sum_per_host : bool
        Ranks on several hosts, the same on all: a host sums its weighted outputs of one token of
        another host in fp32, in the order of k, rounds the sum to the outputs' type, and sends it as
        one row. Fewer bytes between hosts, one rounding more. Of one host nothing changes. On GPUs
        a host's ranks are one layer then, with the fused kernel between them: set it where hosts
        have several GPUs.
    reserved_sms : int
        On GPUs: SMs left to other kernels, NCCL's among them.
    num_threads : int
        On CPUs: of this rank; 0: hardware threads divided by ranks.
    device : int, optional
        On GPUs: its number. None: that of w13.
    deadline : float
        Seconds; 0: the world's.
    trace : bool
        Record what every role does, for `trace()`.
    recorded_steps : int
        Keep the rows of each expert of so many last passes, for `recording()`. 0: none, at no cost.
    name : str
        Of the layer, as its recording has it.
    table : path, optional
        On GPUs: a table that ``switchyard tune --kernel layer`` wrote for this shape, type and GPU, by
        which the host chooses each pass's schedule from its tokens.

    Raises
    ------
    InvalidArgument, ShapeMismatch, DTypeMismatch, MissingTensor
        Naming the argument and its value.
    SpecMismatch
        If ranks disagree.
    Unsupported
        For what the library does not do in this build or on this machine.
    Timeout
        If a rank does not come.
    """

    def __init__(
        self,
        w13: Any,
        w2: Any,
        *,
        top_k: int,
        max_tokens: int = 8192,
        activation: Activation = Activation(),
        order: Order = "gate_up",
        transposed: bool = False,
        w13_scale: Any = None,
        w2_scale: Any = None,
        block: tuple[int, int] | None = None,
        w13_bias: Any = None,
        w2_bias: Any = None,
        num_experts: int | None = None,
        placement: Sequence[int] | None = None,
        routing: Routing | None = None,
        correction_bias: Any = None,
        world: World | None = None,
        workspace: Workspace | None = None,
        workspace_slot: int = 0,
        share_memory_with: Experts | None = None,
        compute: Any = None,
        weight_on_input: bool = False,
        capacity_factor: float = 0.0,
        capacity_rule: CapacityRule = "slots",
        bad_ids: BadIds = "raise",
        large_ids_are_none: bool = False,
        pre_sum_per_host: bool = False,
        reserved_sms: int = 0,
        num_threads: int = 0,
        device: int | None = None,
        deadline: float = 0.0,
        trace: bool = False,
        recorded_steps: int = 0,
        name: str = "",
        table: str | os.PathLike[str] | None = None,
    ) -> None:
        if bad_ids not in ("raise", "skip"):
            raise InvalidArgument(f"bad_ids is {bad_ids!r}; use 'raise' or 'skip'")
        if capacity_rule not in ("slots", "tokens"):
            raise InvalidArgument(f"capacity_rule is {capacity_rule!r}; use 'slots' or 'tokens'")
        if capacity_rule != "slots" and not capacity_factor:
            raise InvalidArgument(
                f"capacity_rule is {capacity_rule!r}, but capacity_factor is 0, which drops nothing; give "
                "a factor, or leave the rule"
            )
        if routing is not None and not isinstance(routing, Routing):
            raise InvalidArgument(f"routing is {routing!r}; pass a switchyard.Routing")
        world = checked_world(world) or world_of(workspace)
        weights, sizes, keep = _weights(
            w13, w2, activation, order, transposed, w13_scale, w2_scale, block, w13_bias, w2_bias
        )
        count, intermediate, hidden = sizes
        if num_experts is None:
            if world.size > 1 or placement is not None:
                raise InvalidArgument(
                    f"w13 has {count_text(count, 'expert')}, and the world {count_text(world.size, 'rank')}; say with "
                    "num_experts how many experts all ranks have together"
                )
            num_experts = count
        num_experts = _values.integer("num_experts", num_experts, 1, 2**31 - 1)
        places = num_experts if placement is None else len(placement)
        own = len(world.own_experts(places))
        if count not in (own, places):
            raise ShapeMismatch(
                f"w13 has {count_text(count, 'expert')}; pass this rank's {own}, or all {places} of "
                f"{'num_experts' if placement is None else 'placement'}"
            )
        compute_code = _compute(compute, weights.down.weight.dtype)
        _put_placement(weights, placement)
        if correction_bias is not None:
            if routing is None:
                raise InvalidArgument("correction_bias is given without routing; pass both")
            weights.correction_bias = keep.describe("correction_bias", correction_bias, copied=True)
        c_routing = (routing or Routing())._to_c(correction_bias is not None)
        spec = _abi.LayerSpec(
            routing=ctypes.pointer(c_routing),
            hidden=hidden,
            intermediate=intermediate,
            num_experts=num_experts,
            top_k=top_k,
            expert_bias=int(w13_bias is not None or w2_bias is not None),
            weight_on_input=_values.flag("weight_on_input", weight_on_input),
            capacity_factor=capacity_factor,
            capacity_rule=int(capacity_rule == "tokens"),
            activation=activation._to_c(),
        )
        cuda = weights.down.weight.device_type == _abi.CUDA
        if device is not None and not cuda:
            raise InvalidArgument(
                f"device is {device!r}, but w2 is in host memory, so a CPU computes; leave it None, or move "
                "the weights to the GPU"
            )
        options = _abi.LayerOptions(
            backend=_abi.CUDA if cuda else _abi.CPU,
            max_tokens=max_tokens,
            num_threads=num_threads,
            device=(weights.down.weight.device_id if device is None else device) if cuda else -1,
            reserved_sms=reserved_sms,
            compute=compute_code,
            trace=_values.flag("trace", trace),
            bad_ids=int(bad_ids == "skip"),
            large_ids_are_none=_values.flag("large_ids_are_none", large_ids_are_none),
            pre_sum_per_host=_values.flag("pre_sum_per_host", pre_sum_per_host),
            deadline_seconds=deadline,
            recorded_steps=recorded_steps,
            name=_values.text("name", name),
            table_file=None if table is None else _values.path("table", table),
        )
        with creating(world, workspace, share_memory_with):
            handle = choose_memory(options, workspace, workspace_slot, share_memory_with)
            check(
                library.sy_layer_create(
                    world._open(), byref(spec), byref(weights), byref(options), byref(handle)
                )
            )
        super().__init__(handle, keep)
        self._place = (world.rank, world.size)
        self._stored = _arrays.DTYPE_NAMES[weights.down.weight.dtype]
        self.order: Order = order
        self.transposed = transposed
        self.routing = routing
        self._block = block
        self._sizes = sizes
        self._has_biases = w13_bias is not None
        # What can be asked for a gradient.
        self._parameters: Iterable[Any] = keep.tensors
        if self._parameters:
            from . import _torch  # noqa: F401  # the operators

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
            Of FP8 activations.
        out : array [T, H], optional
            None: a new one, of x's type (bf16 for FP8 activations).
        accumulate : bool
            Add to `out` instead of replacing it.
        scale : float
            Multiplies the result.

        Returns
        -------
        array [T, H]
            `out`.

        Raises
        ------
        InvalidArgument, ShapeMismatch, DTypeMismatch, CapacityExceeded
            Before anything is sent.
        Timeout, Aborted
            The layer is dead then; the world lives.
        Unsupported
            If a gradient is asked for: there is no backward pass. With `out` at once, otherwise by
            ``backward()``.
        """
        # What servers do at each layer of each step, without a gradient. torch.compile() must not come
        # to what changes from call to call: it would guard it.
        if (
            type(x) is _Tensor
            and type(topk_ids) is _Tensor
            and type(topk_weights) is _Tensor
            and not _is_dynamo_compiling()
            and self._fast is not None
            and x_scale is None
            and not accumulate
            and scale == 1.0
            and not _is_grad_enabled()
            and (done := self._call_again(x, topk_ids, topk_weights, out)) is not None
        ):
            return done
        torch = _torch_module
        if torch is None or not isinstance(x, _Tensor):
            if _arrays.is_torch(x):
                # The weights are not torch's.
                from . import _torch  # noqa: F401

                return self(
                    x,
                    topk_ids,
                    topk_weights,
                    x_scale=x_scale,
                    out=out,
                    accumulate=accumulate,
                    scale=scale,
                )
            if out is None:
                out = self._new_out(x, x_scale, accumulate)
            self._run(x, topk_ids, topk_weights, out, x_scale, accumulate, scale)
            return out
        if _is_compiling():
            return self._compiled(x, topk_ids, topk_weights, x_scale, out, accumulate, scale)
        if _is_grad_enabled() and (
            x.requires_grad
            or getattr(topk_weights, "requires_grad", False)
            or any(p.requires_grad for p in self._parameters)
        ):
            from . import _torch

            return _torch.without_backward(
                self, x, topk_ids, topk_weights, x_scale, out, accumulate, scale
            )
        if out is None:
            out = self._new_out(x, x_scale, accumulate)
        plain = x_scale is None and accumulate is False and scale == 1.0
        if (
            plain
            and isinstance(topk_ids, _Tensor)
            and isinstance(topk_weights, _Tensor)
            and isinstance(out, _Tensor)
        ):
            self._run_tensors(x, topk_ids, topk_weights, out)
        else:
            self._run(x, topk_ids, topk_weights, out, x_scale, accumulate, scale)
        return out

    def _call_again(self, x: Any, topk_ids: Any, topk_weights: Any, out: Any) -> Any:
        """A pass of tensors that look like those of the pass before; None if they do not."""
        with self._lock:
            if self._in_call:
                return None
            self._in_call = True
            try:
                if self._fast is None:
                    return None
                shape, dtype, device, ids_shape, ids_dtype, w_dtype, slots, handle, call, cuda = self._fast
                if not (
                    x.shape == shape
                    and x.dtype is dtype
                    and x.device == device
                    and x.is_contiguous()
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
        if accumulate:
            raise InvalidArgument("accumulate is True, but out is None; pass what to add to")
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
    ) -> Any:
        """As an operator that torch.compile() knows."""
        import torch

        wanted = torch.is_grad_enabled() and any(p.requires_grad for p in self._parameters)
        if out is not None:
            if wanted:
                raise Unsupported("out is given, but a gradient is asked for, which there is not")
            torch.ops.switchyard.experts_out(
                x, topk_ids, topk_weights, x_scale, out, accumulate, scale, self._number
            )
            return out
        if accumulate:
            raise InvalidArgument("accumulate is True, but out is None; pass what to add to")
        return torch.ops.switchyard.experts(
            x,
            topk_ids,
            topk_weights,
            x_scale,
            list(self._parameters) if wanted else [],
            scale,
            self._number,
        )

    def from_logits(
        self,
        x: Array,
        logits: Any,
        *,
        x_scale: Any = None,
        ids_out: Any = None,
        weights_out: Any = None,
        out: Any = None,
        accumulate: bool = False,
        scale: float = 1.0,
    ) -> Array:
        """One pass whose experts the layer chooses, as its `routing` says.

        Parameters
        ----------
        x : array [T, H]
        logits : array [T, E]
            Of the router, its bias included; float32 or bfloat16, with contiguous rows.
        ids_out, weights_out : array [T, K], int32 and float32, optional
            Where to put the routing that was used.
        x_scale, out, accumulate, scale
            As of ``__call__``.

        Returns
        -------
        array [T, H]

        Raises
        ------
        InvalidArgument
            If the layer was made without `routing`; and as ``__call__`` does.
        Unsupported
            If a gradient is asked for.
        """
        if self.routing is None:
            raise InvalidArgument("the layer was made without routing; pass it to Experts")
        if _arrays.is_torch(x):
            from ._torch import refuse_gradient

            refuse_gradient(x, logits, *self._parameters)
        if out is None:
            out = self._new_out(x, x_scale, accumulate)
        self._run(
            x,
            None,
            None,
            out,
            x_scale,
            accumulate,
            scale,
            logits=logits,
            ids_out=ids_out,
            weights_out=weights_out,
        )
        return out

    def rebind(
        self,
        w13: Any,
        w2: Any,
        *,
        w13_scale: Any = None,
        w2_scale: Any = None,
        w13_bias: Any = None,
        w2_bias: Any = None,
        placement: Sequence[int] | None = None,
    ) -> None:
        """Use other arrays of the same shapes, types and layout.

        Passes that were enqueued before still read the old ones, and graphs that captured the layer
        always do.

        Parameters
        ----------
        w13, w2, w13_scale, w2_scale, w13_bias, w2_bias
            As of `Experts`.
        placement : sequence of int, optional
            Experts in other places, of which there are as many as before. Collective then.

        Raises
        ------
        ShapeMismatch, DTypeMismatch, MissingTensor, InvalidArgument, SpecMismatch
            The layer is then as it was.
        """
        for name, bias in (("w13_bias", w13_bias), ("w2_bias", w2_bias)):
            if self._has_biases and bias is None:
                raise MissingTensor(f"the layer was made with biases; pass {name}, too")
            if not self._has_biases and bias is not None:
                raise ShapeMismatch(f"{name} is given, but the layer was made without; leave it None")
        weights, sizes, keep = _weights(
            w13,
            w2,
            self.activation,
            self.order,
            self.transposed,
            w13_scale,
            w2_scale,
            self._block,
            w13_bias,
            w2_bias,
        )
        if sizes != self._sizes:
            raise ShapeMismatch(
                "w13 and w2 make {} with I {} and H {}; the layer was made of {}, {} and {}".format(
                    count_text(sizes[0], "expert"), *sizes[1:], *self._sizes
                )
            )
        _put_placement(weights, placement)
        with self._lock:
            check(library.sy_layer_rebind(self._open(), byref(weights)))
            # Passes under way may still read the arrays that were bound before.
            if self.backend == "cuda":
                keep.keep(self._keep)
            self._set_keep(keep)
        self._parameters = keep.tensors


# ----------------------------------------------------------------------------------- weights


def _weights(
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
) -> tuple[_abi.LayerWeights, tuple[int, int, int], Kept]:
    """Descriptors of gate, up and down; (n, I, H); and what must be kept."""
    require_activation(activation)
    if order not in ORDERS:
        raise InvalidArgument(f"order is {order!r}; use one of {', '.join(ORDERS)}")
    if order != "gate_up" and not activation.gated:
        raise InvalidArgument(f"order is {order!r}, but {activation} has no gate; leave it out")
    if block is not None and w13_scale is None and w2_scale is None:
        raise InvalidArgument(f"block is {block!r}, but there are no scales; leave it None, or pass them")
    _values.flag("transposed", transposed)
    keep = Kept()

    def described(name: str, array: Any, ndim: int, copied: bool = False) -> _abi.Tensor:
        tensor = keep.describe(name, array, copied=copied)
        if tensor.ndim != ndim:
            raise ShapeMismatch(f"{name} is {_arrays.shape_of(tensor)}; it needs {ndim} dimensions")
        return tensor

    down = described("w2", w2, 3)
    if isinstance(w13, tuple):
        return _of_two(w13, down, activation, transposed, (w13_scale, w2_scale, w13_bias, w2_bias), keep)
    up = described("w13", w13, 3)
    if transposed:
        up, down = _arrays.transpose(up), _arrays.transpose(down)
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
        if tensor.dtype != _abi.F8_E4M3 and scale is not None:
            raise DTypeMismatch(
                f"{name}_scale is given, but {name} is {_arrays.DTYPE_NAMES[tensor.dtype]}, which has "
                "no scales; leave it None"
            )
    weights = _abi.LayerWeights()
    weights.down.weight = down
    if w2_scale is not None:
        put_scale("w2_scale", w2_scale, weights.down, block, keep)
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
    if not gated:
        weights.up.weight = up
        if w13_scale is not None:
            put_scale("w13_scale", w13_scale, weights.up, block, keep)
        if bias is not None:
            weights.up.bias = bias
        return weights, (count, intermediate, hidden), keep

    # First row and step of gate and of up.
    step = 2 if order == "interleaved" else 1
    second = 1 if step == 2 else intermediate
    starts = {"gate": 0, "up": second} if order != "up_gate" else {"gate": second, "up": 0}
    whole = _abi.Matrices(weight=up)
    if w13_scale is not None:
        put_scale("w13_scale", w13_scale, whole, block, keep, halves=intermediate)
    for name, start in starts.items():
        matrices = getattr(weights, name)
        matrices.weight = _arrays.rows(up, start, intermediate, step)
        if bias is not None:
            matrices.bias = _arrays.rows(bias, start, intermediate, step)
        if w13_scale is not None:
            _put_part_of_scale(matrices, whole, start, intermediate, step)
    return weights, (count, intermediate, hidden), keep


def _compute(compute: Any, weights: int) -> int:
    """The code of the type to compute in; none: by the weights' type."""
    if compute is None:
        return _abi.DTYPE_NONE
    code = _arrays.dtype_code(compute)
    if code not in (_abi.BF16, _abi.F32, _abi.F8_E4M3):
        raise InvalidArgument(f"compute is {compute!r}; use 'bf16', 'f32' or 'f8_e4m3'")
    if code == _abi.F8_E4M3 and weights != _abi.F8_E4M3:
        raise InvalidArgument(
            f"compute is {compute!r}, but w2 is {_arrays.DTYPE_NAMES[weights]}; use 'bf16' or 'f32', or FP8 weights"
        )
    return code


def _put_placement(weights: _abi.LayerWeights, placement: Sequence[int] | None) -> None:
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
    weights.down.weight = _arrays.transpose(down) if transposed else down
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
) -> None:
    """Scales of [n, rows, cols] weights, as [n, R, C] with the rows and columns of a block.

    halves: rows of gate, and of up, if the matrix has both.
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
    if shape[1:] == [1, 1]:
        per = (rows, cols)
    elif halves and shape[1:] == [2, 1] and rows != 2:
        per = (halves, cols)
    elif shape[1:] == [rows, 1]:
        per = (1, cols)
    elif shape[1:] == [math.ceil(rows / height), math.ceil(cols / width)]:
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


def _put_part_of_scale(
    part: _abi.Matrices, whole: _abi.Matrices, start: int, count: int, step: int
) -> None:
    """Scales of every step-th row from `start` on."""
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
    elif height == count and count * 2 == whole.weight.shape[1] and whole.scale.shape[1] == 2:
        # One scale for gate and one for up.
        part.scale_rows = count
        part.scale = _arrays.rows(whole.scale, start, 1)
    elif height % step == 0:
        part.scale_rows = height // step
        part.scale = whole.scale
    else:
        raise Unsupported(
            f"interleaved rows with a scale for each {height} of them; use blocks of an even number"
        )


# ------------------------------------------------------------------------------ cached experts

_CACHED_LAYERS = 512
# Layers and operators, and what their small arrays were like.
_cache: OrderedDict[Any, tuple[Any, list[Any]]] = OrderedDict()
# Reentrant: garbage is collected, and arrays end, wherever memory is asked for.
_lock = threading.RLock()


class _Weak:
    """Tensors as long as they are."""

    def __init__(self, tensors: list[Any]) -> None:
        self._references = [weakref.ref(tensor) for tensor in tensors]

    def __iter__(self) -> Iterator[Any]:
        found = (reference() for reference in self._references)
        return (tensor for tensor in found if tensor is not None)


def fingerprint(name: str, array: Any) -> Any:
    """What tells an array from others, for the cache."""
    if array is None:
        return None
    if type(array) is _Tensor and array.is_cpu | array.is_cuda and array.layout is _strided:
        return (array.data_ptr(), tuple(array.shape), array.stride(), array.dtype, array.device)
    tensor, _ = _arrays.describe(name, array)
    strides = tuple(tensor.strides[: tensor.ndim])
    return (tensor.data, _arrays.shape_of(tensor), strides, tensor.dtype, tensor.device_type, tensor.device_id)


def experts(
    x: Array,
    w13: Any,
    w2: Any,
    topk_ids: Any,
    topk_weights: Any,
    *,
    x_scale: Any = None,
    out: Any = None,
    accumulate: bool = False,
    scale: float = 1.0,
    **options: Any,
) -> Array:
    """The experts of one layer, as a function. Layers are made once for their weights and cached.

    A layer is kept while the arrays it was made of are: pass the same objects, not views made for
    each call. Scales and biases that were changed in place are seen. Several threads may call it.
    Under torch.compile() make an `Experts` instead.

    Parameters
    ----------
    x : array [T, H]
    w13 : array [n, 2 I, H]
    w2 : array [n, H, I]
    topk_ids, topk_weights : array [T, K]
    x_scale, out, accumulate, scale
        As of ``Experts.__call__``.
    **options
        As of `Experts`, without `top_k`.

    Returns
    -------
    array [T, H]

    Raises
    ------
    Error
        As `Experts` and ``Experts.__call__`` do.
    """
    layer = cached(
        w13,
        w2,
        top_k=_arrays.shape("topk_ids", topk_ids, 2)[1],
        tokens=_arrays.shape("x", x, 2)[0],
        **options,
    )
    return layer(
        x, topk_ids, topk_weights, x_scale=x_scale, out=out, accumulate=accumulate, scale=scale
    )


def cached(w13: Any, w2: Any, *, top_k: int, tokens: int, **options: Any) -> Experts:
    """The layer of these weights; a new one where `tokens` are more than that takes."""
    names = ("w13_scale", "w2_scale", "w13_bias", "w2_bias", "correction_bias")
    small: list[Any] = [options.get(name) for name in names]
    rest = tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in sorted(options.items())
        if name not in (*names, "max_tokens")
    )
    large = w13 if isinstance(w13, tuple) else (w13,)
    key = (
        *(fingerprint("w13", array) for array in large),
        fingerprint("w2", w2),
        *map(fingerprint, names, small),
        top_k,
        rest,
    )
    found = find(key, small, lambda layer: tokens <= layer.max_tokens)
    if found is not None:
        return found
    most = options.pop("max_tokens", None) or max(1024, 1 << (tokens - 1).bit_length())
    layer = Experts(w13, w2, top_k=top_k, max_tokens=max(most, tokens), **options)
    # The cache must not keep weights alive: it forgets the layer when one of them goes.
    layer._forget_arrays()
    layer._parameters = _Weak(list(layer._parameters))
    remember(key, layer, (*large, w2), small)
    return layer


def find(key: Any, small: Sequence[Any], fits: Callable[[Any], bool]) -> Any:
    """The layer or operator made of these arrays, if it still serves; or None.

    small: arrays that the library may have copied. They have to be the same objects, unchanged: others
    may have come to the same place.
    """
    with _lock:
        found = _cache.get(key)
        if found is None:
            return None
        made, states = found
        if made.closed or not fits(made) or not all(map(_is_as_then, small, states)):
            return None
        try:
            _cache.move_to_end(key)
        except KeyError:  # garbage was collected just now, and one of its arrays with it
            pass
        return made


def _state(array: Any) -> Any:
    """A reference to a tensor of torch and its version counter. Changes of other arrays are not seen, but
    looked for at each call."""
    if not _arrays.is_torch(array):
        return None
    return weakref.ref(array), _arrays.version_of(array)


def _is_as_then(array: Any, state: Any) -> bool:
    if state is None:
        return not _arrays.is_torch(array)
    return state[0]() is array and state[1] == _arrays.version_of(array)


def remember(key: Any, made: Any, large: Sequence[Any], small: Sequence[Any]) -> None:
    """Keep a layer or an operator until one of its arrays goes."""
    kept = []
    for array in (*large, *small):
        try:
            if array is not None:
                weakref.finalize(array, _forget, key).atexit = False
        except TypeError:  # not to be told of its end
            kept.append(array)
    made._cached_arrays = kept
    with _lock:
        old = _cache.pop(key, None)
        _cache[key] = (made, [_state(array) for array in small])
        dropped = _cache.popitem(last=False)[1][0] if len(_cache) > _CACHED_LAYERS else None
    del old, dropped


def _forget(key: Any) -> None:
    # A thread in a call of it has a reference, so it ends after that call.
    with _lock:
        found = _cache.pop(key, None)
    del found


@in_child
def _forget_all() -> None:
    global _lock
    _lock = threading.RLock()
    _cache.clear()
