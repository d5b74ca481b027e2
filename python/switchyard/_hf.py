"""Hugging Face transformers: their experts, run by Switchyard."""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import _probe
from . import _torch as _torch_operators  # noqa: F401  # registers the operators
from ._activation import Activation
from ._experts import Experts
from ._world import World
from .errors import DTypeMismatch, Unsupported

_LEAST_TOKENS = 1024


@dataclasses.dataclass
class _Found:
    """A module's weights, in the words of `Experts`."""

    w13: Any
    w2: Any
    options: dict[str, Any]


@dataclasses.dataclass
class _Made:
    layer: Experts
    # Names of the module's parameters that are the weights and their addresses, to notice that a
    # model was moved or loaded anew. Empty where the weights are views of others.
    addresses: dict[str, int]
    # What layers have in common that work in the same memory: the model and what its size follows from.
    model: object
    form: tuple[Any, ...]


@dataclasses.dataclass
class _Settings:
    world: World | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


_settings = _Settings()
_made: weakref.WeakKeyDictionary[torch.nn.Module, _Made] = weakref.WeakKeyDictionary()
# What `patch` replaced, with an object for each model.
_models: weakref.WeakKeyDictionary[torch.nn.Module, object] = weakref.WeakKeyDictionary()


def _name(module: torch.nn.Module) -> str:
    return type(module).__name__


# ------------------------------------------------------------------------------ what modules hold


def _parameter(module: torch.nn.Module, *names: str) -> torch.Tensor:
    for name in names:
        found = getattr(module, name, None)
        if found is not None:
            if type(found).__name__ == "DTensor":
                raise Unsupported(
                    f"{_name(module)}.{name} is a DTensor (tensor parallelism); load the model with "
                    "expert parallelism, or on one device"
                )
            return found
    raise Unsupported(f"{_name(module)} has none of {', '.join(names)}: not a layout that is known")


def _of_decorated(module: Any) -> _Found:
    """Experts that go through the interface of transformers: what the decorator says of them."""
    gated = bool(getattr(module, "has_gate", True))
    transposed = bool(getattr(module, "is_transposed", False))
    names = ("gate_up_proj", "up_proj") if gated else ("up_proj", "gate_up_proj")
    w13, w2 = _parameter(module, names[0]), _parameter(module, "down_proj")
    options: dict[str, Any] = {"transposed": transposed}
    if getattr(module, "has_bias", False):
        options["w13_bias"] = _parameter(module, names[0] + "_bias")
        options["w2_bias"] = _parameter(module, "down_proj_bias")
    if w13.dtype == torch.float8_e4m3fn:
        options["w13_scale"] = _parameter(module, names[0] + "_scale_inv")
        options["w2_scale"] = _parameter(module, "down_proj_scale_inv")
        options["block"] = getattr(module, "block_size", None)
        if getattr(module, "activation_scheme", "dynamic") == "static":
            raise Unsupported(
                f"{_name(module)} quantises activations with static scales; Switchyard computes one "
                "for every 128 columns of a token: load it with activation_scheme='dynamic'"
            )
    elif w13.dtype in (torch.int8, torch.uint8):
        raise Unsupported(_no_fp4(module))
    if gated:
        options["activation"], options["order"] = _activation_of(module, w13, transposed)
    else:
        options["activation"] = _probe.plain(_name(module), module.act_fn, w13.device)
    return _Found(w13, w2, options)


def _no_fp4(module: torch.nn.Module) -> str:
    return (
        f"{_name(module)} has weights of 4 bits (MXFP4 or packed e2m1), which Switchyard does not "
        "multiply; load the model with Mxfp4Config(dequantize=True) or dequantize=True, which makes "
        "bf16 of them"
    )


