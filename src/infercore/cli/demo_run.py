"""Runs the demo's two turns on one backend and measures them."""

from __future__ import annotations

import importlib
from contextlib import closing
from time import perf_counter
from typing import TYPE_CHECKING, Any

import attrs

import infercore
from infercore.cli import demo_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MODEL = "storyteller"
PACK_FORMATS = (("openvino", "openvino"), ("gguf", "gguf-f32"))


@attrs.frozen(kw_only=True)
class Turn:
    """One turn: what was reused and evaluated, and how long it took.

    ``first_text_ms`` counts from the call of ``ensure_prefix`` to the first chunk with text.
    """

    name: str
    reused_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    first_text_ms: float | None
    tokens_per_second: float | None
    finish_reason: str | None
    text: str
    tokens: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Run:
    """Both turns of one backend, and the costs that no reuse can save."""

    backend: str
    model: str
    load_ms: float
    tokenize_ms: float
    step_ms: float | None
    turns: tuple[Turn, ...]


def pack_format(formats: Sequence[str]) -> str | None:
    """Return the pack's format that a reader of ``formats`` takes, None where there is none."""
    return next((packed for read, packed in PACK_FORMATS if read in formats), None)


def model_path(backend: str, formats: Sequence[str]) -> str:
    """Return the demo's model in a format that the backend reads.

    Raises `ModelNotFoundError` where the pack is not installed, `UnsupportedFeatureError` where
    it has no such format.
    """
    try:
        pack = importlib.import_module("infercore_models")
    except ImportError as error:
        raise infercore.ModelNotFoundError(
            "the demo's model is not installed; run: pip install infercore-models",
            path="infercore_models",
        ) from error
    packed = pack_format(formats)
    if packed is not None:
        return str(pack.path(MODEL, packed))
    raise infercore.UnsupportedFeatureError(
        f"backend {backend} reads {', '.join(formats) or 'nothing it tells of'}, and the demo's "
        "model is not there in that format; name other backends with --backend",
        feature="demo",
        backend=backend,
    )


def run(backend: str, path: str, max_tokens: int, write: Callable[[str], None]) -> Run:
    """Tell both stories with ``backend``. Raises what the model and the session raise."""
    begun = perf_counter()
    with infercore.load_model(path, backend=backend) as model:
        load_ms = _ms_since(begun)
        _warm_up(model)
        tokenize_ms = _tokenize_ms(model)
        turns = []
        with closing(_session(model)) as session:
            for name, suffix in demo_text.TURNS.items():
                write(f"-- {backend}, {name} --\n{suffix}")
                turns.append(_turn(session, name, suffix, max_tokens, write))
                write("\n\n")
    return Run(
        backend=backend,
        model=MODEL,
        load_ms=load_ms,
        tokenize_ms=tokenize_ms,
        step_ms=_step_ms(turns),
        turns=tuple(turns),
    )


def same_text(runs: Sequence[Run]) -> bool | None:
    """Tell whether all runs gave the same texts; None where there is only one."""
    if len(runs) < 2:  # noqa: PLR2004  (a comparison needs two)
        return None
    texts = {tuple((turn.text, turn.tokens) for turn in run.turns) for run in runs}
    return len(texts) == 1


def _session(model: infercore.Model) -> infercore.Session:
    return model.new_session(
        n_ctx=demo_text.N_CTX, precision="accurate", flash_attn="off", type_k="f32", type_v="f32"
    )


def _warm_up(model: infercore.Model) -> None:
    """Let the engine do once what it does only once; nothing of it can be reused later."""
    with closing(_session(model)) as session:
        session.ensure_prefix(demo_text.WARM_UP)
        for _ in session.decode(max_tokens=4, temperature=0):
            pass


def _tokenize_ms(model: infercore.Model) -> float:
    begun = perf_counter()
    model.tokenizer.encode(demo_text.PREFIX)
    return _ms_since(begun)


def _turn(
    session: infercore.Session,
    name: str,
    suffix: str,
    max_tokens: int,
    write: Callable[[str], None],
) -> Turn:
    begun = perf_counter()
    first_text_ms = None
    chunks: list[infercore.StreamChunk] = []
    prefix_status = session.ensure_prefix(demo_text.PREFIX)
    suffix_status = session.prefill_suffix(suffix)
    for chunk in session.decode(max_tokens=max_tokens, temperature=0):
        if chunk.text and first_text_ms is None:
            first_text_ms = _ms_since(begun)
        chunks.append(chunk)
        write(chunk.text)
    return Turn(
        name=name,
        reused_tokens=prefix_status.reused_tokens + suffix_status.reused_tokens,
        prefilled_tokens=prefix_status.prefilled_tokens + suffix_status.prefilled_tokens,
        first_text_ms=first_text_ms,
        **_generated(chunks),
    )


def _generated(chunks: Sequence[infercore.StreamChunk]) -> dict[str, Any]:
    """The fields of a `Turn` that its chunks tell."""
    last = chunks[-1]
    tokens = tuple(token for chunk in chunks for token in chunk.tokens)
    return {
        "completion_tokens": last.usage.completion_tokens if last.usage else len(tokens),
        "tokens_per_second": last.usage.tokens_per_second if last.usage else None,
        "finish_reason": last.finish_reason,
        "text": "".join(chunk.text for chunk in chunks),
        "tokens": tokens,
    }


def _step_ms(turns: Sequence[Turn]) -> float | None:
    """The time of one generated token, the mean over the turns."""
    speeds = [turn.tokens_per_second for turn in turns if turn.tokens_per_second]
    return sum(1000 / speed for speed in speeds) / len(speeds) if speeds else None


def _ms_since(begun: float) -> float:
    return (perf_counter() - begun) * 1000
