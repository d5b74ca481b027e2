"""Expert parallelism of Hugging Face transformers in one kernel: dispatch, experts and combine over the ranks.

transformers shards an experts module over the ranks of a group, and calls an implementation with the tokens
of this rank and the numbers that experts have in the whole model. 5.24 and newer look it up in
EPImplementationInterface. Before, a plan of parallelism named styles, one of which can be Switchyard's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from . import _hf
from ._serving import promised, refuse_too_few_sms
from ._torch import apply_without_backward
from ._values import count_text
from ._world import World
from .errors import CapacityExceeded, InvalidArgument, Unsupported

# Where ranks hold batches of their own, none of them knows how many tokens the others have. They agree on
# the most beforehand.
_MOST_TOKENS = 8192
# A layer's arrays that another module, or another address, may give it.
_ARRAYS = ("w13_scale", "w2_scale", "w13_bias", "w2_bias")

# The worlds of this process, one for each group.
_worlds: weakref.WeakKeyDictionary[Any, World] = weakref.WeakKeyDictionary()


def _world_of(group: Any) -> World:
    """The ranks of a group, of any backend. Collective when it is called first: a rank that still loads weights is
    waited for as long as the group waits in a collective."""
    world = _worlds.get(group)
    if world is None or world.closed:
        deadline = _hf._settings.options.get("deadline") or 30.0
        world = _worlds[group] = World.from_process_group(group, deadline=deadline)
    return world


def _ranks(mesh: Any) -> list[int]:
    return list(dist.get_process_group_ranks(mesh.get_group()))


def _is_dtensor(tensor: Any) -> bool:
    return type(tensor).__name__ == "DTensor"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined, no-any-return]


@contextlib.contextmanager
def _local_parameters(module: torch.nn.Module) -> Iterator[None]:
    """The module with this rank's shards in the place of DTensors."""
    sharded = {name: tensor for name, tensor in module._parameters.items() if _is_dtensor(tensor)}
    try:
        for name, tensor in sharded.items():
            module._parameters[name] = _local(tensor)  # type: ignore[assignment, arg-type]
        yield
    finally:
        module._parameters.update(sharded)


