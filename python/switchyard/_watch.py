"""Notices that a module of PyTorch has other tensors than those that a layer was made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from .errors import Unsupported


def registered(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a module and of those in it, by name; shared ones by every name."""
    return itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )


def _storage(tensor: torch.Tensor) -> int:
    # A storage has one address of its own, whatever memory it has or lacks.
    return tensor.untyped_storage()._cdata


class Watch:
    """The parameters and buffers that tensors of a module are, or are views of.

    Parameters
    ----------
    module : torch.nn.Module
    tensors : dict of str to Tensor
        Keys are the names that a refusal gives them.

    Raises
    ------
    Unsupported
        For a tensor that is none of the module's own: nobody could tell when it changes.
    """

    def __init__(self, module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        #: The parameters and buffers, each once.
        self.tensors: list[torch.Tensor] = []
        #: Their names.
        self.names: set[str] = set()
        # Where each is, whether it is a parameter, and what tells its memory, and how it is read, from
        # others.
        self._marks: list[tuple[Any, ...]] = []
        own: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in registered(module):
            own.setdefault(_storage(tensor), []).append((name, tensor))
        for name, tensor in tensors.items():
            found = own.get(_storage(tensor))
            if found is None:
                kind = type(module).__name__
                raise Unsupported(
                    f"{kind}.{name} ({list(tensor.shape)}) is neither a parameter or buffer of the module "
                    "nor a view of one, but computed from others, as adapters (LoRA), parametrizations and "
                    "weight norm do; Switchyard would not notice when it changes. Merge it into the "
                    "weights first (peft: model.merge_and_unload(); torch: torch.nn.utils.parametrize."
                    "remove_parametrizations()), or run this module with another implementation"
                )
            for source in found:
                self._add(module, *source)

    def _add(self, module: Any, name: str, tensor: torch.Tensor) -> None:
        if name in self.names:
            return
        self.names.add(name)
        if not any(tensor is known for known in self.tensors):
            self.tensors.append(tensor)
        *path, leaf = name.split(".")
        holder = module
        for child in path:
            holder = holder._modules[child]
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        # Not by its type: functional_call() puts plain tensors in the place of parameters.
        self._marks.append((path, leaf in holder._parameters, leaf, tensor, *memory))

    def changed(self, module: Any) -> str | None:
        """The name of a parameter or buffer that is another by now, or elsewhere; None if all are as
        they were. Their values may have changed."""
        for path, is_parameter, leaf, tensor, address, shape, strides, dtype in self._marks:
            holder = module
            for name in path:
                holder = holder._modules.get(name)
                if holder is None:
                    return ".".join((*path, leaf))
            if (
                (holder._parameters if is_parameter else holder._buffers).get(leaf) is not tensor
                or tensor.data_ptr() != address
                or tensor.shape != shape
                or tensor.stride() != strides
                or tensor.dtype is not dtype
            ):
                return ".".join((*path, leaf))
        return None

