"""What the plugins for inference servers have in common: options, refusals, the ranks of expert parallelism,
and a layer's binding."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import inspect
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ._activation import Activation
from ._experts import Experts, workspace_for
from ._four_bit import WeightFormat
from ._options import BadIds, Diagnostics, Memory, Numerics, Placement
from ._values import count_text
from ._weights import Order
from ._workspace import Workspace
from ._world import World
from .errors import CapacityExceeded, Error, InvalidArgument, Timeout, Unsupported

ExpertParallel = Literal["local", "fused"]
Mxfp4Compute = Literal["bf16", "f8_e4m3"]

# Where neither NCCL_MAX_CTAS nor NCCL_MAX_NCHANNELS says otherwise. NCCL's own limit is 64 since 2.22,
# but it takes no more than 32 on machines with NVLink unless it is told to.
_NCCL_CTAS = 32

# Seconds that ranks of fused expert parallelism wait for each other in a pass, unless a user says otherwise. Servers
# let ranks meet before each step, but a rank may compile kernels within one.
FUSED_DEADLINE = 60.0
# Seconds until all ranks have come when a server starts: some compile or load for many minutes.
START_DEADLINE = 1800.0

WEIGHTS = (
    "Switchyard takes bf16, fp16 and fp32 weights, FP8 in blocks of 128 x 128, MXFP4 as gpt-oss "
    "and DeepSeek-V4 have it, and INT4 of compressed-tensors in groups of 32 or 128"
)
NO_EPLB = (
    "{} moves experts between ranks without a word to the layer, which on GPUs keeps scales and biases in "
    "a layout of its own: they would be those of other experts. It works with bf16 experts without biases"
)

# Rows of a rank, beyond which no pass has a kernel of its own: docs/decisions/0048, and low passes of docs/decisions/0047.
MOST_PROMISED_ROWS = 512


def promised(most: int) -> int:
    """What ranks promise each other that have at most `most` rows each: `max_tokens_per_rank`, or 0 where it would
    change nothing."""
    return most if most <= MOST_PROMISED_ROWS else 0


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may say to a plugin.

    Attributes
    ----------
    max_tokens : int, optional
        Most tokens of a call; more are an error. None: what the server's scheduler allows, and a
        larger workspace when a call has more.
    reserved_sms : int
        SMs left to other kernels.
    num_threads : int
        On CPUs; 0: all.
    bad_ids : {"skip", "raise"}
        Servers pad batches with rows of garbage, whose ids must not end the layer.
    deadline : float
        Seconds; 0: the library's default, or FUSED_DEADLINE with "fused".
    expert_parallel : {"local", "fused"}
        Under expert parallelism: each rank computes its own experts and the server exchanges tokens, or
        Switchyard does both in one kernel.
    refresh_in_graphs : bool, optional
        Lay out scales and biases anew in every replay of a graph, so that replays see weights that
        were loaded into the same memory. None: where the server is set up for such transfers.
    mxfp4_compute : {"bf16", "f8_e4m3"}
        Arithmetic of experts in MXFP4: tokens in bf16, which loses nothing, or rounded to FP8.
    release_weights : bool
        Give up the server's packed weights of four bits once a layer on a GPU has copied them, which
        halves their memory. They cannot be loaded anew then.
    """

    max_tokens: int | None = None
    reserved_sms: int = 0
    num_threads: int = 0
    bad_ids: BadIds = "skip"
    deadline: float = 0.0
    expert_parallel: ExpertParallel = "local"
    refresh_in_graphs: bool | None = None
    mxfp4_compute: Mxfp4Compute = "bf16"
    release_weights: bool = False

    @classmethod
    def parse(cls, given: Any, where: str) -> Options:
        """Options of a mapping that came from JSON.

        Raises
        ------
        InvalidArgument
            Naming `where` and the key.
        """
        if not isinstance(given, Mapping):
            raise InvalidArgument(f"{where} is {given!r}; pass an object, which may be empty: {{}}")
        known = {field.name: field.default for field in dataclasses.fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise InvalidArgument(f"{where} has {name!r}; it takes {', '.join(known)}")
            problem = _problem(name, value)
            if problem:
                raise InvalidArgument(f"{where}: {name} is {value!r}; {problem}")
        return cls(**given)


def _problem(name: str, value: Any) -> str | None:
    """What is wrong with the value of an option."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    if name == "bad_ids":
        return None if value in ("skip", "raise") else "use 'skip' or 'raise'"
    if name == "expert_parallel":
        return None if value in ("local", "fused") else "use 'local' or 'fused'"
    if name == "mxfp4_compute":
        return None if value in ("bf16", "f8_e4m3") else "use 'bf16' or 'f8_e4m3'"
    if name == "refresh_in_graphs":
        return None if value is None or isinstance(value, bool) else "use true or false"
    if name == "release_weights":
        return None if isinstance(value, bool) else "use true or false"
    if name == "deadline":
        number = integer or isinstance(value, float)
        return None if number and value >= 0 else "use a number of seconds, 0 or more"
    if name == "max_tokens":
        return None if value is None or (integer and value > 0) else "use a whole number from 1 on"
    return None if integer and value >= 0 else "use a whole number, 0 or more"


def nccl_ctas(environment: Mapping[str, str] = os.environ) -> int:
    """Most thread blocks that one of NCCL's kernels takes."""
    for name in ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"):
        value = environment.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return _NCCL_CTAS


def refuse_too_few_sms(
    reserved_sms: int, ranks: int, option: str, environment: Mapping[str, str] = os.environ
) -> None:
    """Raise `Unsupported` if NCCL's kernels may not fit beside a layer's.

    A layer's kernel occupies every SM that is not reserved, and starts when all its blocks can. With
    several ranks a kernel of NCCL may run on another stream at the same time: each of the two could
    wait for what the other holds.
    """
    needed = nccl_ctas(environment)
    if ranks > 1 and reserved_sms < needed:
        raise Unsupported(
            f"{ranks} ranks exchange tokens with NCCL, whose kernels take up to {needed} SMs, but "
            f"{option} is {reserved_sms}: NCCL and Switchyard could wait for each other for ever. Set "
            f"{option} to {needed} or more, or NCCL_MAX_CTAS to {reserved_sms or 8} or less"
            + ("" if reserved_sms else f" with {option} 8")
        )


def refuse_int4(given: Any, symmetric: bool) -> None:
    """Raise `Unsupported` for INT4 of compressed-tensors that Switchyard cannot multiply.

    Parameters
    ----------
    given : QuantizationArgs, or an object with its num_bits, strategy, group_size and actorder
    symmetric : bool
        Without zero points.
    """
    for name, value, taken in (
        ("num_bits", given.num_bits, (4,)),
        ("strategy", getattr(given.strategy, "value", given.strategy), ("group",)),
        ("group_size", given.group_size, (32, 128)),
        ("symmetric", symmetric, (True,)),
        ("actorder", getattr(given.actorder, "value", given.actorder), (None, "weight", "static")),
    ):
        if value not in taken:
            raise Unsupported(
                f"compressed-tensors' {name} is {value!r}; Switchyard takes "
                f"{' or '.join(map(repr, taken))}. Quantise the experts so, or serve without "
                "Switchyard"
            )


def local_ids(ids: Any, expert_map: Any) -> Any:
    """Global expert ids as ids of this rank's experts.

    Parameters
    ----------
    ids : Tensor [T, K]
        Negative, or beyond the map: no expert.
    expert_map : Tensor [E] or None
        The local number of each expert, -1 where another rank has it. None: all are here.

    Returns
    -------
    Tensor [T, K]
        -1: no expert of this rank.
    """
    if expert_map is None:
        return ids
    # An index out of range would be an error of the device, and -1 would be the last expert.
    known = ids.clamp(0, expert_map.shape[0] - 1)
    return expert_map[known.long()].masked_fill(known != ids, -1)


def taken_types(ids: Any, weights: Any) -> tuple[Any, Any]:
    """A router's ids and weights, converted where `Experts` does not take their types."""
    import torch

    if ids.dtype not in (torch.int32, torch.int64):
        ids = ids.to(torch.int32)
    if weights.dtype not in (torch.float32, torch.bfloat16):
        weights = weights.float()
    return ids, weights


def other_signature(expected: Mapping[Any, str]) -> str | None:
    """The first of a server's functions that has other parameters than the plugin knows; None: none."""
    for function, parameters in expected.items():
        found = list(inspect.signature(function).parameters)
        if found != parameters.split():
            return f"{function.__qualname__}() takes {', '.join(found)}"
    return None


class Ranks:
    """The ranks of a server's expert parallelism, whose layers exchange tokens themselves.

    Made by `of`. Rank r has the experts ``world.own_experts(num_experts)``, and every rank makes the
    same layers in the same order and calls them in each step, also without a token.

    Attributes
    ----------
    world : World
    group : torch.distributed.ProcessGroup
    """

    def __init__(self, world: World, group: Any) -> None:
        self.world = world
        self.group = group
        self._met = False

    @staticmethod
    def of(group: Any, deadline: float = 0.0) -> Ranks:
        """The ranks of a group, once for all layers of a process. Collective at the first call.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup
            Over gloo.
        deadline : float
            Seconds that a pass waits for a rank; 0: FUSED_DEADLINE.

        Raises
        ------
        Timeout
            If a rank does not come within START_DEADLINE.
        Unsupported
            For ranks on several hosts.
        Error
            As ``World.from_process_group`` does.
        """
        found = _ranks.get(group)
        if found is None:
            _meet(group)
            world = World.from_process_group(group, deadline=deadline or FUSED_DEADLINE)
            if "hosts, " in world.fabric:
                raise Unsupported(
                    f"expert_parallel is 'fused' over {world.fabric}, which no server was tried with; leave "
                    "expert_parallel out"
                )
            found = _ranks[group] = Ranks(world, group)
        return found

    def meet(self) -> None:
        """Waits for all ranks before the first pass of all; does nothing afterwards.

        Servers compile between loading and the first pass, and their ranks come minutes apart, which is
        more than a pass waits.
        """
        if not self._met:
            _meet(self.group)
            self._met = True

    def meeting_first(self, agree: Callable[..., Any], serves: Callable[[], bool] = lambda: True) -> Callable[..., Any]:
        """A collective of a server's own that does not wait longer than the deadline, and names the rank which is lost.

        A group of torch.distributed waits for minutes and says who closed a connection at best. So the ranks of the
        world meet before it. All ranks call it equally often. What this has returned before is returned as it is.

        Parameters
        ----------
        agree : callable
        serves : callable
            False until ranks need not wait for each other's compilation any more; changes at the same call on all ranks.

        Raises
        ------
        Timeout
            The returned function raises it if a rank does not come within the deadline.
        Aborted
            It raises this if a rank's process has ended.
        """
        if hasattr(agree, "_switchyard_meets"):
            return agree

        @functools.wraps(agree)
        def agreeing(*arguments: Any, **named: Any) -> Any:
            if serves():
                self.meet()
                self.world.barrier()
            try:
                return agree(*arguments, **named)
            except RuntimeError as failure:
                try:
                    self.world.barrier()
                except Timeout:
                    pass  # others do not come, because the failure is this rank's own
                except Error as lost:
                    raise lost from failure
                raise

        agreeing._switchyard_meets = True  # type: ignore[attr-defined]
        return agreeing

    def refuse_placement(self, num_experts: int, expert_map: Any) -> None:
        """Raise `Unsupported` unless this rank has the experts that Switchyard takes it to have.

        Parameters
        ----------
        num_experts : int
            All ranks' experts, replicas included.
        expert_map : Tensor [num_experts]
            The local number of each expert, -1 where another rank has it.
        """
        own = self.world.own_experts(num_experts)
        wanted = [number - own.start if number in own else -1 for number in range(num_experts)]
        if expert_map.tolist() != wanted:
            raise Unsupported(
                f"rank {self.world.rank} of {self.world.size} is not given the experts {own.start} to "
                f"{own.stop - 1} of {num_experts} in this order; ranks must have neighbouring experts (linear "
                "placement)"
            )


# By group, which a server keeps until it ends.
_ranks: dict[Any, Ranks] = {}


def _meet(group: Any) -> None:
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=START_DEADLINE)
    try:
        # Unlike barrier() it names the ranks that did not come.
        dist.monitored_barrier(group, timeout=limit, wait_all_ranks=True)
    except RuntimeError as error:
        raise Timeout(f"not all ranks of expert parallelism came within {START_DEADLINE:g} s: {error}") from error