class FusedExperts:
    """The experts of one module over the ranks of an expert-parallel group.

    transformers makes one for each experts module when it applies a plan, and calls it in place of the module's
    forward(). Collective: every rank of the group calls it, if only with no tokens.

    Parameters
    ----------
    experts : torch.nn.Module
        Its class goes through the interface of transformers. Each rank has num_experts / ranks of its
        experts, in the order of ranks.
    ep_mesh : DeviceMesh
        Ranks that have all experts together, in one dimension.
    tp_mesh : DeviceMesh
        Ranks that hold the same tokens, in one dimension.

    Raises
    ------
    Unsupported
        For a class that does not go through the interface.
    """

    def __init__(self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        if not _hf._is_decorated(experts):
            raise Unsupported(
                f"{_hf._name(experts)} does not go through the experts interface of transformers, which hands over "
                "tokens with ids and weights; shard it without Switchyard, with ep_implementation='auto'"
            )
        # The module has this object in its forward().
        self._module = weakref.ref(experts)
        self._group, self._tp_group = ep_mesh.get_group(), tp_mesh.get_group()
        self._tp_rank, self._tp_size = dist.get_rank(self._tp_group), dist.get_world_size(self._tp_group)
        # All ranks of the world then know the number of tokens of each.
        self._shares_batch = _ranks(ep_mesh) == _ranks(tp_mesh)
        # Where the arrays were that the layer is bound to.
        self._places: list[tuple[Any, ...]] = []

    @torch.compiler.disable
    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted outputs of the experts for this rank's tokens.

        Parameters
        ----------
        hidden_states : Tensor [T, H]
            The same on the ranks of tp_mesh, each of which computes a slice.
        top_k_index : Tensor [T, K], int64 or int32
            Experts of the whole model. Others than these mean none.
        top_k_weights : Tensor [T, K]

        Returns
        -------
        Tensor [T, H] of hidden_states' type

        Raises
        ------
        CapacityExceeded
            For more tokens than ranks agreed on, where they hold batches of their own.
        Timeout
            If a rank does not take part, naming it.
        Unsupported
            For a module that computes what Switchyard does not, naming what of it; and by backward().
        """
        module = self._module()
        if module is None:
            raise InvalidArgument("the experts module of this forward() is gone; keep the model")
        x, ids, weights = map(_local, (hidden_states, top_k_index, top_k_weights))
        with _local_parameters(module):
            return apply_without_backward(
                lambda: self._run(module, x, ids, weights), x, weights, *module.parameters(recurse=False)
            )

    def _run(
        self, module: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        if weights.dtype not in (torch.float32, torch.bfloat16):
            weights = weights.float()
        tokens = x.shape[0]
        # Ranks with the same tokens compute a slice each, the last ones perhaps none.
        share = -(-tokens // self._tp_size)
        rows = slice(self._tp_rank * share, (self._tp_rank + 1) * share)
        made = self._layer_of(module, share, ids.shape[1])
        out = x.new_empty(share, x.shape[1])
        # Where ranks know each other's numbers of tokens, few tokens have faster kernels.
        known = self._shares_batch and x.dtype is torch.bfloat16
        most = promised(share) if known else 0
        made.layer._run_tensors(x[rows], ids[rows], weights[rows], out[: x[rows].shape[0]], most)
        if self._tp_size == 1:
            return out
        whole = x.new_empty(share * self._tp_size, x.shape[1])
        dist.all_gather_into_tensor(whole, out, group=self._tp_group)
        return whole[:tokens]

    def _layer_of(self, module: torch.nn.Module, tokens: int, top_k: int) -> _hf._Made:
        """The layer of what the module has now, for `tokens` of this rank.

        Ranks make a layer together, so they all have to come to it at the same call. What this looks at is the
        same on all of them, but for places in memory, which a layer is bound to without the others.
        """
        most = None if self._shares_batch else _hf._settings.options.get("max_tokens") or _MOST_TOKENS
        found = _hf._arrays_of_decorated(module)
        places = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in found.tensors.values()]
        made = _hf._made.get(module)
        if made is not None and most is not None:
            most = made.layer.max_tokens
        if most is not None and tokens > most:
            # A larger layer is made by all ranks together, and the others do not know.
            raise CapacityExceeded(
                f"this rank has {count_text(tokens, 'token')}, but ranks that hold batches of their own agreed on "
                f"up to {most}; pass a larger max_tokens to register_with_transformers(), on all ranks, before the "
                "model's first pass"
            )
        forms = [place[1:] for place in places]
        if (
            made is None
            or made.layer.closed
            or top_k != made.layer.top_k
            or tokens > made.layer.max_tokens
            or forms != [place[1:] for place in self._places]
            or not made.computes_as(module)
        ):
            made = self._make(module, most or tokens, top_k)
        elif places != self._places:
            made.layer.rebind(found.w13, found.w2, **{n: a for n, a in found.options.items() if n in _ARRAYS})
        elif made.layer._copies and hasattr(module, "unshard"):
            # FSDP gathers shards into the same memory without counting that as a change.
            made.layer.refresh()
        self._places = places
        return made

    def _make(self, module: torch.nn.Module, tokens: int, top_k: int) -> _hf._Made:
        world = _world_of(self._group)
        on_gpu = next(module.parameters()).device.type == "cuda"
        if on_gpu and not self._shares_batch:
            # FSDP gathers the next layer's weights on a stream of its own. The ranks of one batch have
            # collectives that this stream waits for alone.
            refuse_too_few_sms(
                _hf._settings.options.get("reserved_sms", 0), world.size, "reserved_sms of register_with_transformers()"
            )
        with _hf._making:
            # The old layer's memory goes first.
            _hf._made.pop(module, None)
            made = _hf._made[module] = _hf._make(module, tokens, top_k, _hf._of_decorated, None, world)
        return made


class _Style:
    """Whole experts on each rank, in plans of transformers before 5.24."""

    def __init__(self, shards: Any) -> None:
        self._shards = shards

    def validate_param(self, module: Any, param: str, mesh: Any, parameter_name: str | None = None) -> None:
        self._shards.validate_param(module, param, mesh, parameter_name=parameter_name)

    def shard_param(self, module: Any, param: str, mesh: Any) -> None:
        """Of a module for whose parameters the plan has no style of their own."""
        self._shards.shard_param(module, param, mesh)

    def install_forward(self, module: Any, mesh: Any) -> Any:
        module.forward = FusedExperts(module, mesh, mesh)
        return module


def register(name: str) -> None:
    """Make `FusedExperts` known to transformers by this name, in the way that its version has."""
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:
        pass
    else:
        EPImplementationInterface.register(name, FusedExperts)
        return
    try:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    except ImportError:
        return  # before 5.17 plans do not say which experts a rank has
    if "grouped_gemm" in ALL_PARALLEL_STYLES:
        ALL_PARALLEL_STYLES.register(name, _Style(ALL_PARALLEL_STYLES["grouped_gemm"]))
