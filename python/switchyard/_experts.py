"""One layer's experts over the caller's tensors."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from ctypes import byref
from typing import Any

from . import _abi, _arrays, _cache, _four_bit, _values
from ._activation import Activation
from ._arrays import Array
from ._four_bit import WeightFormat
from ._library import check, library
from ._options import KINDS, Diagnostics, Memory, Numerics, Placement, with_new_names
from ._passes import Handle
from ._routing import Routing
from ._values import count_text
from ._weights import Order, compute_code, put_placement, weights_of
from ._workspace import Workspace, choose_memory, creating, world_of
from ._world import World
from .errors import InvalidArgument, MissingTensor, ShapeMismatch


class Experts(Handle):
    """One layer's experts over the caller's tensors: on a CPU it copies no weight matrix.

    On a GPU it copies those of four bits, and those of another type than it computes in.

    ``out[t] = sum_k topk_weights[t, k] * down_e(act(gate_e x[t], up_e x[t]))``, with
    ``e = topk_ids[t, k]``. Collective: every rank of the world makes it, and calls it.

    Parameters
    ----------
    w13 : array [n, 2 I, H], or [n, I, H] where the activation is plain
        Gate and up projections, in `order`; bf16, fp16, fp32 or float8_e4m3fn. n is the number of
        this rank's experts, or of all. Any strides. Or two arrays, gate and up, of [n, I, H] each.
        Weights of four bits, as `weight_format` says: [n, 2 I, H / 2] uint8 or int8, [n, 2 I, H / 8]
        int32, or blocks [n, 2 I, H / 32, 16] uint8, with contiguous rows.
    w2 : array [n, H, I]
        Down projections.
    top_k : int
        Experts of a token, K.
    max_tokens : int
        Most tokens of a call on this rank; the same on all ranks.
    activation : Activation
    order : {"gate_up", "up_gate", "interleaved"}
        Order of w13's rows: all of gate and then all of up, the other way round, or gate and up in turn.
    transposed : bool
        w13 is [n, H, 2 I] and w2 [n, I, H], as in GPT-OSS and Llama-4.
    w13_scale, w2_scale : array
        Scales of FP8 weights, f32 or float8_e8m0fnu: [n, ceil(2 I / block), ceil(H / block)], of blocks;
        [n, 2 I] or [n, 2 I, 1], of rows; [n], [n, 1], [n, 1, 1] or, gate and up apart, [n, 2], of
        whole matrices. Of weights of four bits, with contiguous rows and not transposed, [n, 2 I,
        H / 32] float8_e8m0fnu or uint8 of "mxfp4"; [n, 2 I, H / 32 or H / 128] f32, bf16 or fp16 of
        "int4".
    block : (int, int), optional
        Rows and columns of a block of w13 and w2, not transposed. None: 128 x 128 where a scale's
        shape says that it is of blocks.
    weight_format : {"mxfp4", "int4"}, optional
        The format of packed w13 and w2: see docs/four_bit.md. None: they are not packed, or
        float4_e2m1fn_x2.
    w13_zero, w2_zero : array, uint8, optional
        Zero points of "int4", one in a byte, beside the scales and of their shape. None: 8.
    w13_bias, w2_bias : array [n, 2 I], [n, H]
        Optional.
    routing : Routing, optional
        How `from_logits` chooses experts.
    correction_bias : array [E], optional
        Correction bias of that routing.
    numerics : Numerics, optional
        How it computes, and which slots it leaves out.
    placement : Placement, optional
        Where its experts are, and what computes them.
    memory : Memory, optional
        What it works in. None: memory of its own.
    diagnostics : Diagnostics, optional
        What it records, and how long it waits.
    **renamed
        Fields of those four by the names that they had here in 0.1.0: they go with 0.3, and a
        DeprecationWarning names the new form.

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
        weight_format: WeightFormat | None = None,
        w13_zero: Any = None,
        w2_zero: Any = None,
        w13_bias: Any = None,
        w2_bias: Any = None,
        routing: Routing | None = None,
        correction_bias: Any = None,
        numerics: Numerics | None = None,
        placement: Placement | None = None,
        memory: Memory | None = None,
        diagnostics: Diagnostics | None = None,
        **renamed: Any,
    ) -> None:
        given = dict(numerics=numerics, placement=placement, memory=memory, diagnostics=diagnostics)
        given = with_new_names(given | renamed)
        numerics, placement, memory, diagnostics = (given.pop(of, None) or kind() for of, kind in KINDS.items())
        for unknown in given:
            raise TypeError(f"Experts() got an unexpected keyword argument {unknown!r}")
        if routing is not None and not isinstance(routing, Routing):
            raise InvalidArgument(f"routing is {routing!r}; pass a switchyard.Routing")
        world = placement.world or world_of(memory.workspace)
        weights, sizes, keep = weights_of(
            w13, w2, activation, order, transposed, w13_scale, w2_scale, block, w13_bias, w2_bias,
            weight_format, w13_zero, w2_zero,
        )
        count, intermediate, hidden = sizes
        put_placement(weights, placement.experts)
        if correction_bias is not None:
            if routing is None:
                raise InvalidArgument("correction_bias is given without routing; pass both")
            weights.correction_bias = keep.describe("correction_bias", correction_bias, copied=True)
        c_routing = (routing or Routing())._to_c(correction_bias is not None)
        spec = _abi.LayerSpec(
            routing=ctypes.pointer(c_routing), hidden=hidden, intermediate=intermediate,
            num_experts=_num_experts(placement, count, world), top_k=top_k,
            expert_bias=int(w13_bias is not None or w2_bias is not None),
            weight_on_input=int(numerics.weight_on_input), capacity_factor=numerics.capacity_factor,
            capacity_rule=int(numerics.capacity_rule == "tokens"), activation=activation._to_c(),
        )
        options = _options_of(numerics, placement, diagnostics, weights.down.weight, max_tokens)
        with creating(world, memory.workspace):
            handle = choose_memory(options, memory.workspace, memory.slot)
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
        self._weight_format = weight_format
        self._sizes = sizes
        self._has_biases = w13_bias is not None

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
            The router's, its bias included; float32 or bfloat16, with contiguous rows.
        ids_out, weights_out : array [T, K], int32 and float32, optional
            Where to put the routing that was used.
        x_scale, out, accumulate, scale
            See ``__call__``.

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
        _arrays.refuse_gradient(x, logits, *self._parameters)
        if out is None:
            out = self._new_out(x, x_scale, accumulate)
        self._run(
            x, None, None, out, x_scale, accumulate, scale, logits=logits, ids_out=ids_out,
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
        w13_zero: Any = None,
        w2_zero: Any = None,
        w13_bias: Any = None,
        w2_bias: Any = None,
        placement: Sequence[int] | None = None,
    ) -> None:
        """Use other arrays of the same shapes, types and layout.

        Passes that were enqueued before still read the old ones, and graphs that captured the layer
        always do.

        Parameters
        ----------
        w13, w2, w13_scale, w2_scale, w13_zero, w2_zero, w13_bias, w2_bias
            See `Experts`.
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
        weights, sizes, keep = weights_of(
            w13, w2, self.activation, self.order, self.transposed, w13_scale, w2_scale, self._block,
            w13_bias, w2_bias, self._weight_format, w13_zero, w2_zero,
        )
        if sizes != self._sizes:
            raise ShapeMismatch(
                "w13 and w2 make {} with I {} and H {}; the layer was made of {}, {} and {}".format(
                    count_text(sizes[0], "expert"), *sizes[1:], *self._sizes
                )
            )
        put_placement(weights, placement)
        with self._lock:
            check(library.sy_layer_rebind(self._open(), byref(weights)))
            # Passes under way may still read the arrays that were bound before.
            if self.backend == "cuda":
                keep.keep(self._keep)
            self._set_keep(keep)
        self._parameters = keep.tensors


def _num_experts(placement: Placement, count: int, world: World) -> int:
    """Experts of all ranks, where this one's arrays have `count`."""
    if placement.num_experts is None:
        if world.size > 1 or placement.experts is not None:
            raise InvalidArgument(
                f"w13 has {count_text(count, 'expert')}, and the world {count_text(world.size, 'rank')}; say with "
                "num_experts how many experts all ranks have together"
            )
        return count
    places = placement.num_experts if placement.experts is None else len(placement.experts)
    own = len(world.own_experts(places))
    if count not in (own, places):
        raise ShapeMismatch(
            f"w13 has {count_text(count, 'expert')}; pass this rank's {own}, or all {places} of "
            f"{'num_experts' if placement.experts is None else 'placement'}"
        )
    return placement.num_experts


