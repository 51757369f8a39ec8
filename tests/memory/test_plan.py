"""What `plan_memory` says beforehand is what loading and decoding take, within 15 %.

Of a model of a few megabytes an engine's fixed costs weigh more than the weights, and buffers are
taken from the system only as far as they are used. So on the pack the cache alone is compared,
with what opening a context takes (llama.cpp writes to all of it then) or with the arrays that
hold it (OpenVINO). Of a model of a real shape everything is: weights, cache and buffers.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
import pack
from infercore.testing import engine_of

if TYPE_CHECKING:
    from collections.abc import Callable

NEAR = 0.15
NEAR_WHOLE = 0.2  # what OpenVINO keeps of weights differs by the processor: 16 % less with AMX
N_CTX = 65536
START = """
import json, sys
import infercore as ic, psutil
backend, path, small, fields = *sys.argv[1:4], json.loads(sys.argv[4])
def rss():
    return psutil.Process().memory_info().rss
warm = ic.load_model(small, backend=backend)
KEPT = ("n_threads", "n_threads_batch", "type_k", "type_v")
with warm.new_context(n_ctx=64, **{k: v for k, v in fields.items() if k in KEPT}) as context:
    context.decode([5] * 60)  # what the engine allocates once for ever
"""
OPENING = """
model = ic.load_model(path, backend=backend)
with model.new_context(**{**fields, "n_ctx": 64, "n_seq_max": 1}) as context:
    context.decode([5] * 60)
start = rss()
with model.new_context(**fields):
    print(rss() - start)
"""
WHOLE = """
start = rss()
with ic.load_model(path, backend=backend) as model, model.new_context(**fields) as context:
    context.decode([5 + i % 90 for i in range(600)])
    for token in range(5, 15):
        context.decode_one(token)
    print(rss() - start)
"""


def taken(body: str, backend: str, path: Path, small: Path, fields: dict[str, Any]) -> int:
    """Return the bytes that a child process took while it ran ``body``."""
    command = [sys.executable, "-c", START + body, backend, str(path), str(small)]
    done = subprocess.run(
        [*command, json.dumps(fields)], capture_output=True, text=True, timeout=590, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def near(planned: int, measured: int, share: float = NEAR) -> bool:
    return abs(planned - measured) < share * measured


def one_thread(backend: str) -> dict[str, int]:
    both = {"n_threads": 1, "n_threads_batch": 1}
    return both if backend == "llamacpp" else {"n_threads": 1}


@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_the_cache_on_the_pack(backend_name: str, pack_path: Path, model: Any, kind: str) -> None:
    fields: dict[str, Any] = {"n_ctx": N_CTX, "type_k": kind, "type_v": kind}
    plan = ic.plan_memory(pack_path, backend=backend_name, **fields)
    if backend_name == "llamacpp":
        fields |= one_thread(backend_name)
        measured = taken(OPENING, backend_name, pack_path, pack_path, fields)
    else:
        with model.new_context(**fields) as context:
            measured = context._inner._cache.n_bytes
    assert near(plan.kv_bytes, measured), (plan, measured)


@pytest.mark.parametrize("swa_full", [True, False])
def test_the_cache_of_layers_that_see_a_window(swa_full: bool) -> None:
    """Only llama.cpp reads this model of the pack: five of its six layers slide."""
    path = other_kind("sliding")
    fields = {"n_ctx": 2**18, "swa_full": swa_full}
    plan = ic.plan_memory(path, backend="llamacpp", **fields)
    full, sliding = (plan.kv_bytes_by_kind[kind] for kind in ("full", "sliding"))
    assert plan.kv_bytes == full + sliding
    assert sliding == (5 * full if swa_full else pytest.approx(0, abs=0.02 * full))
    books = 40 * 2**18 * (2 if swa_full else 1)  # what is written down of each cell
    measured = taken(OPENING, "llamacpp", path, path, {**fields, **one_thread("llamacpp")})
    assert near(plan.kv_bytes + books, measured), (plan, measured)


def test_the_state_of_layers_that_keep_no_tokens() -> None:
    """It is so small that only the engine's own copy of it tells its size."""
    path, n_seq = other_kind("recurrent"), 64
    plan = ic.plan_memory(path, backend="llamacpp", n_ctx=1024, n_seq_max=n_seq)
    assert dict(plan.kv_bytes_by_kind) == {"recurrent": plan.kv_bytes}
    with (
        ic.load_model(path, backend="llamacpp") as model,
        model.new_context(n_ctx=1024, n_seq_max=n_seq, **one_thread("llamacpp")) as context,
    ):
        context.decode([5, 6, 7])
        assert near(plan.kv_bytes, n_seq * len(engine_of(context).save_sequence(0)))


def other_kind(name: str) -> Path:
    """Return a model of the pack that only llama.cpp reads."""
    pack.need_backend("llamacpp")
    pack.need_pack()
    import infercore_models

    path: Path = infercore_models.path(name, "gguf-f32")
    return path


