"""Memory that the layers of a model work in one after the other."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import threading
from collections.abc import Iterator
from ctypes import byref
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from . import _abi, _arrays, _four_bit, _values
from ._activation import Activation, require_activation
from ._four_bit import WeightFormat
from ._handle import Owned
from ._library import check, library, raise_last
from ._values import count_text
from ._world import World, checked_world, default_world
from .errors import Error, InvalidArgument

if TYPE_CHECKING:
    import torch


class DeviceAllocator(Protocol):
    """Where device memory comes from.

    Both methods are called with the workspace's device current, by the thread that makes, releases,
    restores or closes the workspace, or closes the last layer in it. `allocate` returns an address
    at which the device has nothing left to do, or raises; `free` gets what it returned.
    """

    def allocate(self, bytes: int, /) -> int: ...
    def free(self, address: int, /) -> None: ...


class _TorchAllocator:
    """The caching allocator of torch, or what torch was told to use in its place."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.cuda.init()

    def allocate(self, bytes: int) -> int:
        torch = self._torch
        device = torch.cuda.current_device()
        stream = torch.cuda.current_stream(device)
        address = torch.cuda.caching_allocator_alloc(bytes, device, stream)
        # Work on this stream may still use the block's memory for a tensor that is gone. Passes, and
        # what clears the memory for them, may run on other streams.
        stream.synchronize()
        return address

    def free(self, address: int) -> None:
        # By then no pass runs any more, so the block may be used again at once, on any stream.
        self._torch.cuda.caching_allocator_delete(address)


class _Callbacks:
    """An allocator as the library calls it. Has to outlive the memory."""

    def __init__(self, allocator: DeviceAllocator) -> None:
        self._allocator = allocator
        self._failure: BaseException | None = None
        self.allocate = _abi.WorkspaceOptionsAllocate(self._allocate)
        self.release = _abi.WorkspaceOptionsRelease(self._release)

    def _allocate(self, bytes: int, user: int | None) -> int:
        # An exception cannot pass through the library. It is told that there is no memory.
        try:
            return operator.index(self._allocator.allocate(bytes))
        except BaseException as failure:
            self._failure = failure
            return 0

    def _release(self, address: int, user: int | None) -> None:
        self._allocator.free(address)

    def raise_last(self) -> NoReturn:
        """As errors.raise_last(), with the allocator's exception as the cause."""
        failure, self._failure = self._failure, None
        if failure is not None and not isinstance(failure, Exception):
            raise failure  # KeyboardInterrupt
        try:
            raise_last()
        except Error as error:
            raise error from failure


def _device_of(device: torch.device | str | int | None) -> tuple[int, int]:
    """Backend and number, -1 for the current one."""
    if device is None:
        return _abi.CPU, -1
    kind, _, number = ("cuda", "", str(device)) if isinstance(device, int) else str(device).partition(":")
    if kind == "cpu":
        return _abi.CPU, -1
    if kind != "cuda" or not (number.isdecimal() or number == ""):
        raise InvalidArgument(
            f"device is {device!r}; use None or 'cpu', or 'cuda', 'cuda:0' or a number for a GPU"
        )
    return _abi.CUDA, int(number) if number else -1