# On GPUs layers of one form work in one memory: a server runs one at a time.
_workspaces: weakref.WeakValueDictionary[Any, Workspace] = weakref.WeakValueDictionary()


@dataclasses.dataclass
class Made:
    """What the layers of this process took to make.

    Attributes
    ----------
    layers : int
    seconds : float
    bytes : int
        Memory beside the weights.
    """

    layers: int = 0
    seconds: float = 0.0
    bytes: int = 0


made = Made()

# All bindings of this process, so that an update of weights reaches them.
_bindings: weakref.WeakSet[Binding] = weakref.WeakSet()


class Binding:
    """The experts of one layer of a server, over the tensors it is called with.

    A plugin makes two calls: `weights_loaded` whenever the server has loaded this layer's weights, and
    `bind` before each pass, whose result it then calls. A plugin of a server that changes weights
    without loading them calls `refresh`, or `refresh_all` for all layers.

    Servers make the objects around a layer anew when weights are reloaded, while graphs that were
    captured before still use the layer. So a binding belongs to the server's layer.
    """

    def __init__(
        self,
        options: Options,
        *,
        activation: Activation,
        order: Order,
        top_k: int,
        max_tokens: int,
        weight_on_input: bool = False,
        weight_format: WeightFormat | None = None,
        refresh_in_graphs: bool = False,
        refresh_each_pass: bool = False,
        ranks: Ranks | None = None,
        num_experts: int | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        """`ranks` and `num_experts`, of all ranks: the layer exchanges tokens itself, and takes ids of all
        ranks' experts. Then `max_tokens` is the most tokens of one rank's call. `refresh_each_pass`: a server
        moves experts in place between passes without a word, so scales and biases are laid out anew in each."""
        self.options = options
        self.ranks = ranks
        self.num_experts = num_experts
        self.log = log or logging.getLogger(__name__)
        self.activation = activation
        self.order: Order = order
        self.top_k = top_k
        self.max_tokens = options.max_tokens or max_tokens
        self.weight_on_input = weight_on_input
        # A plugin may learn the format after it has made the binding, before weights are loaded.
        self.weight_format = weight_format
        wanted = options.refresh_in_graphs
        self.refresh_in_graphs = refresh_in_graphs if wanted is None else wanted
        self.refresh_each_pass = refresh_each_pass
        self.experts: Experts | None = None
        # It is there for further layers as long as one of them is.
        self._workspace: Workspace | None = None
        # Layers that became too small, which graphs may have captured.
        self._outgrown: list[Experts] = []
        self._addresses: tuple[int, ...] = ()
        self._small: dict[str, Any] = {}
        # Packed w13 and w2, of which a layer on a GPU has a copy in another order.
        self._packed: dict[str, Any] = {}
        # Whether the server's packed weights were given up: nothing can be made of them again.
        self._released = False
        _bindings.add(self)

    def weights_loaded(self, w13: Any, w2: Any, **small: Any) -> None:
        """Weights were loaded for the first time, or anew.

        A server that loads anew may do it into other tensors, whose values it copies into those that
        graphs have captured. What a layer has copies of, scales, biases and weights of four bits, must
        follow at once: replays of graphs call nothing.
        """
        if self.experts is None:
            self.bind(w13, w2, **small)
            if self.options.release_weights and self.weight_format:
                self._release(w13, w2)
            return
        self._refuse_released("weights were loaded anew")
        copied = self._small | self._packed
        for name, array in (small | dict(w13=w13, w2=w2)).items():
            bound = copied.get(name)
            if bound is not array and bound is not None and bound.shape == array.shape:
                bound.data.copy_(array.data)
        self.refresh()

    def _release(self, w13: Any, w2: Any) -> None:
        if not _shares_memory(w2):
            raise InvalidArgument(
                "release_weights is true, but a processor reads the weights where they are; leave it "
                "out"
            )
        self._released = True
        for array in (w13, w2):
            array.untyped_storage().resize_(0)

    def _refuse_released(self, what: str) -> None:
        if self._released:
            raise Unsupported(
                f"{what}, but the server's packed weights were given up when the layer was made; "
                "start without release_weights"
            )

    def reads(self, tensor: Any) -> bool:
        """Whether the layer keeps a copy of this tensor in a layout of its own."""
        return any(tensor is array for array in (*self._small.values(), *self._packed.values()))

    def bind(self, w13: Any, w2: Any, *, tokens: int = 0, **small: Any) -> Experts:
        """The layer over these tensors: made, bound anew or refreshed if need be.

        Parameters
        ----------
        w13, w2 : Tensor
        tokens : int
            Number of tokens of the call.
        **small : Tensor or None
            w13_scale, w2_scale, w13_bias and w2_bias.

        Raises
        ------
        Error
            As `Experts` and ``Experts.rebind`` do.
        """
        if self._released and self.experts is not None:
            if tokens > self.max_tokens:
                self._refuse_released(
                    f"a call has {count_text(tokens, 'token')}, more than max_tokens {self.max_tokens}"
                )
            return self.experts
        addresses = (w13.data_ptr(), w2.data_ptr()) + tuple(
            0 if array is None else array.data_ptr() for array in small.values()
        )
        if self.ranks is not None and tokens > self.max_tokens:
            # A larger layer is made by all ranks together, and the others do not know.
            raise CapacityExceeded(
                f"a call has {count_text(tokens, 'token')}, more than max_tokens {self.max_tokens} of a layer over "
                f"{count_text(self.ranks.world.size, 'rank')}; set the option max_tokens to what a rank's call may have"
            )
        if self.experts is None or (tokens > self.max_tokens and self.options.max_tokens is None):
            if self.experts is not None:
                self._outgrown.append(self.experts)
                self.max_tokens = 1 << (tokens - 1).bit_length()
            self.experts = self._make(w13, w2, small)
        elif addresses != self._addresses:
            self.experts.rebind(w13, w2, **small)
        elif self.refresh_each_pass or (self.refresh_in_graphs and _capturing(w13)):
            self.refresh()
        else:
            return self.experts
        self._addresses = addresses
        self._small = small
        self._packed = dict(w13=w13, w2=w2) if self.weight_format else {}
        return self.experts

    def refresh(self) -> None:
        """Lay out anew, at once, what was copied of the weights, also for graphs."""
        self._refuse_released("weights were updated")
        for experts in (*self._outgrown, self.experts):
            if experts is not None:
                experts.refresh()

    def _make(self, w13: Any, w2: Any, small: dict[str, Any]) -> Experts:
        form = (
            w2.device,
            w2.dtype,
            self.weight_format,
            tuple(w2.shape),
            self.top_k,
            self.max_tokens,
            self.activation,
            small.get("w13_bias") is not None,
            self.weight_on_input,
            None if self.ranks is None else (id(self.ranks), self.num_experts),
        )
        start = time.perf_counter()
        options: dict[str, Any] = dict(
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            activation=self.activation,
            order=self.order,
            weight_format=self.weight_format,
            numerics=Numerics(
                compute=self.options.mxfp4_compute if self.weight_format == "mxfp4" else None,
                weight_on_input=self.weight_on_input,
                bad_ids=self.options.bad_ids,
            ),
            placement=Placement(
                world=None if self.ranks is None else self.ranks.world,
                num_experts=self.num_experts,
                reserved_sms=self.options.reserved_sms,
                num_threads=self.options.num_threads,
            ),
            diagnostics=Diagnostics(deadline=self.options.deadline),
            **small,
        )
        self._workspace = _workspaces.get(form)
        first = self._workspace is None
        if first and (_shares_memory(w2) or self.ranks is not None):
            self._workspace = _workspaces[form] = workspace_for(w13, w2, **options)
        experts = Experts(w13, w2, memory=Memory(self._workspace), **options)
        # Servers load weights as inference tensors, which count no changes, and say when they did:
        # weights_loaded().
        experts._watches = experts._watched = False
        made.layers += 1
        made.seconds += time.perf_counter() - start
        if first:
            made.bytes += experts.workspace_bytes
            self.log.info(
                "Switchyard: layers of this form work in %.1f MiB beside their weights, for up to %d tokens",
                experts.workspace_bytes / 2**20,
                self.max_tokens,
            )
        return experts


def refresh_all() -> None:
    """Refresh every layer of this process: weights were updated where they are."""
    for binding in list(_bindings):
        if binding.experts is not None:
            binding.refresh()


def check_passes() -> None:
    """Raise what a pass over several ranks that has ended failed with; on GPUs it waits for nothing.

    A server calls it when a step's results are there, before it uses them: replays of graphs call no
    layer, and a pass that was given up leaves rows that mean nothing.

    Raises
    ------
    Timeout, Aborted
        Naming the rank that did not do its part.
    """
    for binding in list(_bindings):
        if binding.ranks is not None and binding.experts is not None:
            binding.experts.check()


def _shares_memory(tensor: Any) -> bool:
    return bool(tensor.device.type == "cuda")


def _capturing(tensor: Any) -> bool:
    import torch

    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
