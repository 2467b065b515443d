"""An allocator with little room, on a CPU: what happens on a GPU whose memory does not suffice."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LimitedMemory(TorchDispatchMode):
    """Within it, tensors that are computed with or made may take `limit` bytes together, but for those that are mapped from files
    and those of `host`. More raises what CUDA's allocator raises. `live`: what they take now; `peak`: the most that they took;
    `refused`: how many did not fit."""

    def __init__(self, limit: int = 2**62, host: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.limit = limit
        self.live = self.peak = self.refused = 0
        self._seen = {one.untyped_storage()._cdata for one in host}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count((args, kwargs))  # weights that were there before, or that another thread has brought
        made = func(*args, **(kwargs or {}))
        self._count(made)
        return made

    def _count(self, values: Any) -> None:
        for one in tree_leaves(values):
            if not isinstance(one, torch.Tensor) or one.device.type == "meta":
                continue
            storage = one.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._seen or not storage.resizable():  # such is what comes from a file
                continue
            if self.live + size > self.limit:
                self.refused += 1
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU 0 has a total capacity of "
                    f"{self.limit / 2**20:.2f} MiB of which {(self.limit - self.live) / 2**20:.2f} MiB is free."
                )
            self._seen.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size