class Workspace(Owned):
    """Memory that the layers of a model work in one after the other, in place of one each.

    Collective: every rank of the world makes it. It has room for every layer that is no larger in
    any of these sizes: give the largest of each. Layers name it in their `Memory`. Passes of layers
    in the same slot must follow one another: on CPUs a second one at the same time is refused; on
    GPUs they run on one stream, or on streams that wait for each other. A pass that failed with
    `Timeout` or `Aborted` is the end of all layers in its slot.

    The memory stays as long as the workspace or a layer in it does. A context manager closes the
    workspace.

    Parameters
    ----------
    world : World, optional
        That of the layers. None: the world of one that layers use where none is given.
    hidden, intermediate : int
        H and I, of one expert.
    experts : int
        Number of experts of all ranks. For layers with a placement it is the number of places.
    top_k : int
        Experts of a token.
    max_tokens : int
        Most tokens of a call on this rank; the same on all ranks. Layers may declare less.
    compute : str or dtype
        "bf16", "f32" or "f8_e4m3": what the layers compute in (``Experts.compute``).
    shared_intermediate : int
        Intermediate size of a shared expert; 0: none.
    weight_on_input : bool
        Whether a layer's routing weights multiply the experts' inputs.
    activation : Activation, optional
        None: SwiGLU. A gated one has room for a plain one.
    slots : int
        Layers that work at the same time need a slot each, with memory of its own: two for two-batch
        overlap. 1 to 16.
    device : torch.device, str or int, optional
        None and "cpu": a CPU. "cuda" is the current GPU.
    reserved_sms : int
        On GPUs: as of `Placement`.
    num_threads : int
        On CPUs: as of `Placement`. Layers may have fewer.
    pre_sum_per_host : bool
        With room for layers with that option of `Numerics`.
    weight_format : {"mxfp4", "int4"}, optional
        The format of the layers' weights. Layers of MXFP4 that compute in "f8_e4m3" want more memory on GPUs.
    allocator : "torch" or DeviceAllocator, optional
        On GPUs: where memory comes from that other ranks do not write, which is all of it in a world
        of one. "torch": torch's caching allocator, so that its statistics and memory pools see it. Or
        an object with ``allocate(bytes) -> address`` and ``free(address)``. None: the driver.

    Attributes
    ----------
    world : World
    slots : int
    compute : str
    bytes : int
        Memory of this rank and all slots, released or not. On CPUs this is address space, of which
        passes commit what they use.
    backend : str
        "cpu" or "cuda".

    Raises
    ------
    InvalidArgument
        For sizes and options that make no sense together.
    CapacityExceeded
        If memory is short; an exception of the allocator is its cause.
    SpecMismatch, Unsupported, Timeout
        As `Experts` does.
    """

    _noun = "workspace"

    def __init__(
        self,
        world: World | None = None,
        *,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        max_tokens: int,
        compute: Any,
        shared_intermediate: int = 0,
        weight_on_input: bool = False,
        activation: Activation | None = None,
        slots: int = 1,
        device: torch.device | str | int | None = None,
        reserved_sms: int = 0,
        num_threads: int = 0,
        pre_sum_per_host: bool = False,
        weight_format: WeightFormat | None = None,
        allocator: Literal["torch"] | DeviceAllocator | None = None,
    ) -> None:
        world = checked_world(world) or default_world()
        if activation is not None:
            require_activation(activation)
        backend, number = _device_of(device)
        spec = _abi.LayerSpec(
            hidden=hidden,
            intermediate=intermediate,
            num_experts=experts,
            top_k=top_k,
            shared_intermediate=shared_intermediate,
            # Needs one column of logits more than one without.
            shared_sigmoid_gate=int(shared_intermediate != 0),
            weight_on_input=_values.flag("weight_on_input", weight_on_input),
            activation=(activation or Activation())._to_c(),
        )
        options = _abi.WorkspaceOptions(
            backend=backend, max_tokens=max_tokens,
            compute=_arrays.chosen_dtype("compute", compute, _arrays.COMPUTE, optional=False),
            slots=slots, num_threads=num_threads, device=number, reserved_sms=reserved_sms,
            pre_sum_per_host=_values.flag("pre_sum_per_host", pre_sum_per_host),
            weights=_abi.DTYPE_NONE if weight_format is None else _four_bit.named(weight_format).dtype,
        )
        self._callbacks = _callbacks_of(allocator, backend)
        if self._callbacks is not None:
            options.allocate = self._callbacks.allocate
            options.release = self._callbacks.release
        handle = ctypes.c_void_p()
        with world._lock:
            self._check(
                library.sy_workspace_create(
                    world._open(), byref(spec), 1, byref(options), byref(handle)
                )
            )
        # Keeps the callbacks until the handle is gone.
        super().__init__(handle, library.sy_workspace_destroy, kept=self._callbacks)
        # A lock for each slot: passes of the layers in it follow one another.
        self._slot_locks: dict[int, Any] = {}
        # For a look that asks nobody.
        self._released = False
        self._sizes = spec
        self.compute: str = _arrays.DTYPE_NAMES[options.compute]
        info = self._info()
        self.world = world
        self.slots: int = info.slots
        self.bytes: int = info.bytes
        self.backend: str = "cuda" if info.backend == _abi.CUDA else "cpu"

    def _shown(self) -> str:
        slots = count_text(self.slots, "slot")
        form = f"H {self._sizes.hidden}, I {self._sizes.intermediate}, {count_text(self._sizes.num_experts, 'expert')}"
        return (
            f"{form}, top-{self._sizes.top_k}, in {self.compute}; {self.bytes / 2**20:.1f} MiB on {self.backend} in "
            f"{slots}, rank {self.world.rank} of {self.world.size}"
        )

    def _state(self) -> str:
        state = super()._state()
        return "released" if state == "open" and self._released else state

    @property
    def released(self) -> bool:
        """Whether the memory was given back by `release`."""
        return bool(self._info().released)

    def release(self) -> None:
        """Give the memory back until `restore`; contents are lost. Collective.

        No pass may be under way. On GPUs it waits for the device. Until then calls of the layers
        raise `InvalidArgument`. Graphs that were captured can be replayed after `restore`, but with
        an `allocator` they have to be captured anew. Does nothing if released already.

        Raises
        ------
        InvalidArgument
            If a pass is under way.
        Timeout, Aborted
            If a pass was given up, or the device does not come to rest.
        """
        with self._lock:
            check(library.sy_workspace_release(self._open()))
            self._released = True

    def restore(self) -> None:
        """Get memory again. Collective. Does nothing if there is nothing to restore.

        Raises
        ------
        CapacityExceeded
            If memory is short; it is released then.
        """
        with self._lock:
            self._check(library.sy_workspace_restore(self._open()))
            self._released = False

    def close(self) -> None:
        """Give the handle back. The memory stays for the layers in it. May be called again."""
        super().close()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, status: int) -> None:
        if status and self._callbacks is not None:
            self._callbacks.raise_last()
        check(status)

    def _info(self) -> _abi.WorkspaceInfo:
        info = _abi.WorkspaceInfo()
        with self._lock:
            check(library.sy_workspace_get_info(self._open(), byref(info)))
        return info


