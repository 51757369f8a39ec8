"""LoRA adapters over which the engine ends the process; here each is a typed error."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import infercore as ic
import pack
from llamacpp import random_gguf

PARTS = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
CHILD = """
    import sys
    import infercore as ic

    spec = ic.AdapterSpec(path=sys.argv[2])
    with ic.load_model(sys.argv[1], backend="llamacpp") as model:
        for way in ("set_adapters", "adapters"):
            with model.new_context(n_ctx=64) as context:
                context.decode([5, 6])
                try:
                    if way == "adapters":
                        model.new_context(n_ctx=64, adapters=(spec,))
                    else:
                        context.set_adapters([spec])
                        context.decode([7])
                except ic.InferCoreError as error:
                    print(type(error).__name__)
                assert context.n_past() == 2, context.n_past()
                context.decode([8])
"""


def pairs(n=4, kind=np.float32):
    random = np.random.default_rng(1)
    return {
        f"blk.0.attn_q.weight.lora_{letter}": random.standard_normal(shape).astype(kind)
        for letter, shape in (("a", (n, random_gguf.N_EMBD)), ("b", (random_gguf.N_EMBD, n)))
    }


def retyped(data: bytes, kind: int) -> bytes:
    at = data.index(b"lora_a") + 6 + 4 + 16
    return data[:at] + struct.pack("<I", kind) + data[at + 4 :]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that puts an adapter on a model in another process."""
    pack.need_backend("llamacpp")
    monkeypatch.setenv("INFERCORE_CACHE_DIR", str(tmp_path / "cache"))
    model = random_gguf.write(tmp_path / "model.gguf", "llama")

    def run(path):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CHILD), str(model), str(path)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.returncode, done.stderr[-1500:])
        return done.stdout.split()

    return run


@pytest.mark.parametrize(
    "metadata",
    [
        {**PARTS, "general.type": 5},
        {**PARTS, "adapter.type": 1.5},
        {**PARTS, "adapter.lora.alpha": "much"},
        {**PARTS, "general.architecture": ["llama"]},
    ],
    ids=["type", "kind", "alpha", "architecture"],
)
def test_an_entry_of_another_type(run, tmp_path, metadata):
    path = random_gguf.write_file(tmp_path / "a.gguf", metadata, pairs())
    assert run(path) == ["ModelFormatError"] * 2


@pytest.mark.parametrize("kind", [26, 24, 28, 36, 2**31 - 1])
def test_a_matrix_of_another_type(run, tmp_path, kind):
    data = random_gguf.write(tmp_path / "a.gguf", "adapter").read_bytes()
    path = tmp_path / "b.gguf"
    path.write_bytes(retyped(data, kind))
    assert run(path) == ["ModelFormatError"] * 2


def test_what_is_no_file(run, tmp_path):
    os.mkfifo(tmp_path / "fifo.gguf")
    for path in (tmp_path / "fifo.gguf", tmp_path, "/dev/zero", "/dev/null"):
        assert run(path) == ["ModelFormatError"] * 2
    assert run(tmp_path / "none.gguf") == ["ModelNotFoundError"] * 2


def test_a_death_over_an_adapter_is_a_typed_error(tmp_path, monkeypatch):
    """Whatever no rule knows is tried in a child, once for each model and adapter."""
    pack.need_backend("llamacpp")
    from infercore.engine import trial

    tried = []

    def died(subject, *_):
        tried.extend(subject.adapters)
        raise ic.ModelFormatError("it died", path=subject.path)

    model_path = random_gguf.write(tmp_path / "model.gguf", "llama")
    adapter = random_gguf.write(tmp_path / "adapter.gguf", "adapter")
    monkeypatch.setenv("INFERCORE_CACHE_DIR", str(tmp_path / "cache"))
    trial.forget()
    with ic.load_model(model_path) as model, model.new_context(n_ctx=64) as context:
        spec = ic.AdapterSpec(path=str(adapter))
        with monkeypatch.context() as patch:
            patch.setattr(trial, "_try", died)
            for _ in range(2):
                with pytest.raises(ic.ModelFormatError, match="it died"):
                    context.set_adapters([spec])
            with pytest.raises(ic.ModelFormatError, match="it died"):
                model.new_context(n_ctx=64, adapters=(spec,))
        assert tried == [str(adapter)] * 3
        context.set_adapters([spec])  # now it is tried, and lives
        with monkeypatch.context() as patch:
            patch.setattr(trial, "_try", died)
            context.set_adapters([])
            context.set_adapters([spec])
    trial.forget()
