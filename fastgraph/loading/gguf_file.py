"""Reading a GGUF file: its metadata and its tensors, memory-mapped.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's own reader builds several
numpy arrays for each string of a vocabulary and takes seconds; this one reads the header in a single pass.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastgraph.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in the file."""

    shape: tuple[int, ...]  # outermost dimension first, as torch and numpy count
    kind: int  # ggml's number of the quantisation
    offset: int  # bytes from where the file's tensors begin


class GGUFFile:
    """A GGUF file's header, and its tensors on demand. Raises `ModelError` when the file is not one we can read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._at = 0
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_header()
        except (struct.error, ValueError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} is not a whole GGUF file ({error}); download it again") from error

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor, dequantised to float32, in numpy's order of dimensions."""
        gguf = require_gguf()
        info = self.tensors[name]
        try:
            kind = gguf.GGMLQuantizationType(info.kind)
            block, size = gguf.GGML_QUANT_SIZES[kind]
            count = math.prod(info.shape) // block * size
            raw = np.frombuffer(self._bytes, np.uint8, count, self._begin + info.offset).reshape(*info.shape[:-1], -1)
            values: npt.NDArray[np.float32] = gguf.quants.dequantize(raw, kind)
        except (NotImplementedError, KeyError) as error:
            raise ModelError(
                f"{self.path}: the gguf package cannot dequantise {name} ({error}); use another quantisation"
            ) from error
        except ValueError as error:
            raise ModelError(f"{self.path} ends within {name} ({error}); download it again") from error
        return values.reshape(info.shape)

    def _read_header(self) -> None:
        magic, version = self._take("4sI")
        if magic != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if version not in (2, 3):
            raise ModelError(f"{self.path} is GGUF version {version}; versions 2 and 3 (little-endian) are read")
        tensors, entries = self._take("QQ")
        for _ in range(entries):
            key = self._string()
            self.metadata[key] = self._value(self._take("I")[0])
        for _ in range(tensors):
            name = self._string()
            (dimensions,) = self._take("I")
            shape = self._take(f"{dimensions}Q")  # innermost first
            self.tensors[name] = TensorInfo(shape[::-1], *self._take("IQ"))
        alignment = self.metadata.get("general.alignment", 32)
        self._begin = -(-self._at // alignment) * alignment

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._bytes, self._at)
        self._at += struct.calcsize("<" + layout)
        return values

    def _string(self) -> str:
        (length,) = self._take("Q")
        text = self._bytes[self._at : self._at + length]
        if len(text) != length:
            raise ValueError("it ends within its header")
        self._at += length
        return text.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, length = self._take("IQ")
            if item in _SCALARS:
                return list(self._take(f"{length}{_SCALARS[item]}"))
            return [self._value(item) for _ in range(length)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown type {kind} in its metadata")
        return self._take(_SCALARS[kind])[0]


def require_gguf() -> Any:
    """The `gguf` package, which knows how each quantisation is undone."""
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise ModelError("reading a GGUF file needs the gguf package: pip install 'fastgraph[gguf]'") from error
    return gguf
