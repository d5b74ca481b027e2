"""What may be said of an `Experts` beside its tensors: four values, each of which has defaults."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

from . import _arrays, _values
from ._activation import count_words, is_flag, is_real, is_whole
from ._workspace import Workspace, checked_workspace
from ._world import World, checked_world
from .errors import InvalidArgument

BadIds = Literal["raise", "skip"]
CapacityRule = Literal["slots", "tokens"]


def is_count(value: Any, least: int = 0) -> bool:
    return is_whole(value) and least <= value <= _values.MOST_COUNT


def _is_number(value: Any) -> bool:
    return is_real(value) and 0 <= value < math.inf


def _is_deadline(value: Any) -> bool:
    return _is_number(value) and value <= _values.MOST_SECONDS


def _is_name(value: Any) -> bool:
    try:
        _values.text("name", value)
    except InvalidArgument:
        return False
    return True


def _deadline_words(value: Any) -> str:
    bound = f"at most {_values.MOST_SECONDS:g}" if _is_number(value) else "at least 0"
    return f"seconds, a finite number of {bound} (0: the world's)"


_FLAG = ("True or False", is_flag)
_COUNT = (lambda v: count_words(v, 0), is_count)
# Each option has the words for its values, which may name the bound that a value crossed, and the test of a value.
_OPTIONS: dict[str, tuple[str | Callable[[Any], str], Callable[[Any], bool]]] = {
    "weight_on_input": _FLAG,
    "capacity_factor": ("a finite number of at least 0 (0: nothing is dropped)", _is_number),
    "capacity_rule": ("'slots' or 'tokens'", lambda v: v in ("slots", "tokens")),
    "bad_ids": ("'raise' or 'skip'", lambda v: v in ("raise", "skip")),
    "large_ids_are_none": _FLAG,
    "pre_sum_per_host": _FLAG,
    "num_experts": (
        lambda v: f"None or {count_words(v, 1)}", lambda v: v is None or is_count(v, 1)
    ),
    "device": (
        lambda v: f"None or the number of a GPU, {count_words(v, 0)}", lambda v: v is None or is_count(v)
    ),
    "reserved_sms": _COUNT,
    "num_threads": (lambda v: f"{count_words(v, 0)} (0: hardware threads divided by ranks)", is_count),
    "slot": _COUNT,
    "deadline": (_deadline_words, _is_deadline),
    "trace": _FLAG,
    "recorded_steps": _COUNT,
    "name": ("a str without zero bytes and halves of surrogate pairs", _is_name),
}


# Options that are gone, and what to do instead.
GONE = {
    "share_memory_with": "layers share memory in a workspace: pass memory=Memory(workspace=...) to each of them",
    "table": "layers have no tables any more, which gained 0.5 % over a layer's own rules: leave it out",
}


def refuse_gone(options: dict[str, Any]) -> None:
    """Raises InvalidArgument for an option of GONE that is given."""
    for name, instead in GONE.items():
        if options.get(name) is not None:
            raise InvalidArgument(f"{name} is {options[name]!r}, but {instead}")


def _check(options: Any) -> None:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name == "compute":
            _arrays.chosen_dtype("compute", value, _arrays.COMPUTE)
        what, is_right = _OPTIONS.get(field.name, ("", lambda v: True))
        if not is_right(value):
            words = what if isinstance(what, str) else what(value)
            raise InvalidArgument(f"{field.name} is {value!r}; pass {words}")


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How an `Experts` computes, and which slots it leaves out. The same on all ranks.

    Parameters
    ----------
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
        The effect of an id that no expert has, or that a token names twice (slots of weight 0 apart): an
        error, or a slot that contributes nothing and counts in ``stats().bad_slots``.
    large_ids_are_none : bool
        Ids of num_experts or more mean "no expert", as -1 does.
    pre_sum_per_host : bool
        Ranks on several hosts: a host sums its weighted outputs of one token of another host in fp32, in
        the order of k, rounds the sum to the outputs' type, and sends it as one row. Fewer bytes between
        hosts, one rounding more. Of one host nothing changes. Layers of GPUs over several hosts always do
        so, whatever this says.

    Raises
    ------
    InvalidArgument
        Naming the argument and its value.
    """

    compute: Any = None
    weight_on_input: bool = False
    capacity_factor: float = 0.0
    capacity_rule: CapacityRule = "slots"
    bad_ids: BadIds = "raise"
    large_ids_are_none: bool = False
    pre_sum_per_host: bool = False

    def __post_init__(self) -> None:
        _check(self)
        if self.capacity_rule != "slots" and not self.capacity_factor:
            raise InvalidArgument(
                f"capacity_rule is {self.capacity_rule!r}, but capacity_factor is 0, which drops nothing; give "
                "a factor, or leave the rule"
            )


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the experts of an `Experts` are, and what computes them.

    Parameters
    ----------
    world : World, optional
        None: that of the workspace, or a world of one.
    num_experts : int, optional
        Number of experts of all ranks. None: as many as w13 has, in a world of one.
    experts : sequence of int [places], optional
        The expert at each place, for experts that do not stand in shards, or more than once: after
        load balancing. Places are numbered over all ranks, rank r has those of
        ``world.own_experts(places)``, and w13 and w2 are of places. The same on all ranks.
    device : int, optional
        On GPUs: its number. None: that of w13.
    reserved_sms : int
        On GPUs: SMs left to other kernels, NCCL's among them.
    num_threads : int
        On CPUs: of this rank; 0: hardware threads divided by ranks.

    Raises
    ------
    InvalidArgument
        Naming the argument and its value.
    """

    world: World | None = None
    num_experts: int | None = None
    experts: Sequence[int] | None = None
    device: int | None = None
    reserved_sms: int = 0
    num_threads: int = 0
    table: dataclasses.InitVar[object] = None  # only None: see GONE

    def __post_init__(self, table: object) -> None:
        refuse_gone({"table": table})
        _check(self)
        checked_world(self.world)
        if self.experts is not None:
            # A list could change, and has no hash.
            experts = tuple(_values.whole_numbers("experts", self.experts, *_values.RANGES[ctypes.c_int32]))
            object.__setattr__(self, "experts", experts)


@dataclasses.dataclass(frozen=True)
class Memory:
    """What an `Experts` works in beside its weights. The same on all ranks.

    Parameters
    ----------
    workspace : Workspace, optional
        With room for this layer. None: memory of its own.
    slot : int
        Slot of `workspace`: 0 to its slots - 1.

    Raises
    ------
    InvalidArgument
        Naming the argument and its value.
    """

    workspace: Workspace | None = None
    slot: int = 0

    def __post_init__(self) -> None:
        _check(self)
        if self.workspace is not None:
            checked_workspace(self.workspace)
        elif self.slot != 0:
            raise InvalidArgument(f"slot is {self.slot}, but there is no workspace; pass both")


@dataclasses.dataclass(frozen=True)
class Diagnostics:
    """What an `Experts` records of its passes, and how long it waits in them.

    Parameters
    ----------
    deadline : float
        Seconds that a rank waits for another; 0: the world's.
    trace : bool
        Record what every role does, for ``Experts.trace()``.
    recorded_steps : int
        Keep the rows of each expert of so many last passes, for ``Experts.recording()``. 0: none, at no
        cost.
    name : str
        The layer's name, as its recording has it.

    Raises
    ------
    InvalidArgument
        Naming the argument and its value.
    """

    deadline: float = 0.0
    trace: bool = False
    recorded_steps: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        _check(self)


KINDS: dict[str, Any] = {
    "numerics": Numerics, "placement": Placement, "memory": Memory, "diagnostics": Diagnostics,
}
# Keyword arguments of version 0.1.0: which value has them now, and under which name.
RENAMED = {field.name: (of, field.name) for of, kind in KINDS.items() for field in dataclasses.fields(kind)}
del RENAMED["slot"], RENAMED["experts"]
RENAMED |= {
    "placement": ("placement", "experts"),
    "workspace_slot": ("memory", "slot"),
}


def values_of(options: dict[str, Any]) -> dict[str, Any]:
    """Options by the names of version 0.1.0, as the values of KINDS; other options as they are."""
    found: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        if name in RENAMED:
            of, field = RENAMED[name]
            parts.setdefault(of, {})[field] = value
        else:
            found[name] = value
    return found | {of: KINDS[of](**fields) for of, fields in parts.items()}


def with_new_names(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a call, those of version 0.1.0 in their new form, which a warning names.

    Raises
    ------
    InvalidArgument
        If an old name and the value that has it now are both given, a value is of another type, or an option
        is gone.
    """
    refuse_gone(options)
    old: dict[str, Any] = {}
    new: dict[str, Any] = {}
    for name, value in options.items():
        # A placement was a sequence.
        is_old = name in RENAMED and not isinstance(value, Placement)
        if value is not None:
            (old if is_old else new)[name] = value
    for name, value in old.items():
        of, field = RENAMED[name]
        form = f"{of}={KINDS[of].__name__}({field}=...)"
        if of in new:
            raise InvalidArgument(f"{name} is {value!r}, but {of} is given, too; leave {name} out, and pass {form}")
        warnings.warn(f"{name}= of Experts goes with 0.3; pass {form}", DeprecationWarning, stacklevel=3)
    for of, kind in KINDS.items():
        if of in new and not isinstance(new[of], kind):
            raise InvalidArgument(f"{of} is {new[of]!r}; pass a switchyard.{kind.__name__}, or None")
    return new | values_of(old)
