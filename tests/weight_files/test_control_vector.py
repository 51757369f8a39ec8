"""Files of control vectors: read as llama.cpp reads them, refused by type where they are broken."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
from infercore.testing import load_reference_model
from infercore.weight_files import control_vector

if TYPE_CHECKING:
    from pathlib import Path

N_LAYER, N_EMBD = 4, 8
ROWS = {1: np.arange(8.0), 3: -np.ones(8)}


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def gguf(
    tensors: Any, *, architecture: str = "controlvector", kind: int = 0, dims: Any = None
) -> bytes:
    """Return a file with one-dimensional float32 tensors by name."""
    entries = [
        text("general.architecture") + struct.pack("<I", 8) + text(architecture),
        text("controlvector.layer_count") + struct.pack("<Ii", 5, len(tensors)),
    ]
    body, infos = b"", b""
    for name, values in tensors.items():
        data = np.asarray(values, dtype="<f4").tobytes()
        shape = dims or (len(data) // 4,)
        infos += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        infos += struct.pack("<IQ", kind, len(body))
        body += data + bytes(-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries) + infos
    return head + bytes(-len(head) % 32) + body


def named(rows: Any) -> dict[str, Any]:
    return {f"direction.{layer}": row for layer, row in rows.items()}


def read(path: Path, *scales: float) -> Any:
    specs = [ic.AdapterSpec(path=path, scale=scale) for scale in scales or (1.0,)]
    return control_vector.read(specs, N_LAYER, N_EMBD)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "vector.gguf"


def test_what_the_file_says_is_read(path: Path) -> None:
    path.write_bytes(gguf(named(ROWS)))
    expected = np.zeros((N_LAYER, N_EMBD))
    for layer, row in ROWS.items():
        expected[layer] = row
    assert np.array_equal(read(path), expected)
    assert np.array_equal(read(path, 0.5, -2.0), -1.5 * expected)


BROKEN = {
    "other magic": b"GGML" + gguf(named(ROWS))[4:],
    "empty": b"",
    "a model": gguf(named(ROWS), architecture="llama"),
    "no tensors": gguf({}),
    "layer 0": gguf({"direction.0": np.ones(8)}),
    "a layer beyond": gguf({"direction.4": np.ones(8)}),
    "a layer without end": gguf({"direction." + "9" * 400: np.ones(8)}),
    "a negative layer": gguf({"direction.-1": np.ones(8)}),
    "another name": gguf({**named(ROWS), "blk.0.attn_q.weight": np.ones(8)}),
    "another width": gguf({"direction.1": np.ones(9)}),
    "a matrix": gguf({"direction.1": np.ones(8)}, dims=(8, 2)),
    "no dimensions": gguf({"direction.1": np.ones(8)}, dims=(0,)),
    "dimensions beyond memory": gguf({"direction.1": np.ones(8)}, dims=(2**62,)),
    "float16": gguf(named(ROWS), kind=1),
    "an unknown type": gguf(named(ROWS), kind=4_000_000),
    "no numbers": gguf({"direction.1": [np.nan] * 8}),
    "infinite": gguf({"direction.1": [np.inf] * 8}),
    "more tensors than bytes": b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0),
    "more entries than bytes": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_none_is_refused(path: Path, name: str) -> None:
    path.write_bytes(BROKEN[name])
    with pytest.raises(ic.ModelFormatError, match="is not a control vector") as caught:
        read(path)
    assert caught.value.path == str(path)


def test_every_cut_and_every_byte(path: Path) -> None:
    whole = gguf(named(ROWS))
    for end in range(0, len(whole) - 1, 3):
        path.write_bytes(whole[:end])
        with pytest.raises(ic.ModelFormatError):
            read(path)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            assert np.isfinite(read(path)).all()
        except ic.ModelFormatError:
            continue


def test_places_that_are_no_file(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ic.ModelNotFoundError):
        read(path)
    with pytest.raises(ic.ModelFormatError):
        read(tmp_path)
    with pytest.raises(ic.InvalidInputError):
        ic.AdapterSpec(path="a\0b")


def test_a_scale_beyond_float32(path: Path) -> None:
    path.write_bytes(gguf({"direction.1": np.full(8, 1e30)}))
    with pytest.raises(ic.ModelFormatError, match="beyond what float32 holds"):
        read(path, 1e30)


def test_a_context_takes_a_path_a_file_and_several(path: Path) -> None:
    with load_reference_model() as model, model.new_context(n_ctx=64) as context:
        n_layer, n_embd = model.info.n_layer, model.info.n_embd
        row = np.linspace(-1, 1, n_embd).astype(np.float32)
        path.write_bytes(gguf({f"direction.{n_layer - 1}": row}))

        def logits(directions: Any) -> Any:
            context.set_control_vector(directions)
            context.eval([5, 6, 7], 0)
            return context.logits().copy()

        plain, expected = logits(None), logits({n_layer - 1: row})
        spec = ic.AdapterSpec(path=path)
        half = ic.AdapterSpec(path=path, scale=0.5)
        for given in (str(path), path, spec, [spec], (half, half)):
            assert np.array_equal(logits(given), expected)
        assert not np.array_equal(logits(half), expected)
        assert np.array_equal(logits([]), plain)
        path.write_bytes(BROKEN["float16"])
        logits({n_layer - 1: row})
        for wrong in (spec, [spec, half], path):
            with pytest.raises(ic.ModelFormatError):
                context.set_control_vector(wrong)
        for wrong in ([5], ["x.gguf"], object(), b"x"):
            with pytest.raises(ic.InvalidInputError):
                context.set_control_vector(wrong)
        context.eval([5, 6, 7], 0)
        assert np.array_equal(context.logits(), expected)
