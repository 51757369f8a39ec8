"""A Ctrl-C in the midst of a live setting: it is in force or not, and `effective` says which."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
import infercore_models
from engine.interrupts import interrupt
from infercore.engine import live

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = list(range(20, 40))
FILES = ("context.py", "base.py", "paged.py", "paged_request.py", "compiled.py")


def row(context: Any) -> Any:
    context.clear()
    context.decode(TEXT)
    return context.logits().copy()


def settings(model: Any) -> dict[str, tuple[Any, Any]]:
    """Return by name what is set, and what was set before."""
    spec = ic.AdapterSpec(
        path=str(infercore_models.path("storyteller-lora", "gguf-f32")), scale=3.0
    )
    vector = np.random.default_rng(3).normal(0, 0.5, model.info.n_embd).astype(np.float32)
    return {"set_adapters": ([spec], []), "set_control_vector": ({1: vector}, None)}


@pytest.mark.parametrize("name", ["set_adapters", "set_control_vector"])
def test_it_is_set_or_not(model: Any, new_context: Callable[..., Any], name: str) -> None:
    fields = {"n_ctx": 64, "n_threads": 1, "n_threads_batch": 1}
    value, nothing = settings(model)[name]
    plain = new_context(**fields)
    rows = [row(plain)]
    try:
        getattr(plain, name)(value)
    except ic.UnsupportedFeatureError:  # nothing that could be broken off
        assert np.array_equal(row(plain), rows[0])
        return
    rows.append(row(plain))
    assert np.abs(rows[0] - rows[1]).max() > 0.1
    context = new_context(**fields)
    plugin = Path(sys.modules[type(context._inner).__module__.split(".")[0]].__path__[0])
    files = [str(plugin / file) for file in FILES]
    files += [str(Path(live.__file__).with_name(file)) for file in ("live.py", "context.py")]
    for at in range(1, 5000):
        came = interrupt(at, partial(getattr(context, name), value), tuple(files))
        try:
            found = row(context)
        except ic.SessionFatalError:
            context = new_context(**fields)
            continue
        told = context.effective.get("adapters" if name == "set_adapters" else "control_vector")
        assert np.abs(found - rows[bool(told)]).max() < 1e-3, at
        if not came:
            assert told
            assert at > 1
            return
        getattr(context, name)(nothing)
    pytest.fail("it never ended")
