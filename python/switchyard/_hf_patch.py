"""Models of Hugging Face transformers that are told to use Switchyard, by its interface or by another forward()."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import types
from collections.abc import Callable
from typing import Any

import torch

from . import _hf, _hf_parallel, _values
from ._activation import Activation, count_words
from ._experts import Experts
from ._options import RENAMED, is_count, refuse_gone, values_of
from ._world import World
from .errors import DTypeMismatch, InvalidArgument, Unsupported


# -------------------------------------------------------------------- modules without the interface


def _of_aria(module: Any) -> _hf._Found:
    w13, w2 = _hf._parameter(module.fc1, "weight"), _hf._parameter(module.fc2, "weight")
    activation = _hf._of_act_fn(module, torch.nn.functional.silu, w13.device)
    tensors = {"fc1.weight": w13, "fc2.weight": w2}
    return _hf._Found(w13, w2, {"transposed": True, "activation": activation}, tensors)


def _aria_forward(
    self: Any, patched: object, hidden_states: torch.Tensor, router_logits: torch.Tensor
) -> torch.Tensor:
    ids, weights = self.route_tokens_to_experts(router_logits)
    return _hf._run(self, hidden_states, ids, weights, _of_aria, patched)


def _of_dbrx(module: Any) -> _hf._Found:
    mlp = module.mlp
    shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    tensors = {f"mlp.{name}": _hf._parameter(mlp, name).view(shape) for name in ("w1", "v1", "w2")}
    gate, up, down = tensors.values()
    activation = _hf._of_act_fn(module, mlp.activation_fn, gate.device)
    return _hf._Found(
        (gate, up),
        down.transpose(1, 2),
        {"activation": activation},
        tensors,
        {"mlp.activation_fn": mlp.activation_fn},
    )


def _dbrx_forward(
    self: Any,
    patched: object,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    batch = hidden_states.shape[0]
    x = hidden_states.reshape(-1, self.hidden_size)
    out = _hf._run(self, x, top_k_index, top_k_weights, _of_dbrx, patched)
    return out.view(batch, -1, self.hidden_size)


def _of_jetmoe(module: Any) -> _hf._Found:
    w13, w2 = _hf._parameter(module.input_linear, "weight"), _hf._parameter(module.output_linear, "weight")
    return _hf._Found(
        w13,
        w2,
        {"activation": _hf._of_act_fn(module, module.activation, w13.device)},
        {"input_linear.weight": w13, "output_linear.weight": w2},
        {"activation": module.activation},
        applied=("bias", "router."),
    )


def _jetmoe_forward(self: Any, patched: object, layer_input: torch.Tensor) -> torch.Tensor:
    x = layer_input.reshape(-1, layer_input.shape[-1])
    # As in JetMoeTopKGating, of which the rest sorts tokens by expert.
    logits, ids = self.router.layer(x).float().topk(self.router.top_k, dim=1)
    weights = torch.softmax(logits, dim=1).type_as(x)
    return _hf._run(self, x, ids, weights, _of_jetmoe, patched).view(layer_input.shape) + self.bias


def _of_llama4(module: Any) -> _hf._Found:
    w13, w2 = _hf._parameter(module, "gate_up_proj"), _hf._parameter(module, "down_proj")
    activation = _hf._of_act_fn(module, module.act_fn, w13.device)
    options = {"transposed": True, "weight_on_input": True, "activation": activation}
    tensors = {"gate_up_proj": w13, "down_proj": w2}
    return _hf._Found(w13, w2, options, tensors, {"act_fn": module.act_fn})


def _llama4_forward(
    self: Any, patched: object, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    weights, ids = scores.topk(self.top_k, dim=1)
    return self.shared_expert(x) + _hf._run(self.experts, x, ids, weights, _of_llama4, patched), logits


def _of_longcat(module: Any) -> _hf._Found:
    w13, w2 = _hf._parameter(module, "gate_up_proj"), _hf._parameter(module, "down_proj")
    activation = _hf._of_act_fn(module, module.act_fn, w13.device)
    return _hf._Found(
        w13[: module.num_routed_experts],
        w2,
        {"activation": activation},
        {"gate_up_proj": w13, "down_proj": w2},
        {"act_fn": module.act_fn},
    )


def _longcat_forward(
    self: Any,
    patched: object,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    # Experts from num_routed_experts on give the token back as it is.
    identity = (top_k_weights * (top_k_index >= self.num_routed_experts)).sum(-1, keepdim=True)
    out = _hf._run(self, hidden_states, top_k_index, top_k_weights, _of_longcat, patched)
    return out + hidden_states * identity.to(hidden_states.dtype)


def _of_mxfp4(module: Any) -> _hf._Found:
    """Experts of gpt-oss in MXFP4, as triton_kernels hold them in host memory."""
    names = [proj + part for proj in ("gate_up_proj", "down_proj") for part in ("", "_precision_config")]
    held: list[tuple[Any, str, Any]] = [(None, name, getattr(module, name, None)) for name in names]
    packed, scale = (
        tuple(_held_by_triton(module, proj, part, held) for proj in ("gate_up_proj", "down_proj"))
        for part in ("", "_precision_config")
    )
    biases = {name: _hf._parameter(module, name) for name in ("gate_up_proj_bias", "down_proj_bias")}
    # The rest of the activation is in the kernel that the module calls.
    limit = math.inf if module.limit is None else float(module.limit)
    options = {
        "weight_format": "mxfp4",
        "w13_scale": scale[0],
        "w2_scale": scale[1],
        "w13_bias": biases["gate_up_proj_bias"],
        "w2_bias": biases["down_proj_bias"],
        "order": "interleaved",
        "activation": Activation("silu", alpha=float(module.alpha), limit=limit, up_bias=1.0),
    }
    attributes = {name: getattr(module, name) for name in ("alpha", "limit")}
    return _hf._Found(*packed, options, biases, attributes, held=tuple(held))


def _held_by_triton(
    module: Any, proj: str, part: str, held: list[tuple[Any, str, Any]]
) -> torch.Tensor:
    """[E, rows, bytes] of packed weights, or of scales, which a tensor of triton_kernels has transposed."""
    config = getattr(module, proj + "_precision_config", None)
    if config is None:
        raise Unsupported(
            f"{_hf._name(module)}.{proj}_precision_config is None: its scales are not there; load the weights first"
        )
    name = f"{proj}{part}{'.weight_scale' if part else ''}"
    tensor = config.weight_scale if part else getattr(module, proj)
    storage = getattr(tensor, "storage", None)
    layout, data = getattr(storage, "layout", None), getattr(storage, "data", None)
    if layout is None or not isinstance(data, torch.Tensor):
        raise Unsupported(
            f"{_hf._name(module)}.{name} is no tensor of triton_kernels: another kernel has repacked it; patch() the "
            "model before its first pass"
        )
    if type(layout).__name__ != "StridedLayout":
        raise Unsupported(
            f"{_hf._name(module)}.{name} is in the {type(layout).__name__} of a GPU's kernel, which Switchyard does "
            "not read; load the model with Mxfp4Config(dequantize=True)"
        )
    if data.ndim != 3 or data.dtype != torch.uint8:
        raise Unsupported(
            f"{_hf._name(module)}.{name} is {str(data.dtype).removeprefix('torch.')} {list(data.shape)}, but uint8 [E, "
            "bytes, rows] is what Switchyard reads; load the model with Mxfp4Config(dequantize=True)"
        )
    _hf._refuse_unlike_mxfp4(module, name, data)
    held.append((storage, "data", data))
    held.append((tensor, "storage", storage))
    if part:
        held.append((config, "weight_scale", tensor))
    return data.transpose(1, 2)


def _mxfp4_forward(
    self: Any, patched: object, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits, weights, ids = self.router(x)
    return _hf._run(self.experts, x, ids, weights, _of_mxfp4, patched).view(hidden_states.shape), logits


def _step3p7_forward(
    self: Any,
    patched: object,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    return _hf._run(self, hidden_states, top_k_index, top_k_weights, patched=patched)


@dataclasses.dataclass(frozen=True)
class _Replacement:
    """Of a class's forward()."""

    forward: Callable[..., Any]
    find: _hf._Finder
    # Where the weights are, if not in the module itself.
    part: str = ""

    def parameters(self) -> list[str]:
        """Names of those that the class's own forward() has to have."""
        return list(inspect.signature(self.forward).parameters)[2:]


