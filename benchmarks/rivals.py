"""What users would pick instead, with the same settings: `llama_cpp.Llama`, `openvino_genai`."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    import infercore as ic

N_BATCH = 2048
N_UBATCH = 512
STEADY_WORDS = (" the", " a", " to", " t")


def lay_out(params: Any, path: str) -> object:
    """Have ``path`` loaded with the layout of weights that infercore gives it here.

    Returns what must live until it is loaded.
    """
    from infercore_llamacpp import devices, layout  # noqa: PLC0415  (needs the plugin)

    has_gpu = any(device.is_gpu for device in devices.list_devices())
    return layout.choose(params, path, has_gpu=has_gpu)


def add_programs(parser: argparse.ArgumentParser) -> None:
    """Add the options that tell of llama.cpp's own programs."""
    parser.add_argument("--bin", default="", help="the folder of llama.cpp's programs")
    parser.add_argument(
        "--bin-is-sound",
        action="store_true",
        help="they may lay weights out: none of their kernels crashes here",
    )


def may_lay_out(options: argparse.Namespace) -> bool:
    """Return whether llama.cpp's programs can lay weights out: they take all kernels or none."""
    from infercore_llamacpp import amx  # noqa: PLC0415  (needs the plugin)

    return options.bin_is_sound or amx.is_sound()


def llama(path: str, *, n_ctx: int, n_threads: int, n_gpu_layers: int = 0, **more: Any) -> Any:
    """Return a `llama_cpp.Llama` with infercore's sizes and threads (its own are other ones)."""
    import llama_cpp.llama_cpp as api  # noqa: PLC0415  (only where it is compared)
    from llama_cpp import Llama  # noqa: PLC0415

    own = api.llama_model_default_params
    laid_out = own()
    kept = lay_out(laid_out, path)

    def params() -> Any:
        return laid_out

    api.llama_model_default_params = params
    try:
        return Llama(
            path,
            n_ctx=n_ctx,
            n_batch=min(N_BATCH, n_ctx),
            n_ubatch=min(N_UBATCH, n_ctx),
            n_threads=n_threads,
            n_threads_batch=n_threads,
            n_gpu_layers=n_gpu_layers,
            verbose=False,
            **more,
        )
    finally:
        api.llama_model_default_params = own
        del kept


def llama_prefill_s(model: Any, ids: Sequence[int]) -> float:
    """Return the seconds of `Llama.eval` on an empty context."""
    model.reset()
    begun = perf_counter()
    model.eval(ids)
    return perf_counter() - begun


def llama_generate_s(model: Any, ids: Sequence[int], n: int) -> tuple[list[int], float]:
    """Return ``n`` greedy tokens of `Llama.generate`, and the seconds after the prompt's.

    The first token ends the prompt; the ``n`` after it are timed, as each costs one step.
    """
    model.reset()
    stream = model.generate(ids, temp=0.0)
    tokens = [next(stream)]
    begun = perf_counter()
    tokens += itertools.islice(stream, n)
    seconds = perf_counter() - begun
    stream.close()
    return tokens[:n], seconds


def llama_completion_s(model: Any, ids: Sequence[int], n: int) -> float:
    """Return the seconds of `Llama.create_completion` of ``n`` greedy tokens.

    The prompt is resident from the turn before but for its last token, which is evaluated again:
    so there are ``n`` steps here too.
    """
    begun = perf_counter()
    told = model.create_completion(list(ids), max_tokens=n, temperature=0.0)
    seconds = perf_counter() - begun
    if told["usage"]["completion_tokens"] != n:
        raise SystemExit("the model ended its text; give another --tokens")
    return seconds


def llama_bench_s(options: argparse.Namespace, path: str, n: int, *, depth: int) -> float:
    """Return the seconds that ``llama-bench`` tells of ``n`` tokens behind ``depth`` others.

    Without flash attention, as the other contenders.
    """
    told = [os.path.join(options.bin, "llama-bench"), "-m", path, "-p", "0", "-n", str(n)]
    told += ["-d", str(depth), "-t", str(options.threads), "-fa", "0", "-r", "1", "-o", "json"]
    told += ["--repack", str(int(may_lay_out(options)))]
    env = {**os.environ, "LD_LIBRARY_PATH": options.bin}
    done = subprocess.run(told, env=env, check=True, capture_output=True, text=True)  # noqa: S603
    return n / float(json.loads(done.stdout)[0]["avg_ts"])


