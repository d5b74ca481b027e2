"""Hugging Face transformers: their experts, run by Switchyard."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import _probe
from . import _torch as _torch_operators  # noqa: F401  # registers the operators
from ._activation import Activation
from ._experts import Experts, workspace_for
from ._handle import in_child
from ._options import KINDS, RENAMED, Memory, is_count, refuse_gone, values_of
from ._watch import Watch, registered
from ._workspace import Workspace
from ._world import World
from .errors import DTypeMismatch, InvalidArgument, Unsupported

_LEAST_TOKENS = 1024
# The newest transformers whose classes were all run beside eager: see results/check_hf.json.
_NEWEST_CHECKED = (5, 24)


@dataclasses.dataclass
class _Found:
    """A module's weights, in the words of `Experts`."""

    w13: Any
    w2: Any
    options: dict[str, Any]
    # The tensors that were read of the module, by their names there.
    tensors: dict[str, torch.Tensor]
    # Attributes that the activation follows from, and their values.
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Beginnings of names of parameters that the module's new forward() itself applies.
    applied: tuple[str, ...] = ()
    # Objects that have to stay the same: (holder, attribute, object). The holder None is the module, which no value
    # of `_made` may keep.
    held: tuple[tuple[Any, str, Any], ...] = ()


_Finder = Callable[[torch.nn.Module], _Found]


@dataclasses.dataclass
class _Made:
    layer: Experts
    watch: Watch
    # An attribute of the module: the name of its child or None, the attribute there, and its value.
    attributes: list[tuple[str | None, str, Any]]
    held: tuple[tuple[Any, str, Any], ...]
    # Layers work in the same memory if both are equal: the model, and the numbers that its size follows from.
    model: object
    form: tuple[Any, ...]
    workspace: Workspace | None

    def serves(self, module: torch.nn.Module, tokens: int, top_k: int) -> bool:
        """Whether the layer is of what the module has now."""
        layer = self.layer
        if tokens > layer.max_tokens or top_k != layer.top_k or layer.closed:
            return False
        if self.watch.changed(module) is not None:
            return False
        for holder, name, value in self.held:
            if getattr(module if holder is None else holder, name, None) is not value:
                return False
        for child, name, value in self.attributes:
            holder = module if child is None else module._modules.get(child)
            if holder is None:
                return False
            # As getattr(), which is slow for what is a module.
            found = holder.__dict__.get(name)
            if found is None:
                found = holder._modules.get(name)
            if found is not value and (found != value or type(found) is not type(value)):
                return False
        return True


@dataclasses.dataclass
class _Settings:
    world: World | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


_settings = _Settings()
_made: weakref.WeakKeyDictionary[torch.nn.Module, _Made] = weakref.WeakKeyDictionary()
# Held while layers are made.
_making = threading.RLock()


@in_child
def _forget_all() -> None:
    global _making
    _making = threading.RLock()
    _made.clear()


def _name(module: torch.nn.Module) -> str:
    return type(module).__name__


# ------------------------------------------------------------------------------ what modules hold


def _parameter(module: torch.nn.Module, name: str) -> torch.Tensor:
    found = getattr(module, name, None)
    if found is None:
        raise Unsupported(f"{_name(module)} has no {name}: not a layout that is known")
    if type(found).__name__ == "DTensor":
        raise Unsupported(
            f"{_name(module)}.{name} is a DTensor (tensor parallelism); load the model with "
            "expert parallelism, or on one device"
        )
    if not isinstance(found, torch.Tensor):
        raise Unsupported(f"{_name(module)}.{name} is a {type(found).__name__}, not a tensor")
    if found.device.type not in ("cpu", "cuda"):
        hint = "load the weights first" if found.device.type == "meta" else "move the model to cpu or cuda"
        raise Unsupported(f"{_name(module)}.{name} is on {found.device}; {hint}")
    return found


# A decorated class may hold these beside parameters. Sizes and settings follow from shapes, or show in the
# outputs of _apply_gate().
_OF_ACTIVATION = "act_fn limit alpha swiglu_limit swiglu_alpha gate_softcap up_softcap".split()
_KNOWN_ATTRIBUTES = frozenset(
    "training config forward layer_idx num_experts hidden_dim hidden_size intermediate_dim "
    "intermediate_size top_k block_size activation_scheme has_gate has_bias is_transposed "
    "is_concatenated".split()
) | set(_OF_ACTIVATION)
_REFUSED_ATTRIBUTES = {
    "has_post_expert_norm": (
        "a norm stands behind the down projection of every expert, which Switchyard does not compute"
    ),
}


