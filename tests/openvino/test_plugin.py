"""What the plugin says of itself, without importing the engine."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

import infercore as ic
from infercore_openvino import plugin


def test_the_descriptor() -> None:
    found = plugin.infercore_backend()
    assert (found.name, found.api_version, found.formats) == (
        "openvino",
        ic.API_VERSION,
        ("openvino",),
    )
    assert "inference_precision" in found.context_options
    assert "cache_dir" in found.model_options


def test_the_engine_is_not_imported_for_a_description(ov_path) -> None:
    code = (
        "import sys\n"
        "from infercore_openvino import plugin\n"
        "found = plugin.infercore_backend()\n"
        f"assert found.match({str(ov_path)!r}) == 100\n"
        "assert found.engine_version()\n"
        "print(sorted(m for m in ('openvino', 'tokenizers', 'numpy') if m in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_devices() -> None:
    plugin.check()
    names = {device.name: device for device in plugin.devices()}
    assert names["CPU"].kind == "cpu"
    assert names["CPU"].description
    assert names["CPU"].memory_total_bytes > 2**28


@pytest.mark.parametrize(
    ("version", "works"),
    [
        ("2026.4.0", True),
        ("2026.10.1", True),
        ("2026.3.0", False),
        ("2025.4.1", False),
        ("2027.0.0", False),
        ("odd", False),
    ],
)
def test_the_version_gate(monkeypatch, version, works) -> None:
    monkeypatch.setattr(plugin, "engine_version", lambda: version)
    if works:
        plugin.check()
        return
    with pytest.raises(ic.BackendUnavailableError) as caught:
        plugin.check()
    assert version in caught.value.reason


def test_without_the_engine(monkeypatch) -> None:
    def missing() -> str:
        raise plugin.metadata.PackageNotFoundError("openvino")

    monkeypatch.setattr(plugin, "engine_version", missing)
    with pytest.raises(ic.BackendUnavailableError, match="not installed"):
        plugin.check()


def test_an_engine_that_does_not_import(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ic.BackendUnavailableError, match="tokenizers"):
        plugin.check()


def test_memory_is_planned_from_the_files(ov_path, ov_model) -> None:
    plan = plugin.plan_memory(str(ov_path), ic.ModelConfig(), ic.ContextConfig(n_ctx=512))
    assert plan.weights_bytes == (ov_path / "openvino_model.bin").stat().st_size
    assert plan == ov_model.plan_memory(n_ctx=512)
    for types in ("f32", "f16"):
        plan = ov_model.plan_memory(n_ctx=512, type_k=types, type_v=types)
        with ov_model.new_context(n_ctx=512, type_k=types, type_v=types) as context:
            assert plan.kv_bytes == context._inner._cache.n_bytes


TWO = """
import gc, os, signal, sys, threading
import infercore as ic

def load():
    return ic.load_model(sys.argv[1], backend="openvino")

def use(model):
    with model.new_session(n_ctx=64, n_threads=1) as session:
        session.generate("Once", max_tokens=1, temperature=0)

models = [load(), load()]
maker = threading.Thread(target=lambda: models.append(load()))
maker.start()
maker.join()
while models:  # in the order they were made
    use(models[0])
    models.pop(0).close()
    gc.collect()
try:
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(60)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_after_models_were_closed_in_any_order(ov_path) -> None:
    """An engine that is freed must not leave the stack of signal handlers freed on record."""
    command = [sys.executable, "-c", TWO, str(ov_path)]
    restored = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    done = subprocess.run(command, capture_output=True, timeout=100, check=False, **restored)
    assert (done.returncode, done.stdout) == (0, b"interrupted\n")