# Classes whose forward() does not go through the interface of transformers.
_PATCHES: dict[str, _Replacement] = {
    "AriaExperts": _Replacement(_aria_forward, _of_aria),
    "DbrxExperts": _Replacement(_dbrx_forward, _of_dbrx),
    "JetMoeMoE": _Replacement(_jetmoe_forward, _of_jetmoe),
    "Llama4TextMoe": _Replacement(_llama4_forward, _of_llama4, "experts"),
    "LongcatFlashExperts": _Replacement(_longcat_forward, _of_longcat),
    "Step3p7Experts": _Replacement(_step3p7_forward, _hf._of_decorated),
}
# The block around MXFP4 experts: its class is GptOssMLP or Mxfp4GptOssMLP, by transformers' version, and its own
# forward() routes for Triton's kernels.
_MXFP4_EXPERTS = "Mxfp4GptOssExperts"
_MXFP4_BLOCK = _Replacement(_mxfp4_forward, _of_mxfp4, "experts")
# Class -> why it cannot be.
_REFUSED: dict[str, str] = {
    _MXFP4_EXPERTS: (
        "its forward() takes the routing of Triton's kernels; patch() the model, so that the block around it "
        "(GptOssMLP or Mxfp4GptOssMLP) is run, or load it with Mxfp4Config(dequantize=True)"
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


class _Model:
    """What the patched modules of one model have in common; a copy of the model has a copy."""


# In place of a class's name: a module that goes through the interface, though its config says otherwise.
_INTERFACE = ""


class _Patched:
    """The forward() of a patched module. It is copied and pickled with the module."""

    def __init__(self, module: torch.nn.Module, name: str, model: _Model) -> None:
        self.module = module
        self.name = name
        self.model = model

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.name == _INTERFACE:
            return _hf.experts_forward(self.module, *arguments, **named)
        replacement = _MXFP4_BLOCK if self.name == _MXFP4_EXPERTS else _PATCHES[self.name]
        return replacement.forward(self.module, self.model, *arguments, **named)


def _listed(module: torch.nn.Module, table: dict[str, Any]) -> str | None:
    """The name by which a table has a module's class or one that it is derived from."""
    return next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in table), None)


