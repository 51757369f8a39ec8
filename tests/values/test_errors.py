"""The error tree: builtins, attributes, state afterwards, pickling."""

from __future__ import annotations

import copy
import pickle

import pytest

import infercore as ic
from infercore import errors

BUILTINS = [
    ("BackendNotFoundError", LookupError),
    ("BackendUnavailableError", ImportError),
    ("ModelLoadError", OSError),
    ("ModelNotFoundError", OSError),
    ("ModelFormatError", OSError),
    ("OutOfMemoryError", MemoryError),
    ("InvalidInputError", ValueError),
    ("InvalidTokenError", ValueError),
    ("InvalidStateError", RuntimeError),
    ("OutputNotAvailableError", RuntimeError),
    ("ContextOverflowError", ValueError),
    ("ManifestMismatchError", ValueError),
    ("UnsupportedFeatureError", NotImplementedError),
    ("SnapshotError", ValueError),
    ("GrammarError", ValueError),
    ("DecodeAbortedError", RuntimeError),
    ("SessionClosedError", RuntimeError),
    ("SessionBusyError", RuntimeError),
    ("SessionFatalError", RuntimeError),
    ("PluginError", RuntimeError),
    ("PoolFullError", RuntimeError),
    ("CallTimeoutError", TimeoutError),
    ("TransientEngineError", RuntimeError),
]

SAMPLES = [
    ic.ContextOverflowError(stage="prefix", resident_tokens=3, additional_tokens=9, n_ctx=10),
    ic.ModelNotFoundError("gone", path="x.gguf"),
    ic.InvalidTokenError("bad", field="token", value=-1, allowed=(0, 9)),
    ic.ManifestMismatchError(field="backend", expected="a", actual="b"),
    ic.UnsupportedFeatureError(feature="lora", backend="x", hint="try y"),
    ic.DecodeAbortedError("cut", resident_tokens=7),
    ic.SnapshotError("bad", reason="checksum"),
    ic.PoolFullError(n_waiting=1024, retry_after=0.5),
    ic.CallTimeoutError(elapsed_ms=12.5, resident_tokens=7),
    ic.TransientEngineError(backend="x", retry_after=2.0),
    ic.OutOfMemoryError("full", attempts=("n_ctx=4096",)),
    ic.BackendUnavailableError("cannot run here", backend="x", reason="no GPU"),
]


@pytest.mark.parametrize(("name", "builtin"), BUILTINS)
def test_each_error_is_also_the_closest_builtin(name: str, builtin: type) -> None:
    cls = getattr(ic, name)
    assert issubclass(cls, builtin)
    assert issubclass(cls, ic.InferCoreError)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling_with_their_facts(error: ic.InferCoreError) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert twin.__dict__ == error.__dict__
        assert getattr(twin, "msg", None) == getattr(error, "msg", None)  # ImportError's own


def test_state_afterwards() -> None:
    assert SAMPLES[0].state_after == "unchanged"
    engine = ic.ContextOverflowError(
        stage="engine", resident_tokens=3, additional_tokens=9, n_ctx=10
    )
    assert engine.state_after == "partial"
    assert SAMPLES[5].state_after == "partial"
    assert ic.CallTimeoutError(elapsed_ms=1, resident_tokens=0).state_after == "partial"
    assert ic.PoolFullError(n_waiting=1).state_after == "unchanged"
    assert ic.TransientEngineError(backend="x").state_after == "unchanged"
    assert errors.SessionClosedError("x").state_after == "closed"


def test_the_tree_in_the_docstring_names_every_error() -> None:
    public = [name for name in dir(errors) if name.endswith("Error") and name[0].isupper()]
    assert [name for name in public if name not in (errors.__doc__ or "")] == []
