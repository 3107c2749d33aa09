"""Memory for dummy weights of any size: the same few pages of noise, mapped one behind the other as often as a tensor is long.

Noise has a period of `PERIOD` elements. A file holds a few periods; a region of virtual memory of any length maps it again and again, so
that a tensor in it is an ordinary contiguous tensor whose elements can be read by any kernel. What is resident grows with what
is read, not with what is mapped, but a page counts once for every address at which it is read.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from graphalign.errors import CaptureFailedError

SEED = 0
PERIOD = 1 << 20
"""Elements after which noise repeats: filling layers of any width takes a copy, not a random draw."""
SCALE = 0.02
"""Standard deviation of the noise."""
_PIECE = 32 << 20
"""Bytes that one mapping holds; a kernel allows some ten thousand mappings per process (`vm.max_map_count`)."""

_PRIVATE, _FIXED = 0x02, 0x10  # alike on Linux and macOS
_ANONYMOUS, _NO_RESERVE = (0x20, 0x4000) if sys.platform == "linux" else (0x1000, 0x40)
_READ, _WRITE = 1, 2


@functools.cache
def unit_noise() -> torch.Tensor:
    """One period of the standard normal distribution, float32."""
    return torch.randn(PERIOD, generator=torch.Generator().manual_seed(SEED))


class Region:
    """A range of virtual memory that repeats one period of noise.

    Args:
        dtypes: noise is rounded to them one after the other; tensors have the last.
        size: bytes that tensors may take.

    Raises:
        CaptureFailedError: the system gives no address space.
    """

    def __init__(self, dtypes: tuple[torch.dtype, ...], size: int) -> None:
        noise = unit_noise() * SCALE
        for dtype in dtypes:
            noise = noise.to(dtype)
        raw = noise.view(torch.uint8).numpy().tobytes()
        raw *= max(1, min(_PIECE, size) // len(raw))
        self.dtypes, self.dtype = dtypes, dtypes[-1]
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        with tempfile.TemporaryFile() as file:  # goes with its last mapping
            file.write(raw)
            file.flush()
            self.base, self._memory = _map(file.fileno(), len(raw), self.size)

    def tensor(self, start: int, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """A tensor with a storage of its own, from element `start` of the region on."""
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        flat = torch.frombuffer(self._memory, dtype=self.dtype, count=extent, offset=start * self.dtype.itemsize)
        return flat.as_strided(tuple(shape), tuple(strides))

    def start(self, t: torch.Tensor) -> int | None:
        """The element of the region at which a tensor begins, None if it does not lie in it."""
        at = t.data_ptr() - self.base
        return at // self.dtype.itemsize if 0 <= at < self.size and t.dtype == self.dtype else None


def _map(file: int, length: int, size: int) -> tuple[int, Any]:
    """Map a file of `length` bytes again and again into `size` bytes of address space, privately.

    Returns:
        The address, and an object with the buffer protocol; the memory is unmapped when the last tensor made of it is gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def call(address: int | None, n: int, protection: int, flags: int, file: int) -> int:
        found = libc.mmap(address, n, protection, flags | _PRIVATE, file, 0)
        if found is None or found == ctypes.c_void_p(-1).value:
            raise CaptureFailedError(
                f"no address space for dummy weights: {os.strerror(ctypes.get_errno())}", where=f"{size} bytes",
                hint="raise the limits on virtual memory (ulimit -v, vm.max_map_count), or use fewer --layers",
            )  # fmt: skip
        return int(found)

    base = call(None, size, 0, _ANONYMOUS | _NO_RESERVE, -1)  # reserved without access, so that it counts nowhere
    memory = (ctypes.c_char * size).from_address(base)
    weakref.finalize(memory, libc.munmap, base, size).atexit = False
    for at in range(0, size, length):
        call(base + at, min(length, size - at), _READ | _WRITE, _FIXED | _NO_RESERVE, file)
    return base, memory
