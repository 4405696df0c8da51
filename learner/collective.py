"""The process group of the learner ranks: forming it, and the few reductions that a step needs."""

import fcntl
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Collective:
    """This rank's place among `world` ranks. Reductions of one rank cost nothing."""

    rank: int
    world: int
    device: torch.device

    def sum(self, values: Tensor) -> Tensor:
        """In place, over ranks; every rank must call."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """In place, over ranks; every rank must call."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        """Returns once every rank has come here."""
        self.sum(torch.zeros(1, device=self.device))

    def together(self, work: Callable[[], None]) -> None:
        """Do `work`, which takes no collectives, and go on only if it went well on every rank.

        All ranks call. Raises what `work` raised here, RuntimeError where it failed elsewhere.
        """
        error: Exception | None = None
        try:
            work()
        except Exception as caught:
            error = caught
        failed = self.sum(torch.tensor([float(error is not None)], device=self.device)).item()
        if error is not None:
            raise error
        if failed:
            raise RuntimeError("another learner rank could not do its part")

    def _reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world > 1:
            dist.all_reduce(values, op)
        return values


def open_store(ip: str, timeout_s: float) -> dist.TCPStore:
    """The store at which ranks meet, on a free port of this address: `host` and `port` say where.
    The process that opens it serves it for as long as it keeps the object."""
    return dist.TCPStore(
        ip, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def join(
    rank: int, world: int, store: dist.TCPStore | str, node_ip: str, backend: str, timeout_s: float
) -> tuple[Collective, DeviceMesh]:
    """Form the group that meets at `store` (the object in the process that opened it, host:port
    in the others) and a mesh over it. `node_ip` is an address of this machine that the others
    reach.

    Raises what torch raises when not every rank has come within `timeout_s`; the same time bounds
    each later collective.
    """
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    on_gpu = backend == "nccl"
    if on_gpu:
        torch.cuda.set_device(0)
    for variable in ("GLOO_SOCKET_IFNAME", *(("NCCL_SOCKET_IFNAME",) if on_gpu else ())):
        if interface := interface_of(node_ip):
            os.environ.setdefault(variable, interface)
    timeout = timedelta(seconds=timeout_s)
    if isinstance(store, str):
        host, _, port = store.rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    return Collective(rank, world, device), init_device_mesh(device.type, (world,))


def interface_of(ip: str) -> str | None:
    """Name of the network interface with this IPv4 address; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == ip:
                return name
    return None