def _callbacks_of(allocator: Any, backend: int) -> _Callbacks | None:
    if allocator is None:
        return None
    if isinstance(allocator, str):
        if allocator != "torch":
            raise InvalidArgument(
                f"allocator is {allocator!r}; use 'torch', None, or an object with allocate and free"
            )
        if backend != _abi.CUDA:
            raise InvalidArgument("allocator is 'torch', but the device is a CPU; leave it None")
        return _Callbacks(_TorchAllocator())
    if not callable(getattr(allocator, "allocate", None)) or not callable(
        getattr(allocator, "free", None)
    ):
        raise InvalidArgument(
            f"allocator is a {type(allocator).__name__}, which lacks allocate(bytes) or free(address); "
            "use 'torch', None, or an object that has both"
        )
    return _Callbacks(allocator)


class LayerHandle(ctypes.c_void_p):
    """With what has to stay until the layer is gone, and the lock of the layers in the same memory."""

    kept: object = None
    lock: Any = None


def world_of(workspace: Workspace | None) -> World:
    """The world of a layer that is given none."""
    if workspace is None:
        return default_world()
    return checked_workspace(workspace).world


def checked_workspace(workspace: Any) -> Workspace:
    if isinstance(workspace, Workspace):
        return workspace
    raise InvalidArgument(
        f"workspace is a {type(workspace).__name__}; pass a switchyard.Workspace, or None"
    )


@contextlib.contextmanager
def creating(world: World, workspace: Workspace | None) -> Iterator[None]:
    """Keeps other threads from ending what a layer is made of."""
    with contextlib.ExitStack() as stack:
        for owned in (world, workspace):
            if owned is not None:
                stack.enter_context(owned._lock)
        yield


def choose_memory(options: _abi.LayerOptions, workspace: Workspace | None, slot: int) -> LayerHandle:
    """Puts what a layer is to work in into its options. The handle that is to be the layer's keeps
    the callbacks of the memory's allocator.
    """
    handle = LayerHandle()
    options.workspace_slot = slot
    if workspace is not None:
        options.workspace = checked_workspace(workspace)._open()
        handle.kept = workspace._callbacks
        handle.lock = workspace._slot_locks.setdefault(slot, threading.RLock())
    elif slot != 0:
        raise InvalidArgument(f"workspace_slot is {slot}, but there is no workspace; pass both")
    return handle
