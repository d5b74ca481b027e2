"""The ranks that share a layer."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from ctypes import byref
from typing import Any

from . import _abi
from .errors import InvalidArgument, Unsupported, check


def close_handle(destroy: Any, handle: ctypes.c_void_p, kept: object = None) -> None:
    """End a handle once: the library sets it to null, and does nothing for null.

    A finalizer that calls this keeps `kept` until then.
    """
    destroy(byref(handle))


class World:
    """A rank among the ranks that share a layer: a process, or a thread.

    Made by `single`, `threads`, `from_env` or `from_process_group`. One thread at a time may use
    it. A layer keeps its world alive.
    """

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self._handle = handle
        self._finalizer = weakref.finalize(
            self, close_handle, _abi.library.sy_world_destroy, handle
        )
        info = _abi.WorldInfo()
        check(_abi.library.sy_world_get_info(handle, byref(info)))
        self.rank: int = info.rank
        self.size: int = info.size
        self.deadline: float = info.deadline_seconds
        self.fabric: str = info.fabric.decode()

    def __repr__(self) -> str:
        return f"<World: rank {self.rank} of {self.size} ({self.fabric})>"

    @staticmethod
    def single(*, deadline: float = 30.0) -> World:
        """A world of one.

        Parameters
        ----------
        deadline : float
            Seconds.
        """
        handle = ctypes.c_void_p()
        options = _options(deadline)
        check(_abi.library.sy_world_single(byref(options), byref(handle)))
        return World(handle)

    @staticmethod
    def threads(size: int, *, deadline: float = 30.0) -> list[World]:
        """Worlds for `size` threads of this process: element r is rank r's. For tests.

        Raises
        ------
        InvalidArgument
            For a size that is no number of ranks.
        """
        handles = (ctypes.c_void_p * max(size, 1))()
        options = _options(deadline)
        check(_abi.library.sy_world_threads(size, byref(options), handles))
        return [World(ctypes.c_void_p(handle)) for handle in handles]

    @staticmethod
    def processes(
        rank: int,
        size: int,
        *,
        rendezvous: str = "",
        deadline: float = 30.0,
        network_chunk_bytes: int = 0,
        network_window: int = 0,
    ) -> World:
        """This process as rank `rank` of `size` processes. Collective.

        Parameters
        ----------
        rendezvous : str
            A name that all ranks of this world share and no other world on this host uses at the
            same time. Empty: derived from the launcher's environment. ``tcp://HOST:PORT``, with the
            host of rank 0, joins ranks of several hosts: docs/hosts.md.
        deadline : float
            Seconds.
        network_chunk_bytes, network_window : int
            Over several hosts: what is on its way between two ranks, in each direction, are at most
            so many chunks (1 to 32768) of so many bytes (2048 to 2**30, a multiple of 64) of
            dispatch, and as many of combine. The same on all ranks. 0: 4 chunks of 256 KiB. Their
            product should exceed the network's bandwidth times its time there and back.

        Raises
        ------
        InvalidArgument
            For options that make no sense.
        SpecMismatch
            If ranks of several hosts disagree on the network's options.
        Timeout
            If a rank does not come within the deadline.
        """
        handle = ctypes.c_void_p()
        options = _options(deadline, rendezvous, network_chunk_bytes, network_window)
        check(_abi.library.sy_world_processes(rank, size, byref(options), byref(handle)))
        return World(handle)

    @staticmethod
    def from_env(
        *, deadline: float = 30.0, network_chunk_bytes: int = 0, network_window: int = 0
    ) -> World:
        """Rank and size from the launcher's environment: torchrun, mpirun, srun or
        ``python -m switchyard launch``. A world of one where there is none. Collective. Ranks on
        several hosts meet at MASTER_ADDR or SWITCHYARD_RENDEZVOUS and need a shared secret:
        docs/hosts.md.

        Parameters
        ----------
        deadline : float
            Seconds.
        network_chunk_bytes, network_window : int
            As of `processes`.

        Raises
        ------
        InvalidArgument
            If the ranks are spread over several hosts and there is no secret, and for options that
            make no sense.
        SpecMismatch
            If ranks of several hosts disagree on the network's options.
        Unsupported
            If they are, and this build has no libfabric.
        Timeout
            If a rank does not come within the deadline.
        """
        handle = ctypes.c_void_p()
        options = _options(deadline, "", network_chunk_bytes, network_window)
        check(_abi.library.sy_world_from_environment(byref(options), byref(handle)))
        return World(handle)

    @staticmethod
    def from_process_group(group: Any = None, *, deadline: float = 30.0) -> World:
        """The ranks of a group of torch.distributed, whatever its backend. Collective over it.

        Switchyard opens its own channels; the group is used once, to agree on a name for them.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup, optional
            None: the default group.

        Raises
        ------
        InvalidArgument
            If torch.distributed is not initialised, or this rank is not in the group.
        Unsupported
            If the ranks are spread over several hosts or network namespaces.
        Timeout
            If a rank does not come within the deadline.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise InvalidArgument(
                "torch.distributed is not initialised; call init_process_group() before, or use "
                "World.single()"
            )
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise InvalidArgument("this rank is not in the group; call it on the group's ranks")
        if size == 1:
            return World.single(deadline=deadline)
        mine = (_place(), f"pg {os.getpid()}.{_next_name()}")
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, mine, group=group)
        for other, (place, _) in enumerate(everyone):
            if place != everyone[0][0]:
                raise Unsupported(
                    f"rank {other} is on {place[0]} and rank 0 on {everyone[0][0][0]}, or in another "
                    "network namespace; the ranks of a group have to be on one host: use "
                    "World.from_env() over hosts, or make groups of the ranks of one host"
                )
        return World.processes(rank, size, rendezvous=everyone[0][1], deadline=deadline)

    def own_experts(self, num_experts: int) -> range:
        """The experts that this rank has, and whose weights it must be given.

        Parameters
        ----------
        num_experts : int
            Of all ranks.

        Raises
        ------
        InvalidArgument
            For a number that makes no sense.
        """
        begin, end = ctypes.c_int32(), ctypes.c_int32()
        check(
            _abi.library.sy_own_experts(
                num_experts, self.rank, self.size, byref(begin), byref(end)
            )
        )
        return range(begin.value, end.value)

    def barrier(self) -> None:
        """Wait for all ranks. For start-up and tests.

        Raises
        ------
        Timeout
            If a rank does not come within the deadline.
        """
        check(_abi.library.sy_world_barrier(self._open()))

    def abort(self) -> None:
        """End the world for all its ranks: every wait, now and later, raises `Aborted`.

        For a rank that cannot go on. From any thread; waits for nobody. Layers of the world cannot
        be used any more.
        """
        check(_abi.library.sy_world_abort(self._open()))

    def close(self) -> None:
        """Give the handle back. Layers of this world live on. May be called again."""
        self._finalizer()

    def _open(self) -> ctypes.c_void_p:
        if not self._handle:
            raise InvalidArgument("the world is closed; make another")
        return self._handle


