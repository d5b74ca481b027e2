"""The ranks that share a layer."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import secrets
import socket
import threading
from ctypes import byref
from typing import Any

from . import _abi, _values
from ._handle import Owned, in_child
from ._library import check, library
from .errors import InvalidArgument


class World(Owned):
    """A rank among the ranks that share a layer: a process, or a thread.

    Made by `single`, `threads`, `from_env` or `from_process_group`. Calls of several threads follow one
    another. A layer keeps its world alive.
    """

    _noun = "world"

    def __init__(self, handle: ctypes.c_void_p) -> None:
        super().__init__(handle, library.sy_world_destroy)
        info = _abi.WorldInfo()
        check(library.sy_world_get_info(handle, byref(info)))
        self.rank: int = info.rank
        self.size: int = info.size
        self.deadline: float = info.deadline_seconds
        self.fabric: str = info.fabric.decode()

    def _shown(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.fabric})"

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
        check(library.sy_world_single(byref(options), byref(handle)))
        return World(handle)

    @staticmethod
    def threads(size: int, *, deadline: float = 30.0) -> list[World]:
        """Worlds for `size` threads of this process: element r is rank r's. For tests.

        Raises
        ------
        InvalidArgument
            For a size that is no number of ranks.
        """
        # The library refuses other sizes.
        room = min(max(_values.integer("size", size), 1), _abi.MAX_PEERS)
        handles = (ctypes.c_void_p * room)()
        options = _options(deadline)
        check(library.sy_world_threads(size, byref(options), handles))
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
        secret: str = "",
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
        secret : str
            With ``tcp://HOST:PORT``: what ranks prove to each other that they know, at least 16
            random characters, the same on all ranks. Empty: that of SWITCHYARD_SECRET_FILE or
            SWITCHYARD_SECRET.

        Raises
        ------
        InvalidArgument
            For options that make no sense, and where ranks of several hosts have no secret.
        SpecMismatch
            If ranks of several hosts disagree on the network's options.
        Timeout
            If a rank does not come within the deadline.
        """
        handle = ctypes.c_void_p()
        options = _options(deadline, rendezvous, network_chunk_bytes, network_window, secret)
        check(library.sy_world_processes(rank, size, byref(options), byref(handle)))
        return World(handle)

    @staticmethod
    def from_env(
        *, deadline: float = 30.0, network_chunk_bytes: int = 0, network_window: int = 0
    ) -> World:
        """Rank and size from the launcher's environment: torchrun, mpirun, srun or
        ``switchyard launch``. A world of one where there is none. Collective. Ranks on
        several hosts meet at MASTER_ADDR or SWITCHYARD_RENDEZVOUS and need a shared secret:
        docs/hosts.md.

        Parameters
        ----------
        deadline, network_chunk_bytes, network_window
            See `processes`.

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
        check(library.sy_world_from_environment(byref(options), byref(handle)))
        return World(handle)

    @staticmethod
    def from_process_group(
        group: Any = None,
        *,
        deadline: float = 30.0,
        network_chunk_bytes: int = 0,
        network_window: int = 0,
    ) -> World:
        """The ranks of a group of torch.distributed, whatever its backend. Collective over it.

        Switchyard opens its own channels; the group is used at the start only, to agree on where
        ranks meet. Over several hosts that is a free port of rank 0, at its address on the way to
        the group's store (MASTER_ADDR). If no rank has SWITCHYARD_SECRET_FILE or SWITCHYARD_SECRET,
        rank 0 makes a secret, which travels through the group: whoever can read torch's traffic
        can then join (docs/security.md).

        Parameters
        ----------
        group : torch.distributed.ProcessGroup, optional
            None: the default group.
        deadline, network_chunk_bytes, network_window
            See `processes`.

        Raises
        ------
        InvalidArgument
            If torch.distributed is not initialised, or this rank is not in the group. Over several
            hosts, on every rank, if only some have a secret, or if rank 0 knows no address that
            other hosts reach.
        SpecMismatch
            If ranks of several hosts disagree on the network's options.
        Unsupported
            If the ranks are spread over several hosts, and this build has no libfabric.
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
        options: dict[str, Any] = {
            "deadline": deadline,
            "network_chunk_bytes": network_chunk_bytes,
            "network_window": network_window,
        }
        mine = (_place(), f"pg {os.getpid()}.{_next_name()}", _has_secret())
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, mine, group=group)
        if all(place == everyone[0][0] for place, _, _ in everyone):
            return World.processes(rank, size, rendezvous=everyone[0][1], **options)
        without = [r for r, (_, _, has_secret) in enumerate(everyone) if not has_secret]
        if 0 < len(without) < size:
            raise InvalidArgument(
                f"the group is spread over several hosts, and {_ranks(without)} of {size} "
                f"{'has' if len(without) == 1 else 'have'} neither SWITCHYARD_SECRET_FILE nor "
                "SWITCHYARD_SECRET, which others have; set it on all ranks or on none"
            )
        # The port is kept until rank 0 listens there.
        kept: socket.socket | None = None
        meeting: list[Any] = [None, "", ""]  # what is wrong, or the rendezvous and the secret
        try:
            if rank == 0:
                try:
                    rendezvous, kept = _keep_port(_own_address(_store_hosts(dist)))
                    meeting[1:] = rendezvous, secrets.token_hex(32) if without else ""
                except Exception as error:  # the others wait for a word
                    meeting[0] = str(error)
            first = 0 if group is None else dist.get_global_rank(group, 0)
            dist.broadcast_object_list(meeting, src=first, group=group)
            wrong, rendezvous, secret = meeting
            if wrong is not None:
                raise InvalidArgument(f"rank 0 of the group: {wrong}")
            return World.processes(rank, size, rendezvous=rendezvous, secret=secret, **options)
        finally:
            if kept is not None:
                kept.close()

    def own_experts(self, num_experts: int) -> range:
        """The experts that this rank has, and whose weights it must be given.

        Parameters
        ----------
        num_experts : int
            Experts of all ranks.

        Raises
        ------
        InvalidArgument
            For a number that makes no sense.
        """
        begin, end = ctypes.c_int32(), ctypes.c_int32()
        check(
            library.sy_own_experts(
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
        with self._lock:
            check(library.sy_world_barrier(self._open()))

    def abort(self) -> None:
        """End the world for all its ranks: every wait, now and later, raises `Aborted`.

        For a rank that cannot go on. From any thread; waits for nobody. Layers of the world cannot
        be used any more.
        """
        with self._shared() as handle:
            check(library.sy_world_abort(handle))

    def close(self) -> None:
        """Give the handle back. Layers of this world live on. May be called again."""
        super().close()


def _options(
    deadline: float,
    rendezvous: str = "",
    chunk_bytes: int = 0,
    window: int = 0,
    secret: str = "",
) -> _abi.WorldOptions:
    if not isinstance(secret, str):
        # Its value is nobody else's business.
        raise InvalidArgument(f"secret is a {type(secret).__name__}; use a str of random characters")
    return _abi.WorldOptions(
        deadline_seconds=deadline, rendezvous=_values.text("rendezvous", rendezvous) or None,
        network_chunk_bytes=chunk_bytes, network_window=window,
        secret=_values.text("secret", secret) or None,
    )


def _place() -> tuple[str, str]:
    """What ranks of one host have in common: its boot and the network namespace."""

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

    boot = read("/proc/sys/kernel/random/boot_id") or os.uname().nodename
    return boot, link("/proc/self/ns/net")


def _has_secret() -> bool:
    return any(os.environ.get(name) for name in ("SWITCHYARD_SECRET_FILE", "SWITCHYARD_SECRET"))


def _ranks(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:8]))
    return f"ranks {shown}{', …' if len(numbers) > 8 else ''}"