def _instead(module: torch.nn.Module) -> str:
    """What to do with a module that is refused."""
    if _is_decorated(module):
        return "run it with another implementation, such as experts_implementation='grouped_mm'"
    return "leave it as it is, which patch(model, partial=True) does"


@functools.cache
def _flags() -> dict[str, Any]:
    """Flags of the decorator of the installed transformers, and their defaults."""
    from transformers.integrations.moe import use_experts_implementation

    parameters = inspect.signature(use_experts_implementation).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in ("experts_class", "experts_interface")}


def _refuse_unknown_attributes(module: torch.nn.Module) -> None:
    """Refuse a decorated module that says of itself what Switchyard does not know."""
    unknown = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and value is not None and value is not False
    }
    for name, default in _flags().items():
        unknown.pop(name, None)
        value = getattr(module, name, default)
        if value != default:
            unknown[name] = value
    for name, value in unknown.items():
        if name in _REFUSED_ATTRIBUTES:
            raise Unsupported(f"{_name(module)}.{name} is {value!r}: {_REFUSED_ATTRIBUTES[name]}; {_instead(module)}")
        if name not in _KNOWN_ATTRIBUTES:
            what = f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]
            raise Unsupported(
                f"{_name(module)}.{name} is {what}, and Switchyard does not know what the class does with "
                f"it; {_instead(module)}"
            )
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor) and name.startswith("_"):
            raise Unsupported(f"{_name(module)}.{name} is a tensor that Switchyard does not know; {_instead(module)}")
    for name, child in module.named_children():
        if name not in ("act_fn", "parametrizations"):
            raise Unsupported(
                f"{_name(module)}.{name} is a {_name(child)}, which is no part of experts that Switchyard "
                f"knows; {_instead(module)}"
            )


def _of_decorated(module: Any) -> _Found:
    """Experts that go through the interface of transformers: what the decorator says of them."""
    gated = bool(getattr(module, "has_gate", True))
    transposed = bool(getattr(module, "is_transposed", False))
    name = "gate_up_proj" if gated else "up_proj"
    tensors = {name: _parameter(module, name), "down_proj": _parameter(module, "down_proj")}
    w13, w2 = tensors.values()
    options: dict[str, Any] = {"transposed": transposed}

    def read(option: str, attribute: str) -> None:
        options[option] = tensors[attribute] = _parameter(module, attribute)

    if getattr(module, "has_bias", False):
        read("w13_bias", name + "_bias")
        read("w2_bias", "down_proj_bias")
    if w13.dtype == torch.float8_e4m3fn:
        read("w13_scale", name + "_scale_inv")
        read("w2_scale", "down_proj_scale_inv")
        options["block"] = getattr(module, "block_size", None)
        if getattr(module, "activation_scheme", "dynamic") == "static":
            raise Unsupported(
                f"{_name(module)} quantises activations with static scales; Switchyard computes one "
                "for every 128 columns of a token: load it with activation_scheme='dynamic'"
            )
    elif w13.dtype in _FOUR_BIT_DTYPES:
        for option, attribute in (("w13_scale", name + "_scale_inv"), ("w2_scale", "down_proj_scale_inv")):
            read(option, attribute)
            _refuse_unlike_mxfp4(module, attribute, options[option])
        options["weight_format"] = "mxfp4"
    elif w13.dtype == torch.uint8:
        raise Unsupported(
            f"{_name(module)}.{name} is uint8, packed in a format that Switchyard does not know; load the model with "
            "dequantize=True, which makes bf16 of it"
        )
    if gated:
        options["activation"], options["order"] = _activation_of(module, w13, transposed)
    else:
        options["activation"] = _probe.plain(_name(module), module.act_fn, w13.device)
    attributes = {n: getattr(module, n) for n in _OF_ACTIVATION if hasattr(module, n)}
    return _Found(w13, w2, options, tensors, attributes)


# DeepSeek-V4's experts, as transformers has them: two numbers in a byte.
_FOUR_BIT_DTYPES = tuple(
    getattr(torch, name) for name in ("int8", "float4_e2m1fn_x2") if hasattr(torch, name)
)


