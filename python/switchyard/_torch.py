"""What torch must be told: the operators for torch.compile(), and that there is no gradient."""

from __future__ import annotations

from typing import Any

import torch

from ._arrays import refuse_backward, refuse_transformed
from ._handle import live
from .errors import InvalidArgument


class _WithoutBackward(torch.autograd.Function):
    """Tells that the output depends on its inputs, and fails when a gradient is asked for, which
    would otherwise be wrong without a word."""

    @staticmethod
    def forward(ctx: Any, run: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return run()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        refuse_backward()


def apply_without_backward(run: Any, *tensors: torch.Tensor) -> torch.Tensor:
    """run(), whose output says that it depends on `tensors`, and fails where their gradient is asked for."""
    if not torch.is_grad_enabled() or not any(getattr(tensor, "requires_grad", False) for tensor in tensors):
        return run()
    for tensor in tensors:
        # Before torch would look for its own rules of transforms.
        refuse_transformed("an input", tensor)

    def without_gradient() -> torch.Tensor:
        with torch.no_grad():
            return run()

    return _WithoutBackward.apply(without_gradient, *tensors)


def layer_of(number: int) -> Any:
    """The layer with a number: operators of torch take numbers but no objects.

    Raises
    ------
    InvalidArgument
        If it is gone: compiled code does not keep layers alive.
    """
    layer = live.get(number)
    if layer is None:
        raise InvalidArgument(
            f"layer {number} is gone, or of another process, but compiled code calls it; keep the Experts or MoeLayer "
            "object, and compile in the process that runs it"
        )
    return layer


_library = torch.library.Library("switchyard", "DEF")
# parameters: the layer's weights, so that the output depends on them; empty where no gradient is wanted.
_library.define(
    "experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor? x_scale, Tensor[] parameters, "
    "float scale, int max_tokens_per_rank, int layer) -> Tensor"
)
_library.define(
    "experts_out(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor? x_scale, Tensor(a!) out, "
    "bool accumulate, float scale, int max_tokens_per_rank, int layer) -> ()"
)
# Stands where a gradient would be computed: a compiler traces the backward pass of all that it
# compiles, and only what runs may fail.
_library.define("missing_backward(Tensor gradient, Tensor like) -> Tensor")


def _empty(x: torch.Tensor, x_scale: torch.Tensor | None) -> torch.Tensor:
    dtype = x.dtype if x_scale is None else torch.bfloat16
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    x_scale: torch.Tensor | None,
    parameters: list[torch.Tensor],
    scale: float,
    max_tokens_per_rank: int,
    layer: int,
) -> torch.Tensor:
    out = _empty(x, x_scale)
    layer_of(layer)._run(
        x, topk_ids, topk_weights, out, x_scale, False, scale, max_tokens_per_rank=max_tokens_per_rank
    )
    return out


def _experts_out(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    x_scale: torch.Tensor | None,
    out: torch.Tensor,
    accumulate: bool,
    scale: float,
    max_tokens_per_rank: int,
    layer: int,
) -> None:
    layer_of(layer)._run(
        x, topk_ids, topk_weights, out, x_scale, accumulate, scale, max_tokens_per_rank=max_tokens_per_rank
    )


def _missing_backward(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    refuse_backward()


def missing_gradient(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """What stands for the gradient of an operator's input; None for one that wants none."""
    if not like.requires_grad:
        return None
    missing: torch.Tensor = torch.ops.switchyard.missing_backward(gradient, like)
    return missing


def register_missing_backward(name: str, places: tuple[int, ...], library: torch.library.Library) -> None:
    """Make an operator's output depend on its inputs at these places, tensors and at last a list of them, for autograd:
    the gradients that it asks for are missing."""
    *single, of_list = places

    def remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*(inputs[place] for place in single), *inputs[of_list])
        ctx.inputs = len(inputs)

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        missing = [missing_gradient(gradient, tensor) for tensor in ctx.saved_tensors]
        gradients: list[Any] = [None] * ctx.inputs
        for place, of_tensor in zip(single, missing):
            gradients[place] = of_tensor
        gradients[of_list] = missing[len(single) :]
        return tuple(gradients)

    torch.library.register_autograd(name, backward, setup_context=remember, lib=library)


_library.impl("experts", _experts, "CompositeExplicitAutograd")
_library.impl("experts_out", _experts_out, "CompositeExplicitAutograd")
_library.impl("missing_backward", _missing_backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "switchyard::experts", lambda x, ids, weights, x_scale, *others: _empty(x, x_scale), lib=_library
)
torch.library.register_fake("switchyard::experts_out", lambda *arguments: None, lib=_library)
torch.library.register_fake(
    "switchyard::missing_backward", lambda gradient, like: torch.empty_like(like), lib=_library
)
register_missing_backward("switchyard::experts", (0, 2, 4), _library)