def _activation_of(
    module: Any, w13: torch.Tensor, transposed: bool
) -> tuple[Activation, str]:
    """Asks the module's own _apply_gate(), in the order that the decorator declares and then in
    others."""
    width = w13.shape[2 if transposed else 1] // 2
    declared = "gate_up" if getattr(module, "is_concatenated", True) else "interleaved"
    orders = [declared] + [o for o in ("gate_up", "interleaved", "up_gate") if o != declared]
    refusals = []
    for order in orders:

        def apply_gate(gate: torch.Tensor, up: torch.Tensor, order: str = order) -> torch.Tensor:
            gates, ups = gate[:, None].expand(-1, width), up[:, None].expand(-1, width)
            if order == "interleaved":
                both = torch.stack((gates, ups), dim=-1).flatten(-2)
            else:
                both = torch.cat((gates, ups) if order == "gate_up" else (ups, gates), dim=-1)
            out = module._apply_gate(both)
            # Vector units round differently from what does the last columns.
            alike = out.shape == gates.shape and torch.allclose(out, out[:, :1], 1e-5, 1e-6)
            if not alike:
                raise Unsupported(f"{_name(module)}: columns of the activation are not alike")
            return out[:, 0]

        try:
            return _probe.gated(_name(module), apply_gate, w13.device), order
        except Unsupported as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _of_act_fn(module: torch.nn.Module, act_fn: Callable[..., Any], device: Any) -> Activation:
    return _probe.gated(_name(module), lambda gate, up: act_fn(gate) * up, device)


def _model_of(module: torch.nn.Module) -> object:
    """An object that the modules of one model have in common, and those of others have not; None if
    there is none. A copy of a model has a copy of its config.
    """
    model = _models.get(module)
    return getattr(module, "config", None) if model is None else model


def _sharing(model: object, form: tuple[Any, ...]) -> Experts | None:
    """A layer whose memory another of its model and form can work in. Passes of one model follow one
    another; those of others need not.
    """
    if model is None:
        return None
    for made in list(_made.values()):
        if made.model is model and made.form == form and not made.layer.closed:
            return made.layer
    return None


def _layer_of(
    module: torch.nn.Module,
    tokens: int,
    top_k: int,
    find: Callable[[torch.nn.Module], _Found] = _of_decorated,
) -> Experts:
    """The layer made for a module; a new one if its weights are others by now."""
    made = _made.get(module)
    if made is not None and tokens <= made.layer.max_tokens and not made.layer.closed:
        parameters: dict[str, Any] = module._parameters
        for name, address in made.addresses.items():
            if parameters[name].data_ptr() != address:
                break
        else:
            return made.layer
    if made is not None:
        made.layer.close()
    with torch.no_grad(), torch.inference_mode(False):
        found = find(module)
        options = dict(_settings.options) | found.options
        most = options.pop("max_tokens", None) or max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        options.setdefault("large_ids_are_none", True)
        most = max(most, tokens)
        form = (
            found.w2.device,
            found.w2.dtype,
            found.w2.shape,
            # The type that is computed in follows from that of the scales, too.
            getattr(options.get("w2_scale"), "shape", None),
            options.get("block"),
            top_k,
            most,
            options["activation"],
            _settings.world,
            dict(_settings.options),
        )
        model = _model_of(module)
        layer = Experts(
            found.w13,
            found.w2,
            top_k=top_k,
            max_tokens=most,
            world=_settings.world,
            share_memory_with=_sharing(model, form),
            **options,
        )
    addresses = {
        name: parameter.data_ptr()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter is found.w13 or parameter is found.w2
    }
    _made[module] = _Made(layer, addresses, model, form)
    return layer


@torch.compiler.assume_constant_result
def _number_of(module: torch.nn.Module, top_k: int) -> int:
    """For compiled code, which must not see how a layer is made."""
    made = _made.get(module)
    return (made.layer if made is not None else _layer_of(module, 1, top_k))._number


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """What transformers calls in place of an experts module's own forward().

    Parameters
    ----------
    hidden_states : Tensor [T, H]
    top_k_index : Tensor [T, K], int64
        num_experts and more: an expert of another rank.
    top_k_weights : Tensor [T, K]

    Returns
    -------
    Tensor [T, H]
        Of the type of hidden_states.
    """
    if top_k_weights.dtype not in (torch.float32, torch.bfloat16):
        top_k_weights = top_k_weights.float()
    if torch.compiler.is_compiling():
        return torch.ops.switchyard.experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            None,
            list(self.parameters()) if torch.is_grad_enabled() else [],
            1.0,
            _number_of(self, top_k_index.shape[1]),
        )
    layer = _layer_of(self, hidden_states.shape[0], top_k_index.shape[1])
    return layer(hidden_states, top_k_index, top_k_weights)


