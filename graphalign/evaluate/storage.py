"""What buffers hold while the inference graph is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphalign.errors import CaptureFileError
from graphalign.evaluate.aten import MAX_ELEMENTS
from graphalign.ir.inference import Parameter

UNKNOWN = float("nan")


@dataclass
class Storage:
    """Flat content of a buffer: what memory holds, and what registers held when it was stored."""

    id: Any
    """Equal ids mean equal content."""
    memory: torch.Tensor
    register: torch.Tensor

    def read(self, index: torch.Tensor, *, register: bool = False) -> torch.Tensor:
        """Elements at flat indices; one outside (of a masked-out lane) reads some element."""
        data = self.register if register else self.memory
        if index.numel():
            low, high = (int(x) for x in index.aminmax())
            if low < 0 or high >= data.numel():
                index = index.clamp(0, max(data.numel() - 1, 0))
        return data[index]


class Rows(Storage):
    """A table of which some rows are recorded; the others are unknown. The whole of it is made only when it is asked for."""

    def __init__(self, id: Any, rows: Sequence[int], height: int, data: torch.Tensor, key: Any = None) -> None:
        """`data` is [len(rows), width], `rows` ascending; `key` says which table it is."""
        self.id, self.height, self.key = id, height, key
        self.width = data.shape[1]
        self.recorded = torch.cat([data.reshape(-1), torch.tensor([UNKNOWN], dtype=torch.float64)])
        self.place = torch.full((height,), -1)
        self.place[list(rows)] = torch.arange(len(rows))
        self._whole: torch.Tensor | None = None

    def read(self, index: torch.Tensor, *, register: bool = False) -> torch.Tensor:
        """Elements at flat indices, unknown ones as NaN."""
        index = index.clamp(0, max(self.height * self.width - 1, 0))
        row = self.place[self.row(index)]
        at = row * self.width + index % max(self.width, 1)
        return self.recorded[torch.where(row < 0, len(self.recorded) - 1, at)]

    def row(self, index: torch.Tensor) -> torch.Tensor:
        """The rows of elements at flat indices."""
        return index.clamp(0, max(self.height * self.width - 1, 0)) // max(self.width, 1)

    @property
    def memory(self) -> torch.Tensor:  # type: ignore[override]
        """All elements, flat."""
        if self._whole is None:
            self._whole = self.read(torch.arange(self.height * self.width))
        return self._whole

    @property
    def register(self) -> torch.Tensor:  # type: ignore[override]
        """The same: nothing is ever stored in it."""
        return self.memory


def laid_out(positions: Sequence[int], size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Positions as float64 in an input's own layout, flat; multimodal rotary embedding takes three rows, which are equal for text."""
    data = torch.tensor(positions, dtype=torch.float64)
    if len(size) < 2 or len(stride) != len(size) or size[-1] != len(data) or min(stride) < 0:
        return data
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if not 0 < extent <= MAX_ELEMENTS:
        raise CaptureFileError("the positions of the capture have an impossible layout", where=f"{list(size)}, strides {list(stride)}")
    memory = torch.zeros(extent, dtype=torch.float64)
    memory.as_strided(list(size), list(stride)).copy_(data.expand(list(size)))
    return memory


@dataclass
class Lazy:
    """A parameter: elements are made when they are read."""

    id: Any
    parameter: Parameter
    dtype: str
