"""Safetensors files, read into tensors and written again, for laws that change them.

Source of the format: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    import numpy.typing as npt

_ALIGNED = 8  # bytes of which the header takes a multiple, so that numbers can be mapped in place


@attrs.frozen(eq=False)
class Tensor:
    """A tensor of a file: its type ("F32"), its shape, and its numbers as bytes."""

    kind: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def numbers(self) -> npt.NDArray[np.float32]:
        """The numbers of a float32 tensor."""
        return np.frombuffer(self.data, "<f4").reshape(self.shape)


def of(numbers: npt.NDArray[Any]) -> Tensor:
    """Return ``numbers`` as a float32 tensor."""
    return Tensor("F32", numbers.shape, numbers.astype("<f4").tobytes())


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            content = data[start + first : start + last]
            found[name] = Tensor(entry["dtype"], tuple(entry["shape"]), content)
    return found


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` to ``path``, in place of what lies there."""
    header, body, at = {}, [], 0
    for name, tensor in tensors.items():
        ends = [at, at := at + len(tensor.data)]
        header[name] = {"dtype": tensor.kind, "shape": tensor.shape, "data_offsets": ends}
        body.append(tensor.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED)
    path.unlink(missing_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(body))
