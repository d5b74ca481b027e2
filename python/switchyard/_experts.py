"""One layer's experts over the caller's tensors."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import byref
from typing import Any, Literal

from . import _abi, _arrays, _cache, _values
from ._activation import Activation
from ._arrays import Array
from ._library import check, library
from ._passes import Handle
from ._routing import Routing
from ._values import count_text
from ._weights import Order, compute_code, put_placement, weights_of
from ._workspace import Workspace, choose_memory, creating, world_of
from ._world import World, checked_world
from .errors import InvalidArgument, MissingTensor, ShapeMismatch

BadIds = Literal["raise", "skip"]
CapacityRule = Literal["slots", "tokens"]


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
        weights, sizes, keep = weights_of(
            w13, w2, activation, order, transposed, w13_scale, w2_scale, block, w13_bias, w2_bias
        )
        count, intermediate, hidden = sizes
        num_experts = _num_experts(num_experts, count, placement, world)
        put_placement(weights, placement)
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
            compute=compute_code(compute, weights.down.weight.dtype),
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
        weights, sizes, keep = weights_of(
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
        put_placement(weights, placement)
        with self._lock:
            check(library.sy_layer_rebind(self._open(), byref(weights)))
            # Passes under way may still read the arrays that were bound before.
            if self.backend == "cuda":
                keep.keep(self._keep)
            self._set_keep(keep)
        self._parameters = keep.tensors


def _num_experts(given: int | None, count: int, placement: Sequence[int] | None, world: World) -> int:
    """Experts of all ranks, where this one's arrays have `count`."""
    if given is None:
        if world.size > 1 or placement is not None:
            raise InvalidArgument(
                f"w13 has {count_text(count, 'expert')}, and the world {count_text(world.size, 'rank')}; say with "
                "num_experts how many experts all ranks have together"
            )
        given = count
    num_experts = _values.integer("num_experts", given, 1, 2**31 - 1)
    places = num_experts if placement is None else len(placement)
    own = len(world.own_experts(places))
    if count not in (own, places):
        raise ShapeMismatch(
            f"w13 has {count_text(count, 'expert')}; pass this rank's {own}, or all {places} of "
            f"{'num_experts' if placement is None else 'placement'}"
        )
    return num_experts


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
        *(_cache.fingerprint("w13", array) for array in large),
        _cache.fingerprint("w2", w2),
        *map(_cache.fingerprint, names, small),
        top_k,
        rest,
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
