"""``infercore bench --tune``: which settings make a model faster here than the defaults do."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import attrs

import infercore
from infercore.measuring.parts import N_START, decode_s, ids_of, prefill_s
from infercore.measuring.stats import Spread, in_turns, ratios

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


WORTH = 1.05
NO_LOSS = 0.97
N_CTX_SPARE = 64


@attrs.frozen(kw_only=True)
class Tried:
    """How fast a setting is over the default: ratios of paired rounds."""

    fields: Mapping[str, Any]
    prefill: Spread
    decode: Spread

    @property
    def name(self) -> str:
        """The setting as options."""
        return name_of(self.fields)

    @property
    def best(self) -> float:
        """The greater of both speed-ups."""
        return max(self.prefill.median, self.decode.median)

    @property
    def is_worth_it(self) -> bool:
        """Whether it is faster at one, in every round, and no slower at the other."""
        both = (self.prefill, self.decode)
        faster = any(each.median >= WORTH and each.low > 1 for each in both)
        return faster and min(each.median for each in both) >= NO_LOSS


def name_of(fields: Mapping[str, Any]) -> str:
    """Return ``fields`` as options of the command line."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in fields.items())


def candidates(
    effective: Mapping[str, Any], kv_types: tuple[str, ...], n_prefill: int
) -> Iterator[dict[str, Any]]:
    """Yield settings other than those in force, one change at a time.

    Compute steps of ``n_prefill`` tokens at most: longer ones do the same.
    """
    threads, ubatch = effective["n_threads"], effective["n_ubatch"]
    for n in (max(1, threads // 2), threads * 2):
        if n != threads:
            yield {"n_threads": n, "n_threads_batch": n}
    for n in (128, 256, 512, 1024, 2048):
        if n != ubatch and n <= n_prefill:
            yield {"n_ubatch": n, "n_batch": max(n, effective["n_batch"])}
    for setting in ("on", "off"):
        if setting != effective["flash_attn"]:
            yield {"flash_attn": setting}
    for kind in ("f16", "q8_0", "u8"):
        if kind in kv_types and kind != effective["type_k"]:
            yield {"type_k": kind, "type_v": kind}
    yield {"precision": "fast"}


def tune(
    model: infercore.Model, given: Mapping[str, Any], *, n_prefill: int, n_decode: int, repeats: int
) -> tuple[list[Tried], dict[str, str]]:
    """Try each candidate beside ``given``, in turns; return what was tried, and what was refused.

    Refusals are returned with their reason, by the setting's name. What does not fit the window is
    measured with fewer tokens; `InvalidInputError` where it holds too few to measure anything.
    """
    fields = {"n_ctx": min(n_prefill + n_decode + N_CTX_SPARE, model.info.n_ctx_train), **given}
    with model.new_context(**fields) as default:
        kinds = default.capabilities.kv_types
        n_prefill = min(n_prefill, default.n_ctx_seq)
        n_decode = min(n_decode, default.n_ctx_seq - N_START)
        if n_decode < 1:
            raise infercore.InvalidInputError(
                f"a window of {default.n_ctx_seq} tokens is too small to measure in",
                field="n_ctx",
                value=default.n_ctx_seq,
                allowed=f"more than {N_START}",
            )
        settings = [
            c
            for c in candidates(default.effective, kinds, n_prefill)
            if not c.keys() & given.keys()
        ]
    refused: dict[str, str] = {}
    found = [
        _try(model, fields, setting, refused, (n_prefill, n_decode, repeats))
        for setting in settings
    ]
    return [each for each in found if each is not None], refused


def _try(
    model: infercore.Model,
    fields: Mapping[str, Any],
    setting: Mapping[str, Any],
    refused: dict[str, str],
    sizes: tuple[int, int, int],
) -> Tried | None:
    try:
        return _tried(model, fields, setting, *sizes)
    except infercore.InferCoreError as error:
        refused[name_of(setting)] = str(error)
        return None


def _tried(
    model: infercore.Model,
    fields: Mapping[str, Any],
    setting: Mapping[str, Any],
    n_prefill: int,
    n_decode: int,
    repeats: int,
) -> Tried:
    ids, start = ids_of(model.tokenizer, n_prefill), ids_of(model.tokenizer, N_START)
    sampler = model.new_sampler(temperature=0)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(model.new_context(**fields))
        other = stack.enter_context(model.new_context(**{**fields, **setting}))

        def speed_up(work: Callable[[infercore.Context], float]) -> Spread:
            runs = {"plain": lambda: work(plain), "other": lambda: work(other)}
            in_turns(runs, 1)
            found = in_turns(runs, repeats)
            return ratios(found["plain"], found["other"])

        return Tried(
            fields=setting,
            prefill=speed_up(lambda context: prefill_s(context, ids)),
            decode=speed_up(lambda context: decode_s(context, sampler, start, n_decode)[1]),
        )
