"""Hugging Face transformers: their experts, run by Switchyard."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import _arrays, _probe
from . import _torch as _torch_operators
from ._activation import Activation
from ._experts import Experts, workspace_for
from ._handle import in_child, next_number
from ._options import KINDS, Memory, values_of
from ._watch import Watch, registered
from ._workspace import Workspace
from ._world import World
from .errors import DTypeMismatch, InvalidArgument, Unsupported

_LEAST_TOKENS = 1024
_is_transforming = _arrays.is_transforming()
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
        return self.computes_as(module)

    def computes_as(self, module: torch.nn.Module) -> bool:
        """Whether the module's activation is the one that the layer was made with."""
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


def _is_decorated(module: torch.nn.Module) -> bool:
    """Whether forward() asks the interface of transformers."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "is_concatenated"))


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
    found = _arrays_of_decorated(module)
    if getattr(module, "has_gate", True):
        activation, order = _activation_of(module, found.w13, found.options["transposed"])
        found.options.update(activation=activation, order=order)
    else:
        found.options["activation"] = _probe.plain(_name(module), module.act_fn, found.w13.device)
    found.attributes = {n: getattr(module, n) for n in _OF_ACTIVATION if hasattr(module, n)}
    return found


def _arrays_of_decorated(module: Any) -> _Found:
    """Their arrays, and how these are laid out, without the activation."""
    name = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    tensors = {name: _parameter(module, name), "down_proj": _parameter(module, "down_proj")}
    w13, w2 = tensors.values()
    options: dict[str, Any] = {"transposed": bool(getattr(module, "is_transposed", False))}

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
    return _Found(w13, w2, options, tensors)


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
            f"{_name(module)}.{name} is on {scale.device}: through transformers Switchyard takes weights of four "
            "bits in host memory only; load the model with dequantize=True, or leave it to its own kernels"
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


def _make(
    module: torch.nn.Module,
    tokens: int,
    top_k: int,
    find: _Finder,
    patched: object,
    world: World | None = None,
) -> _Made:
    """A layer of what a module has now. world: whose ranks have as many experts each, if not one process all."""
    _warn_of_newer()
    with torch.no_grad(), torch.inference_mode(False):
        found, watch = _read(module, find)
        options = {"large_ids_are_none": True, "world": _settings.world} | _settings.options | found.options
        if world is not None:
            options |= {"world": world, "num_experts": found.w2.shape[0] * world.size}
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
    if torch.compiler.is_exporting():
        raise Unsupported(
            f"torch.export would put {_name(module)} into the program as a number of this process, which is no module "
            "elsewhere; export the model with experts_implementation='eager', or of patch() before it is patched"
        )
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
    # Sizes are tensors while torch.jit traces, and a layer that is made within a transform would be of its level.
    if torch.jit.is_tracing():
        _arrays.refuse_untracked("hidden_states", x)
    if _is_transforming():
        for name, tensor in (("hidden_states", x), ("top_k_index", ids), ("top_k_weights", weights)):
            _arrays.refuse_transformed(name, tensor)
    made = _layer_of(module, x.shape[0], ids.shape[1], find, patched)
    return made.layer(x, ids, weights)


# --------------------------------------------------------------------------------- compiled code

# In torch 2.11 no module can be the argument of a function whose result is a constant of the graph; in
# 2.15 it can.
_IN_GRAPHS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
_between_graphs = torch.compiler.disable(_run_now)

_operator = torch.library.Library("switchyard", "FRAGMENT")
# tensors: the module's parameters and buffers, so that the output depends on them, and that others in their place are
# seen.
_operator.define(
    "module_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] tensors, int module) -> Tensor"
)
# Compiled code has modules by number, and the layer is looked up at each call as without a compiler.
_numbered: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
_how: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, _Finder, object]] = weakref.WeakKeyDictionary()


@torch.compiler.assume_constant_result
def _number_of(module: torch.nn.Module, find: _Finder, patched: object) -> int:
    """Dynamo guards what it was called with: another module is compiled anew."""
    known = _how.get(module)
    if known is None:
        known = _how[module] = (next_number(), find, patched)
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
    tensors = [*module.parameters(), *module.buffers()]
    number = _number_of(module, find, patched)
    return torch.ops.switchyard.module_experts(x, ids, weights, tensors, number)


def _add_tensors(module: torch.nn.Module, parameters: list[Any], buffers: list[Any]) -> None:
    parameters += module._parameters.values()
    buffers += module._buffers.values()
    for child in module._modules.values():
        if child is not None:
            _add_tensors(child, parameters, buffers)


def _tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """As [*module.parameters(), *module.buffers()], which takes several times as long for the names."""
    parameters: list[Any] = []
    buffers: list[Any] = []
    _add_tensors(module, parameters, buffers)
    # A tensor that is there twice counts once, as a parameter and as a buffer each.
    return [t for found in (parameters, buffers) for t in dict.fromkeys(found) if t is not None]


def _refuse_others(module: torch.nn.Module, given: list[torch.Tensor]) -> None:
    """Refuse tensors that compiled code has in the place of the module's own: the layer would not compute with them."""
    own = _tensors_of(module)
    if len(own) == len(given) and all(map(_is_same, own, given)):
        return
    raise Unsupported(
        f"compiled code was given tensors in place of those of {_name(module)}, as functional_call does it, and "
        "Switchyard's layer reads the module's own; assign them to the module (load_state_dict(..., assign=True)), or "
        "call it without torch.compile"
    )


def _is_same(own: torch.Tensor, given: torch.Tensor) -> bool:
    return given is own or (
        given.data_ptr() == own.data_ptr()
        and given.shape == own.shape
        and given.stride() == own.stride()
        and given.dtype is own.dtype
    )


def _module_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    tensors: list[torch.Tensor],
    module: int,
) -> torch.Tensor:
    owner = _numbered.get(module)
    if owner is None:
        raise InvalidArgument(
            "compiled code runs the experts of a module that is gone, or of another process; keep the module, and "
            "compile in the process that runs it"
        )
    _refuse_others(owner, tensors)
    _, find, patched = _how[owner]
    made = _layer_of(owner, x.shape[0], topk_ids.shape[1], find, patched)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    made.layer._run(x, topk_ids, topk_weights, out)
    return out


_operator.impl("module_experts", _module_experts, "CompositeExplicitAutograd")
torch.library.register_fake(
    "switchyard::module_experts",
    lambda x, topk_ids, topk_weights, tensors, module: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    lib=_operator,
)
_torch_operators.register_missing_backward("switchyard::module_experts", (0, 2, 3), _operator)


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
        Results in hidden_states' type.

    Raises
    ------
    Unsupported
        For a module that computes what Switchyard does not, naming what of it.
    """
    return _run(self, hidden_states, top_k_index, top_k_weights)