def _options_of(
    numerics: Numerics, placement: Placement, diagnostics: Diagnostics, w2: _abi.Tensor, max_tokens: int
) -> _abi.LayerOptions:
    device = placement.device
    cuda = w2.device_type == _abi.CUDA
    if device is not None and not cuda:
        raise InvalidArgument(
            f"device is {device!r}, but w2 is in host memory, so a CPU computes; leave it None, or move "
            "the weights to the GPU"
        )
    return _abi.LayerOptions(
        backend=_abi.CUDA if cuda else _abi.CPU, max_tokens=max_tokens,
        num_threads=placement.num_threads,
        device=(w2.device_id if device is None else device) if cuda else -1,
        reserved_sms=placement.reserved_sms, compute=compute_code(numerics.compute, w2.dtype),
        trace=int(diagnostics.trace), bad_ids=int(numerics.bad_ids == "skip"),
        large_ids_are_none=int(numerics.large_ids_are_none),
        pre_sum_per_host=int(numerics.pre_sum_per_host), deadline_seconds=diagnostics.deadline,
        recorded_steps=diagnostics.recorded_steps, name=_values.text("name", diagnostics.name),
    )


def workspace_for(
    w13: Any, w2: Any, *, top_k: int, max_tokens: int, numerics: Numerics, placement: Placement, **options: Any
) -> Workspace:
    """A workspace for layers of weights of this form, with these options. Collective, as they are."""
    # A layer for one token tells what the library makes of the weights: sizes, and the type to compute in.
    with contextlib.closing(
        Experts(w13, w2, top_k=top_k, max_tokens=1, numerics=numerics, placement=placement, **options)
    ) as layer:
        form = _four_bit.format_of("w2", w2, options.get("weight_format"))
        return Workspace(
            placement.world, hidden=layer.hidden, intermediate=layer.intermediate,
            experts=layer.num_experts if placement.experts is None else len(placement.experts),
            top_k=top_k, max_tokens=max_tokens, compute=layer.compute,
            weight_on_input=numerics.weight_on_input, activation=layer.activation,
            device=layer.device, reserved_sms=placement.reserved_sms,
            num_threads=placement.num_threads, pre_sum_per_host=numerics.pre_sum_per_host,
            weight_format=None if form is None else form.name,
        )


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
        See ``Experts.__call__``.
    **options
        See `Experts`, without `top_k`.

    Returns
    -------
    array [T, H]

    Raises
    ------
    Error
        As `Experts` and ``Experts.__call__`` do.
    """
    layer = cached(
        w13, w2, top_k=_arrays.shape("topk_ids", topk_ids, 2)[1],
        tokens=_arrays.shape("x", x, 2)[0], **with_new_names(options),
    )
    return layer(
        x, topk_ids, topk_weights, x_scale=x_scale, out=out, accumulate=accumulate, scale=scale
    )


def cached(w13: Any, w2: Any, *, top_k: int, tokens: int, **options: Any) -> Experts:
    """The layer of these weights; a new one where `tokens` are more than that takes."""
    names = ("w13_scale", "w2_scale", "w13_zero", "w2_zero", "w13_bias", "w2_bias", "correction_bias")
    small: list[Any] = [options.get(name) for name in names]
    rest = _cache.options_key(
        [(name, value) for name, value in sorted(options.items()) if name not in (*names, "max_tokens")]
    )
    large = w13 if isinstance(w13, tuple) else (w13,)
    key = (
        *(_cache.fingerprint("w13", array) for array in large), _cache.fingerprint("w2", w2),
        *map(_cache.fingerprint, names, small), top_k, rest,
    )
    found = _cache.find(key, small, lambda layer: tokens <= layer.max_tokens)
    if found is not None:
        return found
    most = options.pop("max_tokens", None) or max(1024, 1 << (tokens - 1).bit_length())
    layer = Experts(w13, w2, top_k=top_k, max_tokens=max(most, tokens), **options)
    # The cache must not keep weights alive: it forgets the layer when one of them goes.
    layer._forget_arrays()
    layer._parameters = _cache.WeakTensors(list(layer._parameters))
    _cache.remember(key, layer, (*large, w2), small)
    return layer