def _options(
    deadline: float, rendezvous: str = "", chunk_bytes: int = 0, window: int = 0
) -> _abi.WorldOptions:
    for name, value in (("network_chunk_bytes", chunk_bytes), ("network_window", window)):
        # ctypes would take it modulo 2**32.
        if not 0 <= value < 2**32:
            raise InvalidArgument(f"{name} is {value}; use a number from 0 to {2**32 - 1}")
    return _abi.WorldOptions(
        deadline_seconds=deadline,
        rendezvous=rendezvous.encode() if rendezvous else None,
        network_chunk_bytes=chunk_bytes,
        network_window=window,
    )


def _place() -> tuple[str, str, str]:
    """What ranks must have in common to meet: host name, boot and network namespace."""

    def read(path: str) -> str:
        try:
            with open(path) as file:
                return file.read().strip()
        except OSError:
            return ""

    def link(path: str) -> str:
        try:
            return os.readlink(path)
        except OSError:
            return ""

    return os.uname().nodename, read("/proc/sys/kernel/random/boot_id"), link("/proc/self/ns/net")


_names = 0
_lock = threading.Lock()
_default: World | None = None


def _next_name() -> int:
    global _names
    with _lock:
        _names += 1
        return _names


def default_world() -> World:
    """The world of one that layers use where none is given."""
    global _default
    with _lock:
        if _default is None or not _default._handle:
            _default = World.single()
        return _default
