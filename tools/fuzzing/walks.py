"""Calls of a context in any order, beside the reference backend on the same weights."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

import infercore as ic
from fuzzing import Wrong

if TYPE_CHECKING:
    from random import Random

LIMIT_S = 60.0
BATCH = 40
N_CALLS = 14
N_CTX, N_SEQ = 96, 3
TOLERANCE = 0.02  # of logits that span about 20; both compute in float32
ONE = {"n_threads": 1, "n_threads_batch": 1}  # busy machines wait long for two at once
EXACT = {"type_k": "f32", "type_v": "f32", "precision": "accurate", **ONE}
FORMATS = {
    "llamacpp": ("infercore_llamacpp", "gguf-f32"),
    "openvino": ("infercore_openvino", "openvino"),
}
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Walks:
    """Makes the same calls on an engine and on the reference, and compares what both hold."""

    def __init__(self) -> None:
        import infercore_models  # noqa: PLC0415
        from infercore.testing import load_reference_model  # noqa: PLC0415

        self._reference = load_reference_model()
        self._engines = {
            name: ic.load_model(infercore_models.path("storyteller", form), backend=name)
            for name, (module, form) in FORMATS.items()
            if find_spec(module)
        }
        self._n_vocab = self._reference.tokenizer.n_vocab

    def case(self, random: Random) -> str:
        """Walk; compare after every call."""
        name = random.choice(sorted(self._engines))
        unified = random.choice((True, False))
        fields = {"n_ctx": N_CTX, "n_seq_max": N_SEQ, "kv_unified": unified}
        made: list[Any] = []
        try:
            engine = self._engines[name].new_context(**fields, **EXACT)
            made.append(engine)
            reference = self._reference.new_context(**fields)
            made.append(reference)
            return self._walk(random, name, engine, reference)
        finally:
            for context in made:
                context.close()

    def _walk(self, random: Random, name: str, engine: Any, reference: Any) -> str:
        walk: list[Call] = []
        saved: list[tuple[Any, Any]] = []
        for _ in range(N_CALLS):
            call = self._call(random, engine)
            walk.append(call)
            if call[0] == "save":
                seq = call[1][0]
                saved.append((engine.save_sequence(seq), reference.save_sequence(seq)))
                continue
            if call[0] == "load":
                if saved:
                    ours, theirs = saved[call[1][1] % len(saved)]
                    load = ("load_sequence", (call[1][0],), {})
                    self._both(walk, name, load, (engine, ours), (reference, theirs))
            else:
                self._both(walk, name, call, (engine, None), (reference, None))
            self._compare(name, walk, engine, reference)
        return f"{name}: {walk}"

    @staticmethod
    def _both(walk: list[Call], name: str, call: Call, *each: tuple[Any, Any]) -> None:
        """Do it on both; what one refuses, the other refuses too, or is left alone."""
        results = [_outcome(context, call, data) for context, data in each[:1]]
        if results == ["UnsupportedFeatureError"]:
            return  # nothing changed
        results += [_outcome(context, call, data) for context, data in each[1:]]
        if "SessionFatalError" in results or results[0] != results[1]:
            raise Wrong(f"{name}: {walk}: {results[0]}, the reference {results[1]}")

    def _call(self, random: Random, engine: Any) -> Call:
        r = random
        seq = r.randrange(N_SEQ)
        tokens = [r.randrange(self._n_vocab) for _ in range(r.choice((1, 1, 2, 5, 17)))]
        end = max(0, engine.n_past(seq))
        p0, p1 = sorted((r.randrange(end + 1), r.randrange(end + 2)))
        ways: tuple[Call, ...] = (
            ("decode", (tokens,), {"seq_id": seq, "logits": r.choice(("last", "last", "all"))}),
            ("decode", (tokens,), {"seq_id": seq}),
            ("decode_one", (tokens[0],), {"seq_id": seq}),
            ("eval", (tokens, r.randrange(end + 2)), {"seq_id": seq}),
            (
                "decode_batch",
                ([(token, (s,), True) for s, token in enumerate(tokens[:N_SEQ])],),
                {},
            ),
            ("seq_remove", (seq, r.choice((p0, -1)), r.choice((p1, -1, -1))), {}),
            ("seq_remove", (seq, p0, -1), {}),
            ("seq_copy", (seq, r.randrange(N_SEQ)), {}),
            ("seq_copy", (seq, r.randrange(N_SEQ), 0, p1), {}),
            ("seq_keep", (seq,), {}),
            ("seq_shift", (seq, p0, -1, r.choice((-1, 1, 3, -p0))), {}),
            ("clear", (), {}),
            ("save", (seq,), {}),
            ("load", (seq, r.randrange(9)), {}),
        )
        return r.choice((*ways[:4] * 2, *ways))

    def _compare(self, name: str, walk: list[Call], engine: Any, reference: Any) -> None:
        for seq in range(N_SEQ):
            held = [(c.tokens(seq), c.n_past(seq), c.n_resident(seq)) for c in (engine, reference)]
            if held[0] != held[1]:
                raise Wrong(f"{name}: {walk}: sequence {seq} {held[0]}, the reference {held[1]}")
        if walk[-1][0] not in ("decode", "decode_one", "eval", "decode_batch"):
            return
        try:
            rows = [context.logits(-1).copy() for context in (engine, reference)]
        except ic.OutputNotAvailableError:
            return
        span = float(np.ptp(rows[1]))
        off = float(np.abs(rows[0] - rows[1]).max())
        if off > TOLERANCE * max(1.0, span / 20):
            raise Wrong(f"{name}: {walk}: logits off by {off:.4f} of {span:.1f}")


def _outcome(context: Any, call: Call, data: Any) -> str:
    method, arguments, fields = call
    try:
        getattr(context, method)(*arguments, *(() if data is None else (data,)), **fields)
    except ic.InferCoreError as error:
        return type(error).__name__
    return "ok"


def open_target() -> Walks:
    """Return the target."""
    return Walks()