def _refuse_replacing(module: torch.nn.Module, name: str) -> None:
    """Refuse a module whose forward() is not the one that a replacement was written for."""
    cls = next(cls for cls in type(module).__mro__ if cls.__name__ == name)
    replacement = _PATCHES[name]
    signature = list(inspect.signature(cls.forward).parameters)[1:]
    if type(module).forward is not cls.forward:
        raise Unsupported(f"{_hf._name(module)} has a forward() of its own, other than that of {name}")
    if signature != replacement.parameters():
        raise Unsupported(
            f"{name}.forward() of this transformers takes {', '.join(signature)}; Switchyard replaces one "
            f"that takes {', '.join(replacement.parameters())}"
        )
    own = vars(module).get("forward")
    if own is not None and not isinstance(own, _Patched):
        raise Unsupported(
            f"forward() of this {name} was already replaced, by a {type(own).__name__}; patch() the model "
            "before hooks, such as accelerate's, are put on it"
        )
    part = module.get_submodule(replacement.part)
    try:
        _hf._read(part, replacement.find)
    except AttributeError as error:
        raise Unsupported(f"{name} is not as Switchyard knows it: {error}") from None


def _has_mxfp4(module: torch.nn.Module) -> bool:
    """Whether it is a block of gpt-oss around MXFP4 experts."""
    parts = module._modules
    return "router" in parts and type(parts.get("experts")).__name__ == _MXFP4_EXPERTS


def _refuse_replacing_mxfp4(module: torch.nn.Module) -> None:
    # Methods bound to the block are those that transformers, or a kernel from the hub, put there.
    own = vars(module).get("forward")
    if own is not None and not isinstance(own, (_Patched, types.MethodType)):
        raise Unsupported(
            f"forward() of this {_hf._name(module)} was already replaced, by a {type(own).__name__}; patch() the model "
            "before hooks, such as accelerate's, are put on it"
        )
    try:
        _hf._read(module.get_submodule("experts"), _of_mxfp4)
    except AttributeError as error:
        raise Unsupported(f"{_MXFP4_EXPERTS} is not as Switchyard knows it: {error}") from None


# ---------------------------------------------------------------------------------- what users call


# Options of `Experts` that all layers of a model may have.
_OPTIONS = (
    "max_tokens num_threads reserved_sms compute bad_ids deadline capacity_factor capacity_rule pre_sum_per_host "
    "trace recorded_steps"
).split()


def _check_options(options: dict[str, Any]) -> None:
    refuse_gone(options)
    for name, value in options.items():
        if name not in _OPTIONS:
            of_layers = name in RENAMED or name in inspect.signature(Experts.__init__).parameters
            near = difflib.get_close_matches(name, _OPTIONS, n=1)
            why = "every module says that of itself; leave it out" if of_layers else "there is no such option"
            hint = f"; did you mean {near[0]}?" if near and not of_layers else ""
            raise InvalidArgument(f"{name} is {value!r}, but {why}{hint} (options: {', '.join(_OPTIONS)})")
    if not is_count(options.get("max_tokens", 1), 1):
        raise InvalidArgument(f"max_tokens is {options['max_tokens']!r}; pass {count_words(options['max_tokens'], 1)}")
    values_of(options)


