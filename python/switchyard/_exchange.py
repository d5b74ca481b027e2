"""Dispatch and combine alone: tokens to the ranks of their experts, and results back."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from ctypes import byref
from typing import Any, Literal

from . import _abi, _arrays, _values
from ._arrays import Array
from ._handle import Owned, read_json
from ._library import check, library
from ._operators import _LAYOUTS, Layout, _layout
from ._values import count_text
from ._weights import placement_of
from ._world import World, checked_world
from .errors import InvalidArgument, ShapeMismatch

CombineWeights = Literal["receiver", "sender", "none"]
_WEIGHTS = ("receiver", "sender", "none")
# Types of results.
_SUMMED = ("bf16", "f16", "f32")
# Names that arrays of torch and numpy have for dtypes.
_TYPES = {
    _abi.F32: "float32", _abi.F16: "float16", _abi.BF16: "bfloat16", _abi.F8_E4M3: "float8_e4m3fn",
}


class ExchangeHandle(Owned):
    """What became of one dispatch, as `Exchange.combine` needs it. Made by an `Exchange`.

    Attributes
    ----------
    tokens : int
        This rank's in the dispatch that gave the handle its contents.
    """

    _noun = "handle of a dispatch"

    def _shown(self) -> str:
        return f"dispatch of {count_text(self.tokens, 'token')}, of an exchange of {self._exchange._shown()}"

    def __init__(self, handle: ctypes.c_void_p, exchange: Exchange) -> None:
        super().__init__(handle, library.sy_exchange_handle_destroy, lock=exchange._lock)
        self._exchange = exchange
        self._like: Any = None  # an array of the kind and device that were sent
        self.tokens = 0


@dataclasses.dataclass(frozen=True)
class Received:
    """What came to this rank's experts.

    Attributes
    ----------
    rows : array [capacity, H]
        In the exchange's layout: the `x` of `GroupedGemm`. Rows that are nobody's hold anything.
    ends : array [own experts], int32
        Rows of this rank's experts 0 to e together, whatever the layout.
    counts : array [own experts], int32
        Rows of each.
    num_rows : array [1], int32
    origins : array [capacity, 3], int32
        Rank, token and k of each row.
    weights : array [capacity], float32
        Each row's weight, in packed order: the `row_weights` of `GroupedGemm`.
    scales : array [capacity, ceil(H / 128)], float32, or None
        Scales of FP8 rows: the `x_scale` of `GroupedGemm`.
    layout : "packed", ("blocked", size) or ("padded", size)
    handle : ExchangeHandle
        For `Exchange.combine`, and for dispatches that reuse it.
    """

    rows: Any
    ends: Any
    counts: Any
    num_rows: Any
    origins: Any
    weights: Any
    scales: Any
    layout: Layout
    handle: ExchangeHandle

    def __repr__(self) -> str:
        # The memory of the arrays may be gone with the exchange.
        arrays = ("rows", "ends", "counts", "num_rows", "origins", "weights", "scales")
        fields = ", ".join(f"{name} {_arrays.shown(getattr(self, name, None))}" for name in arrays)
        return f"<Received: {fields}, layout {getattr(self, 'layout', None)!r}>"

    @property
    def by_expert(self) -> Any:
        """`rows` as [own experts, size, H], in a padded layout."""
        if self.layout == "packed" or self.layout[0] != "padded":
            raise InvalidArgument(f"the layout is {self.layout!r}; only padded rows are of one shape")
        return self.rows.reshape(len(self.counts), self.layout[1], self.rows.shape[-1])


@dataclasses.dataclass(frozen=True)
class ExchangeStats:
    """Of this rank's last dispatch and last combine.

    Attributes
    ----------
    dispatches, combines : int
        Sent since the exchange was made.
    tokens : int
        Tokens of this rank.
    tokens_sent : int
        Tokens for other ranks, counted once for each token and rank.
    rows_received : int
    rows_returned : int
        Rows for other ranks.
    dispatch_bytes, combine_bytes, signal_bytes : int
        Written into other ranks' memory: tokens and descriptions of rows; results; counts and flags
        of both.
    heap_bytes_reserved : int
    """

    dispatches: int
    combines: int
    tokens: int
    tokens_sent: int
    rows_received: int
    rows_returned: int
    dispatch_bytes: int
    combine_bytes: int
    signal_bytes: int
    heap_bytes_reserved: int


class Exchange(Owned):
    """Sends tokens to the ranks of their experts, and results back. Collective: all ranks make it alike.

    One-sided stores and numbered flags: no collective, no barrier between calls. All ranks make the
    same calls in the same order. Calls of several threads follow one another.

    ::

        exchange = switchyard.Exchange(world, hidden=H, num_experts=E, top_k=K, max_tokens=M)
        got = exchange.dispatch(x, ids, weights)
        y = experts(got.rows, got.ends)
        out = exchange.combine(y, got.handle)

    Parameters
    ----------
    world : World
    hidden, num_experts, top_k : int
        H; E, over all ranks; K.
    max_tokens : int
        Most tokens that a rank may pass to one dispatch.
    dispatch : str or dtype
        Type of received rows: bf16, fp16, fp32, or "f8_e4m3": then tokens are FP8 with scales, or
        are quantised before they travel.
    combine : str or dtype, optional
        Type of results: bf16, fp16 or fp32. None: that of dispatch, or bf16 for FP8.
    layout : "packed", ("blocked", size) or ("padded", size)
        Places of received rows and of results. Padded with size 0 has room for all tokens of all ranks.
    weights : {"receiver", "sender", "none"}
        Who multiplies results with their weights: the token's rank, in fp32; the expert's rank,
        before it sends; or nobody.
    pre_sum : bool
        Sum a token's rows on the expert's rank and send one: fewer bytes, one rounding more. Not
        with "receiver".
    pre_sum_per_host : bool
        Ranks on several hosts: a host sums the rows of one token of another host in fp32, in the
        order of k, rounds the sum to `combine`, and sends it as one row. Fewer bytes between hosts,
        one rounding more. Not with "receiver". Of one host nothing changes.
    placement : sequence of int [places], optional
        The expert at each place, as `experts` of `Placement`.
    large_ids_are_none : bool
        Ids of num_experts or more mean "no expert", as -1 does.
    device : str, int or torch.device
        "cpu", or the GPU.
    num_threads : int
        On the CPU. 0: hardware threads / ranks.
    max_sms : int
        On a GPU: the most SMs that a call uses. 0: a rule's.
    deadline : float
        Seconds without progress of any rank until a wait is given up. 0: the world's.
    trace : bool
        Record what is done, for `trace`.

    Raises
    ------
    InvalidArgument
        For options that make no sense.
    SpecMismatch
        If ranks differ, naming the rank and the option.
    CapacityExceeded
        If memory is short.
    Unsupported
        For what the library does not do in this build or on this machine.
    Timeout
        If a rank does not come.
    """

    _noun = "exchange"

    def _shown(self) -> str:
        return (
            f"H {self.hidden}, {count_text(self.num_experts, 'expert')}, top-{self.top_k}, up to "
            f"{count_text(self.max_tokens, 'token')}, {self.dispatch_dtype} there and {self.combine_dtype} back, layout "
            f"{self.layout!r}, on {self.backend}, rank {self._place[0]} of {self._place[1]}"
        )

    def __init__(
        self,
        world: World,
        *,
        hidden: int,
        num_experts: int,
        top_k: int,
        max_tokens: int,
        dispatch: Any = "bf16",
        combine: Any = None,
        layout: Layout = "packed",
        weights: CombineWeights = "receiver",
        pre_sum: bool = False,
        pre_sum_per_host: bool = False,
        placement: Sequence[int] | None = None,
        large_ids_are_none: bool = False,
        device: Any = "cpu",
        num_threads: int = 0,
        max_sms: int = 0,
        deadline: float = 0.0,
        trace: bool = False,
    ) -> None:
        who = _values.choice("weights", weights, _WEIGHTS)
        if checked_world(world) is None:
            raise InvalidArgument("world is None; pass a switchyard.World, such as World.single()")
        code = _arrays.chosen_dtype("dispatch", dispatch, (*_SUMMED, "f8_e4m3"), optional=False)
        back = _arrays.chosen_dtype("combine", combine, _SUMMED)
        if combine is None:
            back = _abi.BF16 if code == _abi.F8_E4M3 else code
        if isinstance(layout, (tuple, list)) and tuple(layout) == ("padded", 0):
            c_layout = _abi.RowLayout(_LAYOUTS.index("padded"), 0, 0)
        else:
            c_layout = _layout("layout", layout)
        spec = _abi.ExchangeSpec(
            hidden=hidden, num_experts=num_experts, top_k=top_k, max_tokens=max_tokens,
            dispatch=code, combine=back, weights=who,
            pre_sum=_values.flag("pre_sum", pre_sum),
            pre_sum_per_host=_values.flag("pre_sum_per_host", pre_sum_per_host),
            large_ids_are_none=_values.flag("large_ids_are_none", large_ids_are_none),
            layout=c_layout,
        )
        if placement is not None:
            table = _values.integers("placement", ctypes.c_int32, placement)
            spec.placement = placement_of(table, len(placement))
        gpu = _gpu_of(device)
        options = _abi.ExchangeOptions(
            backend=_abi.CPU if gpu is None else _abi.CUDA, num_threads=num_threads,
            device=-1 if gpu is None else gpu, max_sms=max_sms, trace=_values.flag("trace", trace),
            deadline_seconds=deadline,
        )
        handle = ctypes.c_void_p()
        with world._lock:
            check(
                library.sy_exchange_create(
                    world._open(), byref(spec), byref(options), byref(handle)
                )
            )
        super().__init__(handle, library.sy_exchange_destroy)
        info = _abi.ExchangeInfo()
        check(library.sy_exchange_get_info(handle, byref(info)))
        self.hidden = hidden
        self.num_experts = num_experts
        self.top_k = top_k
        self.max_tokens = max_tokens
        self.dispatch_dtype: str = _arrays.DTYPE_NAMES[code]
        self.combine_dtype: str = _arrays.DTYPE_NAMES[back]
        kind = _LAYOUTS[info.layout.kind]
        self.layout: Layout = "packed" if kind == "packed" else (kind, info.layout.size)
        self.weights: CombineWeights = weights
        self.pre_sum = pre_sum
        self.pre_sum_per_host = pre_sum_per_host
        self.own_experts = range(info.own_begin, info.own_end)
        """This rank's experts, or places with a placement."""
        self.rows_needed: int = info.rows_needed
        """Rows for all that may arrive."""
        self.num_threads: int = info.num_threads
        self.backend: str = "cuda" if info.backend == _abi.CUDA else "cpu"
        self._code, self._back = code, back
        self._place = (world.rank, world.size)

    # -------------------------------------------------------------------------------- dispatch

    def make_handle(self) -> ExchangeHandle:
        """A handle without contents. On a GPU it has memory for the most there can be."""
        handle = ctypes.c_void_p()
        with self._lock:
            check(library.sy_exchange_handle_create(self._open(), byref(handle)))
        return ExchangeHandle(handle, self)

    def dispatch_send(
        self,
        x: Any,
        ids: Any = None,
        weights: Any = None,
        *,
        x_scale: Any = None,
        handle: ExchangeHandle | None = None,
    ) -> ExchangeHandle:
        """Send this rank's tokens; waits for nobody.

        Parameters
        ----------
        x : array [T, H]
            Tokens of the exchange's dispatch type. For FP8: float8_e4m3fn with `x_scale`, or bf16,
            fp16 or fp32, which are quantised. T may be 0, and differ between ranks and calls.
        ids : array [T, K], int32 or int64, contiguous
            Distinct within a token; negative ones are none, and with `large_ids_are_none` also those of E
            and more. None: those of
            `handle` and their weights again, for as many other tokens. All ranks do so, or none.
        weights : array [T, K], float32 or bfloat16, contiguous, optional
            None: 1.
        x_scale : array [T, ceil(H / 128)], float32
            Scales of FP8 tokens.
        handle : ExchangeHandle, optional
            The handle to fill, or to reuse. None: a new one.

        Returns
        -------
        ExchangeHandle

        Raises
        ------
        InvalidArgument, ShapeMismatch, DTypeMismatch, CapacityExceeded
            Before anything is sent.
        Timeout, Aborted
            The exchange is dead then; the world lives.
        Unsupported
            If a gradient is asked for.
        """
        handle, call, keep = self._send_call(x, ids, weights, x_scale, handle)
        with self._lock:
            check(
                library.sy_exchange_dispatch_send(self._open(), byref(call), handle._open())
            )
        del keep
        _note_sent(handle, x, call)
        return handle

    def _send_call(
        self, x: Any, ids: Any, weights: Any, x_scale: Any, handle: ExchangeHandle | None
    ) -> tuple[ExchangeHandle, _abi.DispatchInput, list[Any]]:
        """The handle, the call, and what must live until it is made."""
        _arrays.refuse_gradient(x, weights)
        if ids is None and handle is None:
            raise InvalidArgument("there are no ids, and no handle whose ids are reused; pass either")
        if handle is None:
            handle = self.make_handle()
        _require_handle(handle)
        call = _abi.DispatchInput(reuse=int(ids is None))
        keep = [_put(call, "x", x)]
        for name, array in (("x_scale", x_scale), ("ids", ids), ("weights", weights)):
            if array is not None:
                keep.append(_put(call, name, array))
        call.stream = self._stream(x)
        return handle, call, keep

    def dispatch_recv(
        self,
        handle: ExchangeHandle,
        *,
        out: Any = None,
        scales_out: Any = None,
        exact: bool = False,
    ) -> Received:
        """Wait for all ranks' tokens.

        Parameters
        ----------
        handle : ExchangeHandle
            The handle from `dispatch_send`.
        out : array [capacity, H], or [own experts, size, H] in a padded layout, optional
            For the rows. None: a new one of `rows_needed` rows.
        scales_out : array [capacity, ceil(H / 128)], float32, optional
            For scales of FP8 rows.
        exact : bool
            Wait for all ranks' counts on the host, and make arrays of exactly as many rows.

        Returns
        -------
        Received
            It holds tensors of torch if x was one, else arrays of numpy.

        Raises
        ------
        CapacityExceeded
            If `out` is too small; it can be received again.
        Error
            As `dispatch_send` does.
        """
        _require_handle(handle)
        exact = bool(_values.flag("exact", exact))
        like = handle._like
        if like is None:
            raise InvalidArgument("nothing was sent with the handle; call dispatch_send() first")
        rows = self._exact_rows(handle, like) if exact and out is None else None
        received, call, keep = self._receive_call(handle, like, rows, out, scales_out)
        with self._lock:
            check(
                library.sy_exchange_dispatch_recv(self._open(), byref(call), handle._open())
            )
        del keep
        return received

    def _receive_call(
        self, handle: ExchangeHandle, like: Any, rows: int | None, out: Any, scales_out: Any
    ) -> tuple[Received, _abi.DispatchOutput, list[Any]]:
        """What is received, the call, and what must live until it is made. `rows`: if there is no
        `out`; None: as many as there can be."""
        if out is not None:
            out = self._flat(out)
            rows = out.shape[0]
        elif rows is None:
            rows = self.rows_needed
        if out is None:
            out = _arrays.empty(like, "x", (rows, self.hidden), _TYPES[self._code])
        fp8 = self._code == _abi.F8_E4M3
        if fp8 and scales_out is None:
            scales_out = _arrays.empty(like, "x", (rows, (self.hidden + 127) // 128), "float32")
        experts = len(self.own_experts)
        received = Received(
            rows=out, ends=_arrays.empty(like, "x", (experts,), "int32"),
            counts=_arrays.empty(like, "x", (experts,), "int32"),
            num_rows=_arrays.empty(like, "x", (1,), "int32"),
            origins=_arrays.empty(like, "x", (rows, 3), "int32"),
            weights=_arrays.empty(like, "x", (rows,), "float32"), scales=scales_out,
            layout=self.layout, handle=handle,
        )
        call = _abi.DispatchOutput(stream=self._stream(like))
        keep = []
        for name in ("rows", "ends", "counts", "num_rows", "origins", "weights"):
            keep.append(_put(call, name, getattr(received, name), write=True))
        if scales_out is not None:
            keep.append(_put(call, "scales", scales_out, write=True))
        return received, call, keep

    def dispatch(
        self,
        x: Any,
        ids: Any = None,
        weights: Any = None,
        *,
        x_scale: Any = None,
        handle: ExchangeHandle | None = None,
        out: Any = None,
        scales_out: Any = None,
        exact: bool = False,
    ) -> Received:
        """`dispatch_send` and `dispatch_recv`.

        Parameters
        ----------
        x, ids, weights, x_scale, handle
            See `dispatch_send`.
        out, scales_out, exact
            See `dispatch_recv`.

        Returns
        -------
        Received
        """
        # Before anything is sent: the other ranks would wait for what a refused call does not receive.
        exact = bool(_values.flag("exact", exact))
        # On processors a receive can be refused and made again when the send is done.
        if exact or self.backend != "cuda":
            handle = self.dispatch_send(x, ids, weights, x_scale=x_scale, handle=handle)
            return self.dispatch_recv(handle, out=out, scales_out=scales_out, exact=exact)
        handle, send, keep = self._send_call(x, ids, weights, x_scale, handle)
        received, receive, kept = self._receive_call(handle, _like(x), None, out, scales_out)
        with self._lock:
            check(
                library.sy_exchange_dispatch(
                    self._open(), byref(send), byref(receive), handle._open()
                )
            )
        del keep, kept
        _note_sent(handle, x, send)
        return received

    def _flat(self, out: Any) -> Any:
        """[own experts, size, H] as [rows, H], of the same memory."""
        described = _arrays.describe("out", out, write=True)[0]
        shape = _arrays.shape_of(described)
        if len(shape) not in (2, 3):
            raise ShapeMismatch(f"out is {list(shape)}; pass [rows, {self.hidden}]")
        if len(shape) == 2:
            return out
        flat = out.reshape(-1, shape[-1])
        if _arrays.describe("out", flat)[0].data != described.data:
            raise InvalidArgument("out has gaps between its experts; pass a contiguous array")
        return flat

    def _exact_rows(self, handle: ExchangeHandle, like: Any) -> int:
        rows = ctypes.c_int64()
        with self._lock:
            check(
                library.sy_exchange_rows_needed(
                    self._open(), handle._open(), self._stream(like), byref(rows)
                )
            )
        return rows.value

    # --------------------------------------------------------------------------------- combine

    def combine_send(self, rows: Any, handle: ExchangeHandle) -> None:
        """Send the results of the rows that were received with `handle`; waits for nobody.

        Parameters
        ----------
        rows : array [rows, H], or [own experts, size, H] in a padded layout
            Results of the exchange's combine type, in the order of the received rows.
        handle : ExchangeHandle

        Raises
        ------
        Error
            As `dispatch_send` does.
        """
        call, keep = self._combine_send_call(rows, handle)
        with self._lock:
            check(library.sy_exchange_combine_send(self._open(), byref(call), handle._open()))
        del keep

    def _combine_send_call(
        self, rows: Any, handle: ExchangeHandle
    ) -> tuple[_abi.CombineInput, list[Any]]:
        """The call, and what must live until it is made."""
        _arrays.refuse_gradient(rows)
        _arrays.refuse_nested("rows", rows)
        _require_handle(handle)
        if len(getattr(rows, "shape", ())) == 3:
            rows = rows.reshape(-1, rows.shape[-1])
        call = _abi.CombineInput(stream=self._stream(rows))
        return call, [rows, _put(call, "rows", rows)]

    def combine_recv(
        self,
        handle: ExchangeHandle,
        *,
        out: Any = None,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> Any:
        """Wait for the results of this rank's tokens, and sum them in fp32 in the order of k.

        Parameters
        ----------
        handle : ExchangeHandle
            The handle that `combine_send` had.
        out : array [T, H], optional
            bf16, fp16 or fp32. None: a new one of the combine type.
        scale, accumulate
            See `Experts.__call__`.

        Returns
        -------
        array [T, H]
            Sums, in `out` if it was given.

        Raises
        ------
        Error
            As `dispatch_send` does.
        """
        out, call, keep = self._combine_recv_call(handle, out, scale, accumulate)
        with self._lock:
            check(library.sy_exchange_combine_recv(self._open(), byref(call), handle._open()))
        _arrays.wrote(out)
        del keep
        return out

    def _combine_recv_call(
        self, handle: ExchangeHandle, out: Any, scale: float, accumulate: bool
    ) -> tuple[Any, _abi.CombineOutput, Any]:
        """Where the results go, the call, and what must live until it is made."""
        _require_handle(handle)
        if out is None:
            _values.refuse_accumulate(accumulate)
            if handle._like is None:
                raise InvalidArgument("nothing was dispatched with the handle; dispatch with it first")
            out = _arrays.empty(handle._like, "x", (handle.tokens, self.hidden), _TYPES[self._back])
        call = _abi.CombineOutput(
            accumulate=_values.flag("accumulate", accumulate), scale=scale, stream=self._stream(out)
        )
        keep = _put(call, "out", out, write=True)
        shape = _arrays.shape_of(call.out)
        if shape != (handle.tokens, self.hidden):
            raise ShapeMismatch(
                f"out is {list(shape)}; the handle's tokens need [{handle.tokens}, {self.hidden}]"
            )
        return out, call, keep

    def combine(
        self,
        rows: Array,
        handle: ExchangeHandle,
        *,
        out: Any = None,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> Array:
        """`combine_send` and `combine_recv`.

        Parameters
        ----------
        rows, handle
            See `combine_send`.
        out, scale, accumulate
            See `combine_recv`.

        Returns
        -------
        array [T, H]
        """
        send, keep = self._combine_send_call(rows, handle)
        out, receive, kept = self._combine_recv_call(handle, out, scale, accumulate)
        # Both halves are looked at before anything is sent: the other ranks would wait for the second.
        with self._lock:
            check(
                library.sy_exchange_combine(
                    self._open(), byref(send), byref(receive), handle._open()
                )
            )
        _arrays.wrote(out)
        del keep, kept
        return out

    # -------------------------------------------------------------------------------- the rest

    def check(self) -> None:
        """Raise what failed in earlier calls, for callers that replay graphs."""
        with self._lock:
            check(library.sy_exchange_check(self._open()))

    def stats(self) -> ExchangeStats:
        """Of this rank's last dispatch and last combine. On a GPU it waits for the device."""
        stats = _abi.ExchangeStats()
        with self._lock:
            check(library.sy_exchange_get_stats(self._open(), byref(stats)))
        names = [field.name for field in dataclasses.fields(ExchangeStats)]
        return ExchangeStats(**{name: getattr(stats, name) for name in names})

    def trace(self) -> dict[str, Any]:
        """What this rank did since its last dispatch began, in the Trace Event Format.

        On a GPU: when each block of the kernels of the last dispatch and the last combine since did
        its part. Synchronise the stream first.

        Raises
        ------
        InvalidArgument
            Unless the exchange was made with ``trace=True``.
        """
        with self._lock:
            return read_json(library.sy_exchange_trace, self._open())

    def _stream(self, array: Any) -> int | None:
        return _arrays.current_stream(array) if self.backend == "cuda" else None


def _like(x: Any) -> Any:
    """An array to make others like: nothing of the tokens themselves is kept."""
    return _arrays.empty(x, "x", (0,)) if _arrays.is_torch(x) or _arrays.is_numpy(x) else x


def _require_handle(handle: Any) -> None:
    if not isinstance(handle, ExchangeHandle):
        raise InvalidArgument(
            f"handle is {handle!r}; pass an ExchangeHandle: that of the dispatch (Received.handle), "
            "or of make_handle()"
        )


def _note_sent(handle: ExchangeHandle, x: Any, call: _abi.DispatchInput) -> None:
    handle._like = _like(x)
    if not call.reuse:
        handle.tokens = call.x.shape[0]


def _put(call: ctypes.Structure, name: str, array: Any, write: bool = False) -> Any:
    tensor, kept = _arrays.describe(name, array, write=write)
    setattr(call, name, tensor)
    return kept


def _gpu_of(device: Any) -> int | None:
    """The number of a GPU, -1 for the current one, None for the CPU."""
    if isinstance(device, int) and not isinstance(device, bool):
        return _values.integer("device", device, -1, 2**31 - 1)
    kind, _, number = str(device).partition(":")
    if kind == "cpu":
        return None
    if kind == "cuda" and (not number or number.isdigit()):
        return int(number) if number else -1
    raise InvalidArgument(f"device is {device!r}; use 'cpu', 'cuda', 'cuda:0' or a GPU's number")
