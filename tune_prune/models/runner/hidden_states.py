"""Hidden states between two layers, while they wait for the next one: on the device, in host memory, or in a file.

A pass that takes a model layer by layer keeps what every sample is between two layers; one for gradients keeps the inputs of
all layers: in bfloat16, 512 samples of 256 tokens at a hidden size of 4,096 are 1 GB a layer.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Hashable, Iterator, MutableMapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tune_prune.core.errors import UserError

T = TypeVar("T")


class _States(MutableMapping[Hashable, Tensor], Generic[T]):
    """Tensors by any key; `_places` says where each is."""

    def __init__(self) -> None:
        self._places: dict[Hashable, T] = {}

    def __delitem__(self, key: Hashable) -> None:
        del self._places[key]

    def __contains__(self, key: object) -> bool:  # Mapping's own asks for the tensor
        return key in self._places

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class KeptStates(_States[Tensor]):
    """Tensors kept in host memory and handed out on `device`; without one, kept and handed out where they are."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self.device = device

    def __setitem__(self, key: Hashable, states: Tensor) -> None:
        self._places[key] = states.detach() if self.device is None else states.detach().to("cpu")

    def __getitem__(self, key: Hashable) -> Tensor:
        return self._places[key] if self.device is None else self._places[key].to(self.device)


class SpilledStates(_States[tuple[int, torch.Size, torch.dtype]]):
    """Tensors kept in a file of the system's folder for temporary files (where each begins, in bytes) and handed out on `device`.

    The file has no name, so nothing is left behind however the process ends; it is gone when the object is. Room that a key
    had is used again for one of equal size. Raises UserError where the file cannot be made, cannot grow or cannot be read.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        try:
            # Closed when it is collected. Without a buffer, in which what a full disk has refused would wait for that.
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._error("cannot be made", error) from error
        self._free: dict[int, list[int]] = {}  # by size in bytes: where there is room
        self._end = 0

    def __setitem__(self, key: Hashable, states: Tensor) -> None:
        if key in self:
            del self[key]
        room = self._free.get(states.nbytes)
        start = room.pop() if room else self._end
        content = _bytes(states.detach().to("cpu").contiguous())
        try:
            self._file.seek(start)
            while content:  # the system takes 2 GiB at a time
                content = content[self._file.write(content) :]
        except OSError as error:
            raise self._error(f"cannot grow to {(start + states.nbytes) / 1e9:.2f} GB", error) from error
        self._end = max(self._end, start + states.nbytes)
        self._places[key] = start, states.shape, states.dtype

    def __getitem__(self, key: Hashable) -> Tensor:
        start, shape, dtype = self._places[key]
        states = torch.empty(shape, dtype=dtype)
        content = _bytes(states)
        try:
            self._file.seek(start)
            while content:
                if not (count := self._file.readinto(content)):
                    raise OSError(errno.EIO, "it has been cut")
                content = content[count:]
        except OSError as error:
            raise self._error("cannot be read", error) from error
        return states.to(self.device)

    def __delitem__(self, key: Hashable) -> None:
        start, shape, dtype = self._places.pop(key)
        self._free.setdefault(shape.numel() * dtype.itemsize, []).append(start)

    def _error(self, what: str, error: OSError) -> UserError:
        return UserError(
            f"the file for states between layers in {tempfile.gettempdir()} {what} ({error.strerror}); make room "
            "there, or set TMPDIR to another folder"
        )


def _bytes(states: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return states.view(-1).view(torch.uint8).numpy().data