@pytest.mark.parametrize("n_ctx", [2048, None, 0])
def test_a_model_that_is_loaded_plans_the_same(
    backend_name: str, pack_path: Path, model: Any, n_ctx: int | None
) -> None:
    before = ic.plan_memory(pack_path, backend=backend_name, n_ctx=n_ctx)
    assert before == model.plan_memory(n_ctx=n_ctx)
    with model.new_context(n_ctx=n_ctx) as context:
        assert before.n_ctx == context.n_ctx


REFUSED: dict[str, dict[str, Any]] = {
    "another rope": {"rope_freq_base": 5.0},
    "longrope": {"rope_scaling_type": "longrope"},
    "a quantised cache": {"type_k": "q8_0", "type_v": "q8_0"},
    "a cache of bytes": {"type_k": "u8"},
    "ranking without a head": {"pooling_type": "rank"},
    "another attention": {"attention_type": "non-causal"},
    "flash attention": {"flash_attn": "on"},
    "a part of the window": {"swa_full": False},
    "sequences without a token": {"n_ctx": 2, "n_seq_max": 3, "kv_unified": False},
    "an uneven step": {"pooling_type": "mean", "n_seq_max": 3, "n_ubatch": 100},
    "an adapter that is not there": {"adapters": [ic.AdapterSpec(path="none.gguf")]},
    "an option of another engine": {"backend_options": {"zzz": 1}},
    "an option of a wrong value": {"backend_options": {"inference_precision": "f64"}},
    "a form that holds one sequence": {"backend_options": {"form": "stateful"}, "n_seq_max": 2},
}


def refusal(call: Callable[..., Any], fields: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the kind of the error that ``call`` raises and what it is about."""
    try:
        made = call(**fields)
    except ic.InferCoreError as error:
        return type(error), getattr(error, "field", None), getattr(error, "feature", None)
    if hasattr(made, "close"):
        made.close()
    return None


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_context_refuses_is_not_planned_either(
    backend_name: str, pack_path: Path, model: Any, name: str
) -> None:
    fields = {"n_ctx": 512, **REFUSED[name]}
    opened = refusal(model.new_context, fields)
    assert refusal(model.plan_memory, fields) == opened
    fields |= {"backend": backend_name}
    assert refusal(lambda **more: ic.plan_memory(pack_path, **more), fields) == opened


MODEL_REFUSED = {
    "a GPU that is not there": {"main_gpu": 200},
    "a device that is not there": {"device": "TPU9"},
    "shares of no GPU": {"tensor_split": (1.0,) * 200},
    "an option of another engine": {"backend_options": {"zzz": 1}},
    "a folder of no name": {"backend_options": {"cache_dir": ""}},
}


@pytest.mark.parametrize("name", MODEL_REFUSED)
def test_what_loading_refuses_is_not_planned_either(
    backend_name: str, pack_path: Path, name: str
) -> None:
    def call(work: Callable[..., Any]) -> tuple[Any, ...] | None:
        return refusal(lambda **fields: work(pack_path, backend=backend_name, **fields), fields)

    fields: dict[str, Any] = MODEL_REFUSED[name]
    assert call(ic.plan_memory) == call(ic.load_model) is not None


def test_most_of_these_are_refused(model: Any) -> None:
    opened = [refusal(model.new_context, {"n_ctx": 512, **fields}) for fields in REFUSED.values()]
    assert sum(found is not None for found in opened) >= len(REFUSED) // 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "fields", [{"n_ctx": 2048}, {"n_ctx": 2048, "type_k": "f32", "type_v": "f32"}]
)
def test_a_model_of_half_a_billion(
    backend_name: str, pack_path: Path, half_a_billion: Path, fields: dict[str, Any]
) -> None:
    fields = {**fields, **one_thread(backend_name)}
    plan = ic.plan_memory(half_a_billion, backend=backend_name, **fields)
    measured = taken(WHOLE, backend_name, half_a_billion, pack_path, fields)
    assert near(plan.total_bytes, measured, NEAR_WHOLE), (plan, measured)
    assert near(plan.peak_bytes, measured, NEAR_WHOLE), (plan, measured)


WRITERS = {"llamacpp": ("gguf",), "openvino": ("gguf", "openvino_genai")}


@pytest.fixture(scope="module")
def half_a_billion(backend_name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of 0.5 billion random weights in the engine's format, written here."""
    missing = [name for name in WRITERS[backend_name] if importlib.util.find_spec(name) is None]
    script = Path(__file__).parents[2] / "benchmarks" / "make_model.py"
    if missing or not script.is_file():
        what = " and ".join(missing) if missing else "the folder benchmarks beside these tests"
        pytest.skip(f"to write a model of half a billion weights it takes {what}")
    folder = tmp_path_factory.mktemp("half")
    only = ["--no-ir"] if backend_name == "llamacpp" else []
    command = [sys.executable, str(script), str(folder), *only]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder / ("0.5b-ir" if backend_name == "openvino" else "0.5b-q8_0.gguf")