def _refuse_unlike_mxfp4(module: torch.nn.Module, name: str, scale: torch.Tensor) -> None:
    """Refuse scales of four-bit weights that Switchyard does not read."""
    if scale.dtype not in (getattr(torch, "float8_e8m0fnu", torch.uint8), torch.uint8):
        raise Unsupported(
            f"{_name(module)}.{name} is {str(scale.dtype).removeprefix('torch.')}, but scales of MXFP4 are powers of "
            "two in a byte; load the model with scale_fmt='ue8m0', or with dequantize=True"
        )
    if scale.device.type == "cuda":
        raise Unsupported(
            f"{_name(module)}.{name} is on {scale.device}: Switchyard multiplies weights of four bits on CPUs only, "
            "for now; load the model with dequantize=True, or leave it to its own kernels"
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

        def of_rows(gates: torch.Tensor, ups: torch.Tensor, order: str = order) -> torch.Tensor:
            if order == "interleaved":
                both = torch.stack((gates, ups), dim=-1).flatten(-2)
            else:
                both = torch.cat((gates, ups) if order == "gate_up" else (ups, gates), dim=-1)
            out = module._apply_gate(both)
            if out.shape != gates.shape:
                raise Unsupported(
                    f"{_name(module)}: the activation makes {list(out.shape)} of {list(both.shape)}"
                )
            return out

        def apply_gate(gate: torch.Tensor, up: torch.Tensor, of_rows: Any = of_rows) -> torch.Tensor:
            # As many in a row as the module has columns.
            at = torch.arange(-(-len(gate) // width) * width, device=gate.device) % len(gate)
            return of_rows(gate[at].view(-1, width), up[at].view(-1, width)).flatten()[: len(gate)]

        try:
            _refuse_unlike_columns(module, of_rows, width, w13.device)
            return _probe.gated(_name(module), apply_gate, w13.device), order
        except Unsupported as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _refuse_unlike_columns(module: Any, of_rows: Callable[..., torch.Tensor], width: int, device: Any) -> None:
    gates = torch.tensor([-30.0, -3.0, 0.3, 1.0, 8.0, 40.0], dtype=torch.float32, device=device)
    gates = gates[:, None].expand(-1, width)
    for ups in (gates, gates.flip(0), torch.ones_like(gates)):
        out = of_rows(gates, ups)
        # Vector units round differently from what does the last columns.
        if not _probe.alike(out, out[:, :1].expand_as(out), 1e-6 + _probe.slack(gates, ups)):
            raise Unsupported(f"{_name(module)}: columns of the activation are not alike")


def _of_act_fn(module: torch.nn.Module, act_fn: Callable[..., Any], device: Any) -> Activation:
    return _probe.gated(_name(module), lambda gate, up: act_fn(gate) * up, device)


def _read(module: torch.nn.Module, find: _Finder) -> tuple[_Found, Watch]:
    """A module's weights, all of which are known, and all of which are its own."""
    found = find(module)
    for name, tensor in found.tensors.items():
        if tensor.dtype == torch.float64:
            raise DTypeMismatch(
                f"{_name(module)}.{name} is float64; cast the model to float32, bfloat16 or float16"
            )
    watch = Watch(module, found.tensors)
    if _is_decorated(module):
        _refuse_unknown_attributes(module)
    for name, tensor in registered(module):
        if name not in watch.names and not name.startswith(found.applied or ("\0",)):
            raise Unsupported(
                f"{_name(module)}.{name} ({list(tensor.shape)}) is no part of experts that Switchyard knows: "
                f"gate, up and down projections, and their biases and scales; {_instead(module)}"
            )
    return found, watch


# ------------------------------------------------------------------------------- layers of modules


def _model_of(module: torch.nn.Module, patched: object) -> object:
    """An object that the modules of one model have in common, and those of others have not; None if
    there is none. A copy of a model has a copy of its config.
    """
    return getattr(module, "config", None) if patched is None else patched


def _sharing(model: object, form: tuple[Any, ...]) -> Workspace | None:
    """The memory of other layers of a model and form. Passes of one model follow one another; those of others
    need not.
    """
    found = (made.workspace for made in list(_made.values()) if made.model is model and made.form == form)
    return None if model is None else next(found, None)


def _layer_of(
    module: torch.nn.Module,
    tokens: int,
    top_k: int,
    find: _Finder = _of_decorated,
    patched: object = None,
) -> _Made:
    """The layer made for a module; a new one if its weights are others by now."""
    made = _made.get(module)
    if made is None or not made.serves(module, tokens, top_k):
        del made
        with _making:
            # Another thread may have made it meanwhile.
            made = _made.get(module)
            if made is None or not made.serves(module, tokens, top_k):
                # The old layer goes when no thread runs it any more.
                made = None
                _made.pop(module, None)
                made = _made[module] = _make(module, tokens, top_k, find, patched)
    return made


def _make(module: torch.nn.Module, tokens: int, top_k: int, find: _Finder, patched: object) -> _Made:
    _warn_of_newer()
    with torch.no_grad(), torch.inference_mode(False):
        found, watch = _read(module, find)
        options = {"large_ids_are_none": True, "world": _settings.world} | _settings.options | found.options
        most = options.pop("max_tokens", None) or max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        options = values_of(options) | {"top_k": top_k, "max_tokens": max(most, tokens)}
        form = (
            found.w2.device,
            found.w2.dtype,
            found.w2.shape,
            # The type that is computed in follows from that of the scales, too.
            getattr(options.get("w2_scale"), "shape", None),
            *(options.get(name) for name in ("block", "weight_format", "top_k", "max_tokens", "activation", *KINDS)),
        )
        model = _model_of(module, patched)
        workspace = _sharing(model, form)
        if workspace is None and model is not None:
            workspace = workspace_for(found.w13, found.w2, **options)
        layer = Experts(found.w13, found.w2, memory=Memory(workspace), **options)
        # Views of parameters do not say that a gradient of these is asked for.
        layer._parameters = list(watch.tensors)
    return _Made(
        layer,
        watch,
        [(*_split(name), value) for name, value in found.attributes.items()],
        found.held,
        model,
        form,
        workspace,
    )


def _split(name: str) -> tuple[str | None, str]:
    child, _, attribute = name.rpartition(".")
    return child or None, attribute


def _run(
    module: torch.nn.Module,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    find: _Finder = _of_decorated,
    patched: object = None,
) -> torch.Tensor:
    """A module's experts, for tokens [T, H] and ids and weights [T, K]."""
    if weights.dtype not in (torch.float32, torch.bfloat16):
        weights = weights.float()
    if torch.compiler.is_compiling():
        return (_compiled if _IN_GRAPHS else _between_graphs)(module, x, ids, weights, find, patched)
    return _run_now(module, x, ids, weights, find, patched)


def _run_now(
    module: torch.nn.Module,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    find: _Finder,
    patched: object,
) -> torch.Tensor:
    made = _layer_of(module, x.shape[0], ids.shape[1], find, patched)
    return made.layer(x, ids, weights)


# --------------------------------------------------------------------------------- compiled code

# In torch 2.11 no module can be the argument of a function whose result is a constant of the graph; in
# 2.15 it can.
_IN_GRAPHS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
_between_graphs = torch.compiler.disable(_run_now)

_operator = torch.library.Library("switchyard", "FRAGMENT")
# parameters: the module's, so that the output depends on them; empty where no gradient is wanted.
_operator.define(
    "module_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] parameters, int module) -> Tensor"
)
# Compiled code has modules by number, and the layer is looked up at each call as without a compiler.
_numbers = itertools.count()
_numbered: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
_how: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, _Finder, object]] = weakref.WeakKeyDictionary()


@torch.compiler.assume_constant_result
def _number_of(module: torch.nn.Module, find: _Finder, patched: object) -> int:
    """Dynamo guards what it was called with: another module is compiled anew."""
    known = _how.get(module)
    if known is None:
        known = _how[module] = (next(_numbers), find, patched)
        _numbered[known[0]] = module
    return known[0]


def _compiled(
    module: torch.nn.Module,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    find: _Finder,
    patched: object,
) -> torch.Tensor:
    parameters = list(module.parameters()) if torch.is_grad_enabled() else []
    number = _number_of(module, find, patched)
    return torch.ops.switchyard.module_experts(x, ids, weights, parameters, number)


def _module_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    parameters: list[torch.Tensor],
    module: int,
) -> torch.Tensor:
    owner = _numbered.get(module)
    if owner is None:
        raise InvalidArgument("compiled code runs the experts of a module that is gone; keep the module")
    _, find, patched = _how[owner]
    made = _layer_of(owner, x.shape[0], topk_ids.shape[1], find, patched)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    made.layer._run(x, topk_ids, topk_weights, out)
    return out