def _store_hosts(dist: Any) -> list[tuple[str, bool]]:
    """Where torch's store may be, and if the other ranks know it by that name."""
    hosts = [(os.environ.get("MASTER_ADDR", ""), True)]
    # With init_method="tcp://..." or a store of the caller's, no variable has it.
    store = getattr(dist.distributed_c10d, "_get_default_store", lambda: None)()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    hosts.append((getattr(store, "host", ""), True))
    hosts.append((os.uname().nodename, False))
    return [(host, known) for host, known in hosts if host]


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _reached_by_others(ip: str) -> bool:
    address = ipaddress.ip_address(ip.partition("%")[0])
    return not (address.is_loopback or (address.version == 6 and address.is_link_local))


def _own_address(hosts: list[tuple[str, bool]]) -> str:
    """The address by which this process reaches the first of `hosts` that others can use, too."""
    tried = []
    for host, known in hosts:
        try:
            found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        except OSError as error:
            tried.append(f"{host}: {error}")
            continue
        for family, kind, protocol, _, address in found:
            try:
                # Nothing is sent: a datagram socket that is connected knows its own address. On
                # the way to this host itself, that is the host's address.
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    ip = probe.getsockname()[0]
            except OSError as error:
                tried.append(f"{host}: {error}")
                continue
            if _reached_by_others(ip):
                return ip
            tried.append(f"{host}: {ip}")
        # A host's own name often means loopback there. The others found the store by that name.
        if known and host != "localhost" and not _is_ip(host):
            return host
    raise InvalidArgument(
        "the group is spread over several hosts, and this process knows no address of its host "
        f"that others reach ({'; '.join(tried)}); set MASTER_ADDR to the host of the group's "
        "store, as the others know it"
    )


def _keep_port(address: str) -> tuple[str, socket.socket]:
    """A rendezvous at a port that is free, and a socket that keeps it from others, except from
    those that, like the library, want to listen where nobody listens."""
    v6 = ":" in address
    kept = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_STREAM)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("::" if v6 else "", 0))
    port = kept.getsockname()[1]
    return f"tcp://[{address}]:{port}" if v6 else f"tcp://{address}:{port}", kept


_names = 0
_lock = threading.RLock()
_default: World | None = None


@in_child
def _forget_default() -> None:
    global _lock, _default
    _lock, _default = threading.RLock(), None


def _next_name() -> int:
    global _names
    with _lock:
        _names += 1
        return _names


def default_world() -> World:
    """The world of one that layers use where none is given."""
    global _default
    with _lock:
        if _default is None or _default.closed:
            _default = World.single()
        return _default


def checked_world(world: Any) -> World | None:
    if world is None or isinstance(world, World):
        return world
    raise InvalidArgument(f"world is a {type(world).__name__}; pass a switchyard.World, or None")
