"""An allocator with little room, on a CPU: what happens on a GPU whose memory does not suffice."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LimitedMemory(TorchDispatchMode):
    """Within it, tensors that are made may take `limit` bytes together at a time, beside those that were there before. More raises
    what CUDA's allocator raises. `peak`: the most that they took; `refused`: how many did not fit."""

    def __init__(self, limit: int = 2**62) -> None:
        super().__init__()
        self.limit = limit
        self.live = self.peak = self.refused = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if not isinstance(one, torch.Tensor) or one.device.type == "meta":
                continue
            storage = one.untyped_storage()
            if storage._cdata in before | self._seen:
                continue
            size = storage.nbytes()
            if self.live + size > self.limit:
                self.refused += 1
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU 0 has a total capacity of "
                    f"{self.limit / 2**20:.2f} MiB of which {(self.limit - self.live) / 2**20:.2f} MiB is free."
                )
            self._seen.add(storage._cdata)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, storage._cdata, size)
        return made

    def _freed(self, storage: int, size: int) -> None:
        self._seen.discard(storage)
        self.live -= size