def register_with_transformers(
    name: str = "switchyard", *, world: World | None = None, **options: Any
) -> None:
    """Make an experts implementation known to transformers 5.

    Then ``AutoModelForCausalLM.from_pretrained(..., experts_implementation="switchyard")`` runs the
    experts of bf16, fp16, fp32 and FP8 models with Switchyard, and on CPUs of MXFP4 ones, where their
    class goes through the interface of transformers; `patch` is for the others. ``python -m switchyard check-hf`` says
    which do. Expert parallelism knows the name, too: docs/frameworks/transformers.md.

    Parameters
    ----------
    name : str
    world : World, optional
        None: a world of one. With ``DistributedConfig(ep_implementation="switchyard")`` layers are over
        the ranks of that group all the same.
    **options
        For every layer: max_tokens, and of `Numerics`, `Placement` and `Diagnostics` compute, bad_ids,
        capacity_factor, capacity_rule, pre_sum_per_host, num_threads, reserved_sms, deadline, trace,
        recorded_steps.

    Raises
    ------
    InvalidArgument
        For an option that there is not, or of a value that it cannot have; nothing is registered then.
    ImportError
        If transformers is not installed, or older than 5.
    """
    if not isinstance(name, str) or not name or name == "eager":
        raise InvalidArgument(
            f"name is {name!r}; pass a str other than 'eager', which transformers does not look up"
        )
    if world is not None and not isinstance(world, World):
        raise InvalidArgument(f"world is a {type(world).__name__}; pass a World, or None")
    _check_options(options)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    _hf._warn_of_newer()
    _hf._settings.world = world
    _hf._settings.options = dict(options)
    ALL_EXPERTS_FUNCTIONS.register(name, _hf.experts_forward)
    _hf_parallel.register(name)
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    except ImportError:
        return
    ALL_FP8_EXPERTS_FUNCTIONS.register(name, _hf.experts_forward)


def patch(model: torch.nn.Module, *, partial: bool = False) -> list[str]:
    """Run a model's experts with Switchyard, also where transformers offers no choice.

    Modules that go through the interface of transformers are told to use "switchyard"; the forward()
    of some others (Llama-4, DBRX, Aria, JetMoE, LongCat-Flash, Step-3.7, gpt-oss in MXFP4) is
    replaced, on the instance.

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
    InvalidArgument
        If `model` is no module.
    Unsupported
        Naming a module and the reason, or if the model has no experts. Nothing is patched then.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    partial = bool(_values.flag("partial", partial))
    decorated, replaced, refused, eager = [], [], [], []
    # Experts whose block was looked at before them.
    inside: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        kind = _hf._name(module)
        try:
            if _hf._is_decorated(module):
                _hf._read(module, _hf._of_decorated)
                decorated.append((name, module))
            elif _has_mxfp4(module):
                inside.add(module.get_submodule("experts"))
                _refuse_replacing_mxfp4(module)
                replaced.append((name, module, _MXFP4_EXPERTS))
            elif module in inside:
                continue
            elif (listed := _listed(module, _REFUSED)) is not None:
                raise Unsupported(_REFUSED[listed])
            elif (listed := _listed(module, _PATCHES)) is not None:
                _refuse_replacing(module, listed)
                replaced.append((name, module, listed))
        except (Unsupported, DTypeMismatch) as refusal:
            eager.append(getattr(module, "config", None))
            # A reason of its own begins with the class.
            where = name if name or str(refusal).startswith(kind) else kind
            refused.append(f"{where}: {refusal}" if where else str(refusal))
    if refused and not partial:
        raise Unsupported(refused[0])
    if not decorated and not replaced:
        raise Unsupported(
            f"{_hf._name(model)} has no experts that Switchyard knows"
            + (f": {refused[0]}" if refused else "; see python -m switchyard check-hf")
        )
    if decorated:
        register_with_transformers(world=_hf._settings.world, **_hf._settings.options)
    its = _Model()
    for _, module in decorated:
        # A module that was refused may have the same config.
        if any(module.config is config for config in eager):
            module.forward = _Patched(module, _INTERFACE, its)
        else:
            module.config._experts_implementation = "switchyard"
    for _, module, listed in replaced:
        module.forward = _Patched(module, listed, its)
    return [name for name, *_ in (*decorated, *replaced)]