# -------------------------------------------------------------------- modules without the interface


def _of_aria(module: Any) -> _Found:
    w13, w2 = module.fc1.weight, module.fc2.weight
    activation = _of_act_fn(module, torch.nn.functional.silu, w13.device)
    return _Found(w13, w2, {"transposed": True, "activation": activation})


def _aria_forward(
    self: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor
) -> torch.Tensor:
    ids, weights = self.route_tokens_to_experts(router_logits)
    layer = _layer_of(self, hidden_states.shape[0], ids.shape[1], _of_aria)
    return layer(hidden_states, ids, _as_weights(weights))


def _of_dbrx(module: Any) -> _Found:
    mlp = module.mlp
    shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    gate, up, down = (getattr(mlp, name).view(shape) for name in ("w1", "v1", "w2"))
    activation = _of_act_fn(module, mlp.activation_fn, gate.device)
    return _Found((gate, up), down.transpose(1, 2), {"activation": activation})


def _dbrx_forward(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    batch = hidden_states.shape[0]
    x = hidden_states.reshape(-1, self.hidden_size)
    layer = _layer_of(self, x.shape[0], top_k_index.shape[1], _of_dbrx)
    return layer(x, top_k_index, _as_weights(top_k_weights)).view(batch, -1, self.hidden_size)


def _of_jetmoe(module: Any) -> _Found:
    w13, w2 = module.input_linear.weight, module.output_linear.weight
    return _Found(w13, w2, {"activation": _of_act_fn(module, module.activation, w13.device)})


def _jetmoe_forward(self: Any, layer_input: torch.Tensor) -> torch.Tensor:
    x = layer_input.reshape(-1, layer_input.shape[-1])
    # As in JetMoeTopKGating, of which the rest sorts tokens by expert.
    logits, ids = self.router.layer(x).float().topk(self.router.top_k, dim=1)
    weights = torch.softmax(logits, dim=1).type_as(x)
    layer = _layer_of(self, x.shape[0], ids.shape[1], _of_jetmoe)
    return layer(x, ids, _as_weights(weights)).view(layer_input.shape) + self.bias


def _of_llama4(module: Any) -> _Found:
    w13, w2 = module.gate_up_proj, module.down_proj
    activation = _of_act_fn(module, module.act_fn, w13.device)
    options = {"transposed": True, "weight_on_input": True, "activation": activation}
    return _Found(w13, w2, options)


def _llama4_forward(
    self: Any, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    weights, ids = scores.topk(self.top_k, dim=1)
    layer = _layer_of(self.experts, x.shape[0], self.top_k, _of_llama4)
    return self.shared_expert(x) + layer(x, ids, _as_weights(weights)), logits


def _of_longcat(module: Any) -> _Found:
    w13, w2 = _parameter(module, "gate_up_proj"), _parameter(module, "down_proj")
    activation = _of_act_fn(module, module.act_fn, w13.device)
    return _Found(w13[: module.num_routed_experts], w2, {"activation": activation})


def _longcat_forward(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    layer = _layer_of(self, hidden_states.shape[0], top_k_index.shape[1], _of_longcat)
    # Experts from num_routed_experts on give the token back as it is.
    identity = (top_k_weights * (top_k_index >= self.num_routed_experts)).sum(-1, keepdim=True)
    out = layer(hidden_states, top_k_index, _as_weights(top_k_weights))
    return out + hidden_states * identity.to(hidden_states.dtype)


def _as_weights(weights: torch.Tensor) -> torch.Tensor:
    kept = weights.dtype in (torch.float32, torch.bfloat16)
    return weights if kept else weights.float()


# Class -> its forward(), where it does not go through the interface of transformers.
_PATCHES: dict[str, Callable[..., Any]] = {
    "AriaExperts": _aria_forward,
    "DbrxExperts": _dbrx_forward,
    "JetMoeMoE": _jetmoe_forward,
    "Llama4TextMoe": _llama4_forward,
    "LongcatFlashExperts": _longcat_forward,
    "Step3p7Experts": experts_forward,
}
# Class -> why it cannot be.
_REFUSED: dict[str, str] = {
    "Mxfp4GptOssExperts": (
        "its weights are MXFP4, which Switchyard does not multiply; load the model with "
        "quantization_config=Mxfp4Config(dequantize=True)"
    ),
    "NllbMoeExperts": (
        "its experts are modules of their own with ReLU and biases, whose weights are no arrays over "
        "experts; Switchyard copies no weights"
    ),
    "SwitchTransformersExperts": (
        "its experts are modules of their own, whose weights are no arrays over experts; Switchyard "
        "copies no weights"
    ),
}


# ---------------------------------------------------------------------------------- what users call


def register_with_transformers(
    name: str = "switchyard", *, world: World | None = None, **options: Any
) -> None:
    """Make an experts implementation known to transformers 5.

    Then ``AutoModelForCausalLM.from_pretrained(..., experts_implementation="switchyard")`` runs the
    experts of bf16, fp16, fp32 and FP8 models with Switchyard, where their class goes through the
    interface of transformers; `patch` is for the others. ``python -m switchyard check-hf`` says
    which do.

    Parameters
    ----------
    name : str
    world : World, optional
        None: a world of one. Under expert parallelism of transformers that is right: it replicates
        tokens, marks slots of other ranks' experts and adds results up.
    **options
        Of `Experts`: max_tokens, num_threads, reserved_sms, compute, bad_ids, deadline.

    Raises
    ------
    ImportError
        If transformers is not installed, or older than 5.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    _settings.world = world
    _settings.options = dict(options)
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    except ImportError:
        return
    ALL_FP8_EXPERTS_FUNCTIONS.register(name, experts_forward)


def patch(model: torch.nn.Module, *, partial: bool = False) -> list[str]:
    """Run a model's experts with Switchyard, also where transformers offers no choice.

    Modules that go through the interface of transformers are told to use "switchyard"; the forward()
    of some others (Llama-4, DBRX, Aria, JetMoE, LongCat-Flash, Step-3.7) is replaced, on the
    instance.

    Parameters
    ----------
    model : torch.nn.Module
    partial : bool
        Leave modules alone that are refused, instead of raising.

    Returns
    -------
    list of str
        Names of the modules that were patched.

    Raises
    ------
    Unsupported
        Naming a module and the reason, or if the model has no experts. Nothing is patched then.
    """
    decorated, replaced, refused = [], [], []
    for name, module in model.named_modules():
        kind = _name(module)
        if kind in _REFUSED:
            refused.append(f"{name or kind}: {_REFUSED[kind]}")
        elif kind in _PATCHES:
            replaced.append((name, module))
        elif _is_decorated(module):
            try:
                _of_decorated(module)
            except (Unsupported, DTypeMismatch) as refusal:
                refused.append(f"{name or kind}: {refusal}")
            else:
                decorated.append((name, module))
    if refused and not partial:
        raise Unsupported(refused[0])
    if not decorated and not replaced:
        raise Unsupported(
            f"{_name(model)} has no experts that Switchyard knows"
            + (f": {refused[0]}" if refused else "; see python -m switchyard check-hf")
        )
    if decorated:
        register_with_transformers(world=_settings.world, **_settings.options)
    for _, module in decorated:
        module.config._experts_implementation = "switchyard"
    its = object()
    for _, module in replaced:
        module.forward = types.MethodType(_PATCHES[_name(module)], module)
        for part in module.modules():
            _models[part] = its
    return [name for name, _ in (*decorated, *replaced)]


def _is_decorated(module: torch.nn.Module) -> bool:
    """Whether forward() asks the interface of transformers."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "is_concatenated"))
