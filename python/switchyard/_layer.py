"""A whole MoE layer: gate, experts, shared expert."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref
from typing import Any

import torch

from . import _abi, _arrays
from ._experts import Handle, Stats
from ._torch import refuse_gradient
from ._world import World, default_world
from .errors import check


class MoeLayer(torch.nn.Module):
    """Gate, dispatch, experts, shared expert and combine of one layer, as one program per rank.

    Made by `from_checkpoint`. Collective: every rank of the world makes it, and calls it with its
    own tokens.
    """

    def __init__(self, handle: ctypes.c_void_p) -> None:
        super().__init__()
        self._layer = Handle(handle, None)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        layer: int,
        *,
        world: World | None = None,
        max_tokens: int = 8192,
        device: torch.device | str = "cpu",
        compute: Any = None,
        reserved_sms: int = 0,
        num_threads: int = 0,
        deadline: float = 0.0,
        trace: bool = False,
    ) -> MoeLayer:
        """A layer of a checkpoint in Hugging Face format (config.json and safetensors).

        The weights are mapped from the files; on GPUs this rank's experts are copied there.

        Parameters
        ----------
        path : path
            Of the directory.
        layer : int
            Index of the layer in the model.
        world : World, optional
            None: a world of one.
        max_tokens : int
            Most tokens of a call on this rank; the same on all ranks.
        device : torch.device or str
        compute : str or dtype, optional
            "bf16", "f32" or "f8_e4m3". None: by the weights' type.
        reserved_sms, num_threads, deadline, trace
            As of `Experts`.

        Raises
        ------
        InvalidConfig, InvalidFile, MissingTensor, ShapeMismatch, DTypeMismatch
            For a checkpoint that cannot be used.
        InvalidArgument
            If `layer` is no MoE layer.
        Unsupported, SpecMismatch, Timeout
        """
        world = world or default_world()
        where = torch.device(device)
        cuda = where.type == "cuda"
        options = _abi.LayerOptions(
            backend=_abi.CUDA if cuda else _abi.CPU,
            max_tokens=max_tokens,
            num_threads=num_threads,
            device=-1 if where.index is None or not cuda else where.index,
            reserved_sms=reserved_sms,
            compute=_abi.NONE if compute is None else _arrays.dtype_code(compute),
            trace=int(trace),
            deadline_seconds=deadline,
        )
        handle = ctypes.c_void_p()
        check(
            _abi.library.sy_layer_from_checkpoint(
                world._open(), os.fsencode(path), layer, byref(options), byref(handle)
            )
        )
        return cls(handle)

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
            Of hash-routed layers only.
        ids_out, weights_out : Tensor [T, K], int32 and float32, optional
            Where to put the routing that was used.
        out : Tensor [..., H], optional
            Contiguous.

        Returns
        -------
        Tensor [..., H]

        Raises
        ------
        InvalidArgument, ShapeMismatch, DTypeMismatch, CapacityExceeded
            Before anything is sent.
        Timeout, Aborted
            The layer is dead then; the world lives.
        Unsupported
            If a gradient is asked for.
        """
        refuse_gradient(hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if out is None:
            out = torch.empty(hidden_states.shape, dtype=x.dtype, device=x.device)
        if token_ids is not None:
            token_ids = token_ids.reshape(-1)
        self._layer._run(
            x,
            None,
            None,
            out.view(x.shape),
            token_ids=token_ids,
            ids_out=ids_out,
            weights_out=weights_out,
        )
        return out

    def check(self) -> None:
        """As ``Experts.check``."""
        self._layer.check()

    def stats(self) -> Stats:
        """As ``Experts.stats``."""
        return self._layer.stats()

    def trace(self) -> dict[str, Any]:
        """As ``Experts.trace``."""
        return self._layer.trace()

    def close(self) -> None:
        """As ``Experts.close``."""
        self._layer.close()

    def extra_repr(self) -> str:
        layer = self._layer
        return (
            f"H {layer.hidden}, I {layer.intermediate}, {layer.num_experts} experts, top-{layer.top_k}, "
            f"computing in {layer.compute} on {layer.backend}"
        )
