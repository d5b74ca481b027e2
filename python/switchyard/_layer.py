"""A whole MoE layer: gate, experts, shared expert."""

from __future__ import annotations

import ctypes
import os
import weakref
from ctypes import byref
from typing import TYPE_CHECKING, Any

import torch

from . import _abi, _arrays, _values
from ._activation import count_words, is_whole
from ._arrays import Kept
from ._library import check, library
from ._passes import Handle, Stats
from ._routing import Routing
from ._torch import apply_without_backward, layer_of, register_missing_backward
from ._watch import Watch
from ._weights import weights_of
from ._workspace import Workspace, choose_memory, world_of
from ._world import World, checked_world
from .errors import DTypeMismatch, InvalidArgument, ShapeMismatch, Unsupported

_NO_COPY = (
    "a MoeLayer cannot be {}: it is a running layer of this process over tensors of others. Take it out of "
    "the module first, and make another of the copy with MoeLayer.from_hf() or from_checkpoint()"
)

# Layers by number: operators of torch take numbers but no objects.
_layers: weakref.WeakValueDictionary[int, MoeLayer] = weakref.WeakValueDictionary()

_ROWS = (torch.bfloat16, torch.float16, torch.float32)


def _device(device: Any) -> torch.device:
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        where = None
    if where is None or where.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device is {device!r}; pass 'cpu', 'cuda' or 'cuda:N'")
    return where


def _require_tensors(**arguments: Any) -> None:
    for name, array in arguments.items():
        if not isinstance(array, torch.Tensor) and (array is not None or name == "hidden_states"):
            raise InvalidArgument(f"{name} is a {type(array).__name__}; pass a torch.Tensor")