def _remember_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, _, topk_weights, parameters, _ = inputs
    ctx.save_for_backward(x, topk_weights, *parameters)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    def missing(like: torch.Tensor) -> torch.Tensor:
        return torch.ops.switchyard.missing_backward(gradient, like)

    x, topk_weights, *parameters = ctx.saved_tensors
    return missing(x), None, missing(topk_weights), [missing(p) for p in parameters], None


_operator.impl("module_experts", _module_experts, "CompositeExplicitAutograd")
torch.library.register_fake(
    "switchyard::module_experts",
    lambda x, topk_ids, topk_weights, parameters, module: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    lib=_operator,
)
torch.library.register_autograd(
    "switchyard::module_experts", _backward, setup_context=_remember_inputs, lib=_operator
)


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

    Raises
    ------
    Unsupported
        For a module that computes what Switchyard does not, naming what of it.
    """
    return _run(self, hidden_states, top_k_index, top_k_weights)


# -------------------------------------------------------------------- modules without the interface


def _of_aria(module: Any) -> _Found:
    w13, w2 = _parameter(module.fc1, "weight"), _parameter(module.fc2, "weight")
    activation = _of_act_fn(module, torch.nn.functional.silu, w13.device)
    tensors = {"fc1.weight": w13, "fc2.weight": w2}
    return _Found(w13, w2, {"transposed": True, "activation": activation}, tensors)


def _aria_forward(
    self: Any, patched: object, hidden_states: torch.Tensor, router_logits: torch.Tensor
) -> torch.Tensor:
    ids, weights = self.route_tokens_to_experts(router_logits)
    return _run(self, hidden_states, ids, weights, _of_aria, patched)


def _of_dbrx(module: Any) -> _Found:
    mlp = module.mlp
    shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    tensors = {f"mlp.{name}": _parameter(mlp, name).view(shape) for name in ("w1", "v1", "w2")}
    gate, up, down = tensors.values()
    activation = _of_act_fn(module, mlp.activation_fn, gate.device)
    return _Found(
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
    out = _run(self, x, top_k_index, top_k_weights, _of_dbrx, patched)
    return out.view(batch, -1, self.hidden_size)


def _of_jetmoe(module: Any) -> _Found:
    w13, w2 = _parameter(module.input_linear, "weight"), _parameter(module.output_linear, "weight")
    return _Found(
        w13,
        w2,
        {"activation": _of_act_fn(module, module.activation, w13.device)},
        {"input_linear.weight": w13, "output_linear.weight": w2},
        {"activation": module.activation},
        applied=("bias", "router."),
    )


def _jetmoe_forward(self: Any, patched: object, layer_input: torch.Tensor) -> torch.Tensor:
    x = layer_input.reshape(-1, layer_input.shape[-1])
    # As in JetMoeTopKGating, of which the rest sorts tokens by expert.
    logits, ids = self.router.layer(x).float().topk(self.router.top_k, dim=1)
    weights = torch.softmax(logits, dim=1).type_as(x)
    return _run(self, x, ids, weights, _of_jetmoe, patched).view(layer_input.shape) + self.bias


def _of_llama4(module: Any) -> _Found:
    w13, w2 = _parameter(module, "gate_up_proj"), _parameter(module, "down_proj")
    activation = _of_act_fn(module, module.act_fn, w13.device)
    options = {"transposed": True, "weight_on_input": True, "activation": activation}
    tensors = {"gate_up_proj": w13, "down_proj": w2}
    return _Found(w13, w2, options, tensors, {"act_fn": module.act_fn})


def _llama4_forward(
    self: Any, patched: object, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    weights, ids = scores.topk(self.top_k, dim=1)
    return self.shared_expert(x) + _run(self.experts, x, ids, weights, _of_llama4, patched), logits


def _of_longcat(module: Any) -> _Found:
    w13, w2 = _parameter(module, "gate_up_proj"), _parameter(module, "down_proj")
    activation = _of_act_fn(module, module.act_fn, w13.device)
    return _Found(
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
    out = _run(self, hidden_states, top_k_index, top_k_weights, _of_longcat, patched)
    return out + hidden_states * identity.to(hidden_states.dtype)


def _of_mxfp4(module: Any) -> _Found:
    """Experts of gpt-oss in MXFP4, as triton_kernels hold them in host memory."""
    names = [proj + part for proj in ("gate_up_proj", "down_proj") for part in ("", "_precision_config")]
    held: list[tuple[Any, str, Any]] = [(None, name, getattr(module, name, None)) for name in names]
    packed, scale = (
        tuple(_held_by_triton(module, proj, part, held) for proj in ("gate_up_proj", "down_proj"))
        for part in ("", "_precision_config")
    )
    biases = {name: _parameter(module, name) for name in ("gate_up_proj_bias", "down_proj_bias")}
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
    return _Found(*packed, options, biases, attributes, held=tuple(held))


def _held_by_triton(
    module: Any, proj: str, part: str, held: list[tuple[Any, str, Any]]
) -> torch.Tensor:
    """[E, rows, bytes] of packed weights, or of scales, which a tensor of triton_kernels has transposed."""
    config = getattr(module, proj + "_precision_config", None)
    if config is None:
        raise Unsupported(
            f"{_name(module)}.{proj}_precision_config is None: its scales are not there; load the weights first"
        )
    name = f"{proj}{part}{'.weight_scale' if part else ''}"
    tensor = config.weight_scale if part else getattr(module, proj)
    storage = getattr(tensor, "storage", None)
    layout, data = getattr(storage, "layout", None), getattr(storage, "data", None)
    if layout is None or not isinstance(data, torch.Tensor):
        raise Unsupported(
            f"{_name(module)}.{name} is no tensor of triton_kernels: another kernel has repacked it; patch() the model "
            "before its first pass"
        )
    if type(layout).__name__ != "StridedLayout":
        raise Unsupported(
            f"{_name(module)}.{name} is in the {type(layout).__name__} of a GPU's kernel, which Switchyard does not "
            "read; load the model with Mxfp4Config(dequantize=True)"
        )
    if data.ndim != 3 or data.dtype != torch.uint8:
        raise Unsupported(
            f"{_name(module)}.{name} is {str(data.dtype).removeprefix('torch.')} {list(data.shape)}, but uint8 [E, "
            "bytes, rows] is what Switchyard reads; load the model with Mxfp4Config(dequantize=True)"
        )
    _refuse_unlike_mxfp4(module, name, data)
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
    return _run(self.experts, x, ids, weights, _of_mxfp4, patched).view(hidden_states.shape), logits


def _step3p7_forward(
    self: Any,
    patched: object,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    return _run(self, hidden_states, top_k_index, top_k_weights, patched=patched)


@dataclasses.dataclass(frozen=True)
class _Replacement:
    """Of a class's forward()."""

    forward: Callable[..., Any]
    find: _Finder
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
    "Step3p7Experts": _Replacement(_step3p7_forward, _of_decorated),
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
            return experts_forward(self.module, *arguments, **named)
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
        raise Unsupported(f"{_name(module)} has a forward() of its own, other than that of {name}")
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
        _read(part, replacement.find)
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
            f"forward() of this {_name(module)} was already replaced, by a {type(own).__name__}; patch() the model "
            "before hooks, such as accelerate's, are put on it"
        )
    try:
        _read(module.get_submodule("experts"), _of_mxfp4)
    except AttributeError as error:
        raise Unsupported(f"{_MXFP4_EXPERTS} is not as Switchyard knows it: {error}") from None


