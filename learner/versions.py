"""Host copies of past weights, sharded like the parameters, for scoring under older versions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from learner.model import Policy, local_shards


class VersionStore:
    """This rank's shards of up to `capacity` versions before the current one.

    Copies are in the dtype of the forward pass: that is all a scoring pass sees of the float32
    master weights. The current weights are not copied until they are about to change.
    """

    def __init__(self, policy: Policy, capacity: int, dtype: torch.dtype) -> None:
        self._policy = policy
        self._capacity = capacity
        self._dtype = dtype
        self._copies: dict[int, list[Tensor]] = {}
        self._stash: list[Tensor] = []

    @property
    def versions(self) -> list[int]:
        """Kept versions, oldest first; without the current one."""
        return sorted(self._copies)

    @torch.no_grad()
    def keep(self, version: int) -> None:
        """Copy the current weights as `version`, in place of the oldest when full."""
        if not self._capacity or version in self._copies:
            return
        buffers = None
        while len(self._copies) >= self._capacity:
            buffers = self._copies.pop(min(self._copies))
        shards = local_shards(self._policy)
        if buffers is None:
            buffers = [_host_buffer(shard, self._dtype) for shard in shards]
        torch._foreach_copy_(buffers, shards)
        self._copies[version] = buffers

    def resize(self, capacity: int) -> None:
        """Keep up to `capacity` versions from now on; the oldest beyond it are dropped."""
        self._capacity = capacity
        for version in self.versions[: max(0, len(self._copies) - capacity)]:
            del self._copies[version]

    def copies(self) -> dict[int, list[Tensor]]:
        """This rank's shards of every kept version, to be saved; not to be changed."""
        return dict(self._copies)

    @torch.no_grad()
    def put_back(self, copies: dict[int, list[Tensor]]) -> None:
        """Keep these copies, which `copies` gave, instead of those that are kept now. They may be
        more than the capacity, until the next one is kept."""
        self._copies.clear()
        for version, shards in copies.items():
            buffers = [_host_buffer(shard, self._dtype) for shard in local_shards(self._policy)]
            torch._foreach_copy_(buffers, shards)
            self._copies[version] = buffers

    @contextmanager
    @torch.no_grad()
    def borrowed(self) -> Iterator[Callable[[int], None]]:
        """Yields `load(version)`, which puts a kept version's weights in place of the current.

        The current weights are back, bit for bit, when the context ends.
        """
        shards = local_shards(self._policy)
        loaded = False

        def load(version: int) -> None:
            nonlocal loaded
            if not loaded:
                self._save_current(shards)
                loaded = True
            self._policy.reshard_all()
            torch._foreach_copy_(shards, self._copies[version])

        try:
            yield load
        finally:
            if loaded:
                self._policy.reshard_all()
                torch._foreach_copy_(shards, self._stash)

    def _save_current(self, shards: list[Tensor]) -> None:
        if not self._stash:
            self._stash = [_host_buffer(shard, shard.dtype) for shard in shards]
        torch._foreach_copy_(self._stash, shards)


def _host_buffer(shard: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(shard.shape, dtype=dtype, pin_memory=shard.is_cuda)