class MoeLayer(torch.nn.Module):
    """Gate, dispatch, experts, shared expert and combine of one layer, as one program per rank.

    Made by `from_checkpoint` or `from_hf`. Collective: every rank of the world makes it, and calls
    it with its own tokens.
    """

    if TYPE_CHECKING:
        # torch says of a module's call that it returns anything.
        def __call__(self, hidden_states: torch.Tensor, **more: Any) -> torch.Tensor: ...

    def __init__(
        self,
        handle: ctypes.c_void_p,
        keep: Kept | None = None,
        block: torch.nn.Module | None = None,
        watch: Watch | None = None,
    ) -> None:
        super().__init__()
        self._layer = Handle(handle, keep)
        _layers[self._layer._number] = self
        # The block's tensors can be asked for a gradient. They are not this module's own: the block saves
        # and loads them.
        self._watch = watch
        self._weights = () if watch is None else tuple(watch.tensors)
        # A module that is an attribute would be part of this one.
        self._block = None if block is None else weakref.ref(block)
        #: How the layer chooses experts, where it was made by `from_hf`.
        self.routing: Routing | None = None

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        layer: int,
        *,
        world: World | None = None,
        max_tokens: int = 8192,
        device: torch.device | str = "cpu",
        workspace: Workspace | None = None,
        workspace_slot: int = 0,
        compute: Any = None,
        reserved_sms: int = 0,
        num_threads: int = 0,
        deadline: float = 0.0,
        trace: bool = False,
        pre_sum_per_host: bool = False,
        recorded_steps: int = 0,
        name: str = "",
    ) -> MoeLayer:
        """A layer of a checkpoint in Hugging Face format (config.json and safetensors).

        The weights are mapped from the files; on GPUs this rank's experts are copied there.

        Parameters
        ----------
        path : path
            The directory.
        layer : int
            Index of the layer in the model.
        world : World, optional
            None: that of `workspace`, or a world of one.
        max_tokens : int
            Most tokens of a call on this rank; the same on all ranks.
        device : torch.device or str
        workspace, workspace_slot
            As `workspace` and `slot` of `Memory`.
        compute : str or dtype, optional
            "bf16", "f32" or "f8_e4m3". None: by the weights' type.
        reserved_sms, num_threads, deadline, trace, pre_sum_per_host, recorded_steps, name
            See `Placement`, `Diagnostics` and `Numerics`.

        Raises
        ------
        InvalidConfig, InvalidFile, MissingTensor, ShapeMismatch, DTypeMismatch
            For a checkpoint that cannot be used.
        InvalidArgument
            If `layer` is no MoE layer.
        Unsupported, SpecMismatch, Timeout
        """
        world = checked_world(world) or world_of(workspace)
        where = _device(device)
        cuda = where.type == "cuda"
        if not is_whole(layer) or not 0 <= layer < 1 << 31:
            raise InvalidArgument(f"layer is {layer!r}; pass the index of a layer, {count_words(layer, 0)}")
        options = _abi.LayerOptions(
            backend=_abi.CUDA if cuda else _abi.CPU, max_tokens=max_tokens, num_threads=num_threads,
            device=-1 if where.index is None or not cuda else where.index,
            reserved_sms=reserved_sms,
            compute=_arrays.chosen_dtype("compute", compute, _arrays.COMPUTE),
            trace=_values.flag("trace", trace), deadline_seconds=deadline,
            pre_sum_per_host=_values.flag("pre_sum_per_host", pre_sum_per_host),
            recorded_steps=recorded_steps, name=_values.text("name", name),
        )
        handle = choose_memory(options, workspace, workspace_slot)
        with world._lock:
            check(
                library.sy_layer_from_checkpoint(
                    world._open(), _values.path("path", path), layer, byref(options), byref(handle)
                )
            )
        made = cls(handle)
        made._layer._place = (world.rank, world.size)
        return made

    @classmethod
    def from_hf(
        cls,
        block: torch.nn.Module,
        *,
        world: World | None = None,
        max_tokens: int = 8192,
        workspace: Workspace | None = None,
        workspace_slot: int = 0,
        compute: Any = None,
        reserved_sms: int = 0,
        num_threads: int = 0,
        deadline: float = 0.0,
        trace: bool = False,
        pre_sum_per_host: bool = False,
        recorded_steps: int = 0,
        name: str = "",
        check: bool = True,
    ) -> MoeLayer:
        """A sparse MoE block of transformers 5, such as ``model.model.layers[0].mlp``, with its router
        and shared expert. Matrices are used where they are.

        How the block routes is found out by running it, without its experts, on tokens at which the rules
        that there are differ, for which its weights must be loaded. Make another layer if the block is
        moved or cast, or gets other parameters; a call says so. Call `refresh` after you wrote small
        weights that the layer keeps a copy of through ``.data``, which PyTorch does not count as a change.
        No other thread may run the block meanwhile.

        Parameters
        ----------
        block : torch.nn.Module
            With `experts` that go through the interface of transformers, `gate` or `router`, and
            perhaps a shared expert of gate_proj, up_proj and down_proj.
        world : World, optional
            None: that of `workspace`, or a world of one. With more ranks, every rank's block has all
            experts.
        max_tokens, workspace, workspace_slot, compute, reserved_sms, num_threads, deadline, trace
        pre_sum_per_host, recorded_steps, name
            See `from_checkpoint`.
        check : bool
            Compare the layer with the block, on the same tokens.

        Raises
        ------
        Unsupported
            For what Switchyard does not have, naming the class and the attribute; or if layer and
            block differ, in their weights or, unless `check` is False, in their outputs.
        """
        from . import _hf_block

        if not isinstance(block, torch.nn.Module):
            raise InvalidArgument(f"block is a {type(block).__name__}; pass a torch.nn.Module")
        _values.flag("check", check)
        world = checked_world(world) or world_of(workspace)
        with torch.inference_mode(False), torch.no_grad():
            parts = _hf_block.read(block)
            options = _abi.LayerOptions(
                max_tokens=max_tokens, num_threads=num_threads, reserved_sms=reserved_sms,
                compute=_arrays.chosen_dtype("compute", compute, _arrays.COMPUTE),
                trace=_values.flag("trace", trace), deadline_seconds=deadline,
                pre_sum_per_host=_values.flag("pre_sum_per_host", pre_sum_per_host),
                recorded_steps=recorded_steps, name=_values.text("name", name),
            )
            handle = choose_memory(options, workspace, workspace_slot)
            layer = cls._of_block(block, parts, world, options, handle)
            if check:
                at_once = min(max_tokens, parts.x.shape[0])
                out = torch.cat([layer(x) for x in parts.x.split(at_once)])
                try:
                    _hf_block.compare(type(block).__name__, parts, out, layer._layer.compute)
                except BaseException:
                    layer.close()
                    raise
        return layer

    @classmethod
    def _of_block(
        cls,
        block: torch.nn.Module,
        parts: Any,
        world: World,
        options: _abi.LayerOptions,
        handle: ctypes.c_void_p,
    ) -> MoeLayer:
        """Over the tensors of a block that was read, as the handle that is still null."""
        found = parts.found
        given = found.options
        activation = given["activation"]
        weights, (count, intermediate, hidden), keep = weights_of(
            found.w13, found.w2, activation, given.get("order", "gate_up"),
            given.get("transposed", False), given.get("w13_scale"), given.get("w2_scale"),
            given.get("block"), given.get("w13_bias"), given.get("w2_bias"),
            given.get("weight_format"),
        )

        def described(name: str, tensor: torch.Tensor) -> _abi.Tensor:
            return keep.describe(name, tensor, copied=True)

        weights.router = described("router", parts.router)
        for name in ("router_bias", "correction_bias", "shared_sigmoid"):
            tensor = getattr(parts, name)
            if tensor is not None:
                setattr(weights, name, described(name, tensor))
        if parts.shared is not None:
            for name, tensor in zip(("shared_gate", "shared_up", "shared_down"), parts.shared):
                setattr(weights, name, _abi.Matrices(weight=described(name, tensor[None])))
        routing = parts.routing._to_c(parts.correction_bias is not None)
        spec = _abi.LayerSpec(
            routing=ctypes.pointer(routing), hidden=hidden, intermediate=intermediate,
            num_experts=count, top_k=parts.top_k, router_bias=int(parts.router_bias is not None),
            expert_bias=int(given.get("w13_bias") is not None),
            shared_intermediate=0 if parts.shared is None else parts.shared[0].shape[0],
            shared_sigmoid_gate=int(parts.shared_sigmoid is not None),
            activation=activation._to_c(),
        )
        cuda = found.w2.device.type == "cuda"
        options.backend = _abi.CUDA if cuda else _abi.CPU
        options.device = (found.w2.device.index or 0) if cuda else -1
        with world._lock:
            check(
                library.sy_layer_create(
                    world._open(), byref(spec), byref(weights), byref(options), byref(handle)
                )
            )
        layer = cls(handle, keep, block, parts.watch)
        layer._layer._place = (world.rank, world.size)
        layer._layer._stored = _arrays.DTYPE_NAMES[weights.down.weight.dtype]
        layer.routing = parts.routing
        return layer

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        token_ids: torch.Tensor | None = None,
        ids_out: torch.Tensor | None = None,
        weights_out: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One pass; every rank of the world must call it.

        Parameters
        ----------
        hidden_states : Tensor [..., H]
            bf16, fp16 or fp32. All dimensions but the last are tokens, of which there may be none.
        token_ids : Tensor [...], int32, optional
            For hash-routed layers only.
        ids_out, weights_out : Tensor [T, K], int32 and float32, optional
            Where to put the routing that was used.
        out : Tensor [..., H], optional
            Contiguous.

        Returns
        -------
        Tensor [..., H]

        Raises
        ------
        Error
            As ``Experts.__call__`` does.
        """
        _require_tensors(hidden_states=hidden_states, token_ids=token_ids, out=out)
        if torch.compiler.is_compiling():
            return self._compiled(hidden_states, token_ids, ids_out, weights_out, out)
        return self._now(hidden_states, token_ids, ids_out, weights_out, out)

    def _compiled(
        self,
        hidden_states: torch.Tensor,
        token_ids: torch.Tensor | None,
        ids_out: torch.Tensor | None,
        weights_out: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """As an operator that torch.compile() knows: addresses are read when compiled code runs."""
        weights = [w for w in self._weights if w.requires_grad] if torch.is_grad_enabled() else []
        if out is None and ids_out is None and weights_out is None:
            return torch.ops.switchyard.moe_layer(hidden_states, token_ids, weights, self._layer._number)
        if weights or (torch.is_grad_enabled() and hidden_states.requires_grad):
            # An operator that writes has no gradient, not even one that is refused.
            return self._now(hidden_states, token_ids, ids_out, weights_out, out)
        if out is None:
            out = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
        torch.ops.switchyard.moe_layer_out(
            hidden_states, token_ids, out, ids_out, weights_out, self._layer._number
        )
        return out

    # Dynamo would trace addresses that are none, also where it gave up on forward() and goes on with what that calls.
    @torch.compiler.disable
    def _now(
        self,
        hidden_states: torch.Tensor,
        token_ids: torch.Tensor | None,
        ids_out: torch.Tensor | None,
        weights_out: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Without a compiler."""
        self._refuse_changes()
        self._check_arguments(hidden_states, token_ids, out)
        if out is None:
            return apply_without_backward(
                lambda: self._forward(hidden_states, token_ids, ids_out, weights_out, None),
                hidden_states,
                *self._weights,
            )
        _arrays.refuse_gradient(hidden_states, *self._weights)
        return self._forward(hidden_states, token_ids, ids_out, weights_out, out)

    def _forward(
        self,
        hidden_states: torch.Tensor,
        token_ids: torch.Tensor | None,
        ids_out: torch.Tensor | None,
        weights_out: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if out is None:
            out = torch.empty(hidden_states.shape, dtype=x.dtype, device=x.device)
        if token_ids is not None:
            token_ids = token_ids.reshape(-1)
        self._layer._run(
            x, None, None, out.view(x.shape), token_ids=token_ids, ids_out=ids_out,
            weights_out=weights_out,
        )
        return out

    def _check_arguments(self, hidden_states: Any, token_ids: Any, out: Any) -> None:
        for name, array in (("hidden_states", hidden_states), ("token_ids", token_ids), ("out", out)):
            _arrays.refuse_nested(name, array)
        shape, hidden = tuple(hidden_states.shape), self._layer.hidden
        if not shape or shape[-1] != hidden:
            raise ShapeMismatch(f"hidden_states is {shape}; its last dimension has to be H, {hidden}")
        if hidden_states.device.type not in ("cpu", "cuda"):
            raise InvalidArgument(f"hidden_states are on {hidden_states.device}; pass a tensor on cpu or cuda")
        if hidden_states.dtype not in _ROWS:
            raise DTypeMismatch(
                f"hidden_states is {_arrays.dtype_name(hidden_states.dtype)}; pass bfloat16, float16 or float32"
            )
        if out is not None and tuple(out.shape) != shape:
            raise ShapeMismatch(f"out is {tuple(out.shape)}; it has to be as hidden_states, {shape}")
        if out is not None and not out.is_contiguous():
            raise InvalidArgument(f"out has strides {out.stride()}; pass a contiguous tensor")
        if token_ids is not None and self._watch is not None:
            raise InvalidArgument("token_ids are given, but no block of from_hf() routes by them; leave them out")
        if token_ids is not None and token_ids.dtype != torch.int32:
            # Tokenizers give int64. To see whether the ids fit would wait for a GPU.
            raise DTypeMismatch(
                f"token_ids is {_arrays.dtype_name(token_ids.dtype)}; pass token_ids.int(), as int32 holds the ids of "
                "any vocabulary"
            )
        if token_ids is not None and tuple(token_ids.shape) != shape[:-1]:
            raise ShapeMismatch(f"token_ids is {tuple(token_ids.shape)}; pass one for each token, {shape[:-1]}")

    def _refuse_changes(self) -> None:
        """Refuse to compute with tensors that the block does not have any more."""
        block = None if self._block is None else self._block()
        if block is None or self._watch is None:
            return
        changed = self._watch.changed(block)
        if changed is not None:
            raise InvalidArgument(
                f"{type(block).__name__}.{changed} is another tensor, or elsewhere, than when this layer was "
                "made of the block (it was moved, cast or assigned); make the layer anew with "
                "MoeLayer.from_hf(block). Values that are written in place are seen"
            )

    def __deepcopy__(self, memo: Any) -> MoeLayer:
        raise Unsupported(_NO_COPY.format("copied"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Unsupported(_NO_COPY.format("copied or pickled"))

    def check(self) -> None:
        """As ``Experts.check``."""
        self._layer.check()

    def refresh(self) -> None:
        """As ``Experts.refresh``; the router among what may have changed."""
        self._layer.refresh()

    def stats(self) -> Stats:
        """As ``Experts.stats``."""
        return self._layer.stats()

    def trace(self) -> dict[str, Any]:
        """As ``Experts.trace``."""
        return self._layer.trace()

    def recording(self) -> dict[str, Any]:
        """As ``Experts.recording``."""
        return self._layer.recording()

    def close(self) -> None:
        """As ``Experts.close``."""
        self._layer.close()

    def extra_repr(self) -> str:
        layer = self.__dict__.get("_layer")
        return "not made" if layer is None else f"{layer._shown()}, {layer._state()}"


# --------------------------------------------------------------------------------- compiled code

_operator = torch.library.Library("switchyard", "FRAGMENT")
# weights: those of the block that want a gradient, so that the output depends on them.
_operator.define("moe_layer(Tensor x, Tensor? token_ids, Tensor[] weights, int layer) -> Tensor")
_operator.define(
    "moe_layer_out(Tensor x, Tensor? token_ids, Tensor(a!) out, Tensor(b!)? ids_out, Tensor(c!)? weights_out, "
    "int layer) -> ()"
)


def _module_of(number: int) -> MoeLayer:
    layer_of(number)  # says what to do if it is gone
    return _layers[number]


def _moe_layer(
    x: torch.Tensor, token_ids: torch.Tensor | None, weights: list[torch.Tensor], layer: int
) -> torch.Tensor:
    with torch.no_grad():
        return _module_of(layer)._now(x, token_ids, None, None, None)


def _moe_layer_out(
    x: torch.Tensor,
    token_ids: torch.Tensor | None,
    out: torch.Tensor,
    ids_out: torch.Tensor | None,
    weights_out: torch.Tensor | None,
    layer: int,
) -> None:
    with torch.no_grad():
        _module_of(layer)._now(x, token_ids, ids_out, weights_out, out)


_operator.impl("moe_layer", _moe_layer, "CompositeExplicitAutograd")
_operator.impl("moe_layer_out", _moe_layer_out, "CompositeExplicitAutograd")
torch.library.register_fake(
    "switchyard::moe_layer",
    lambda x, token_ids, weights, layer: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    lib=_operator,
)
torch.library.register_fake("switchyard::moe_layer_out", lambda *arguments: None, lib=_operator)
register_missing_backward("switchyard::moe_layer", (0, 2), _operator)