# ---------------------------------------------------------------------------------- what users call


_warned = False


def _warn_of_newer() -> None:
    """Once, where transformers is newer than the newest whose classes were tried."""
    global _warned
    import transformers

    # Of 5.25.0.dev0, too.
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2] if part.isdigit())
    if version > _NEWEST_CHECKED and not _warned:
        _warned = True
        newest = ".".join(map(str, _NEWEST_CHECKED))
        warnings.warn(
            f"transformers {transformers.__version__} is newer than {newest}, the newest that Switchyard was "
            "checked with: run `python -m switchyard check-hf`, which compares every expert class with eager",
            stacklevel=3,
        )


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
        raise InvalidArgument(f"max_tokens is {options['max_tokens']!r}; pass an int of at least 1")
    values_of(options)


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

    _warn_of_newer()
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
    decorated, replaced, refused, eager = [], [], [], []
    # Experts whose block was looked at before them.
    inside: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        kind = _name(module)
        try:
            if _is_decorated(module):
                _read(module, _of_decorated)
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
            f"{_name(model)} has no experts that Switchyard knows"
            + (f": {refused[0]}" if refused else "; see python -m switchyard check-hf")
        )
    if decorated:
        register_with_transformers(world=_settings.world, **_settings.options)
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


def _is_decorated(module: torch.nn.Module) -> bool:
    """Whether forward() asks the interface of transformers."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "is_concatenated"))