def infercore_bench_s(path: str, n: int, *, n_threads: int) -> float:
    """Return the seconds that ``infercore bench`` tells of ``n`` tokens: it decodes behind 64."""
    told = [sys.executable, "-m", "infercore", "bench", path, "--only", "decode", "--json"]
    told += ["--decode-tokens", str(n), "--n-ctx", str(n + 128), "--repeats", "1"]
    told += ["--threads", str(n_threads)]
    done = subprocess.run(told, check=True, capture_output=True, text=True)  # noqa: S603
    figures = json.loads(done.stdout)["figures"]
    return n / next(f["value"]["median"] for f in figures if f["name"] == "one token a call")


def llama_first_token_ms(model: Any, ids: Sequence[int]) -> float:
    """Return the milliseconds to the first token of `Llama.generate`, which reuses what it can."""
    begun = perf_counter()
    stream = model.generate(ids, temp=0.0)
    next(stream)
    ms = (perf_counter() - begun) * 1e3
    stream.close()
    return ms


def pipeline(path: str, *, n_threads: int, kv: str | None = "f16", **more: Any) -> Any:
    """Return an `openvino_genai.LLMPipeline` told what infercore's ``precision="accurate"`` is.

    That is float32 arithmetic without rounding of activations; the cache is in float16, which is
    infercore's default. ``kv=None`` leaves the pipeline as it comes: a cache in 8 bits for
    compressed weights, and activations rounded where the processor has instructions for that.
    """
    import openvino_genai  # noqa: PLC0415  (only where it is compared)

    chosen: dict[str, Any] = {"INFERENCE_NUM_THREADS": n_threads}
    if kv is not None:
        chosen |= {
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            "KV_CACHE_PRECISION": kv,
        }
    return openvino_genai.LLMPipeline(path, "CPU", **chosen, **more)


def pipeline_run(pipe: Any, ids: Sequence[int], n: int) -> tuple[list[int], float, float]:
    """Return ``n`` greedy tokens, the milliseconds to the first, and the seconds of the others.

    Token ids go in and come out; the times are those of the pipeline's own clock.
    """
    import openvino_genai  # noqa: PLC0415

    import openvino as ov  # noqa: PLC0415

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.apply_chat_template = n, True, False
    row = np.array([ids], dtype=np.int64)
    inputs = openvino_genai.TokenizedInputs(ov.Tensor(row), ov.Tensor(np.ones_like(row)))
    begun = perf_counter()
    result = pipe.generate(inputs, config)
    seconds = perf_counter() - begun
    first_ms = result.perf_metrics.get_ttft().mean
    return list(result.tokens[0]), first_ms, seconds - first_ms / 1e3


def pipeline_first_ms(pipe: Any, ids: Sequence[int]) -> float:
    """Return the milliseconds until `LLMPipeline.generate` has returned one token."""
    begun = perf_counter()
    pipeline_run(pipe, ids, 1)
    return (perf_counter() - begun) * 1e3


def steady_bias(tokenizer: ic.Tokenizer) -> dict[int, float]:
    """Return a bias under which a model with random weights says one word again and again.

    Its text is then tokenized as it was generated, as that of a trained model nearly always is.
    """
    for word in STEADY_WORDS:
        ids = tokenizer.encode(word * 8, add_special=False)
        if len(ids) == 8 and len(set(ids)) == 1:  # noqa: PLR2004
            return {ids[0]: 100.0}
    raise SystemExit("the tokenizer has none of the words that the answers are made of")


class Batching:
    """`openvino_genai.ContinuousBatchingPipeline` as it comes, driven step by step."""

    def __init__(self, path: str, *, n_threads: int) -> None:
        import openvino_genai  # noqa: PLC0415

        self._genai = openvino_genai
        chosen = {"INFERENCE_NUM_THREADS": n_threads}
        scheduler = openvino_genai.SchedulerConfig()
        self._pipe = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", chosen)
        self._next = 0

    def rate(self, prompts: Sequence[Sequence[int]], n: int) -> float:
        """Return tokens a second of all ``prompts`` together, from when each has its first."""
        import openvino as ov  # noqa: PLC0415

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.apply_chat_template = n + 4, True, False
        handles = []
        for ids in prompts:
            tensor = ov.Tensor(np.array([ids], dtype=np.int64))
            handles.append(self._pipe.add_request(self._next, tensor, config))
            self._next += 1
        while not all(handle.can_read() for handle in handles):
            self._pipe.step()
        begun = perf_counter()
        for _ in range(n):
            self._pipe.step()
        seconds = perf_counter() - begun
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
        return len(prompts) * n / seconds
