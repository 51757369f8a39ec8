"""Calls of a context in any order, beside the reference backend.

What a context holds is always compared with the reference, call by call. Where the reference has
the same weights, half of the walks are computed in float32, and their logits are compared too. The
others, and models that the reference cannot compute (recurrent, sliding), have any types of keys
and values, with flash attention or without: their logits are compared with those of a new context
of the same kind that is given the same tokens at once.
"""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

import infercore as ic
from fuzzing import Wrong
from infercore.engine.arguments import numbers_of

if TYPE_CHECKING:
    from random import Random

LIMIT_S = 60.0
BATCH = 40
N_CALLS = 14
N_CTX, N_SEQ = 96, 3
_SHARE_EXACT = 0.5
_SHARE_PENDING = 0.6
_SHARE_PLANNED = 0.5
_SHARE_UNIFIED = 0.3
TOLERANCE = 0.02  # of logits that span about 20; both compute in float32
ONE = {"n_threads": 1, "n_threads_batch": 1}  # busy machines wait long for two at once
EXACT = {"type_k": "f32", "type_v": "f32", "precision": "accurate", **ONE}
FORMATS = {
    "llamacpp": ("infercore_llamacpp", "gguf-f32"),
    "openvino": ("infercore_openvino", "openvino"),
}
MODELS = (*("storyteller",) * 4, "agent", "recurrent", "sliding", "encoder")
PLANNED_MODELS = (*("storyteller",) * 4, "agent", "sliding")
_AFTER_PENDING = ("save", "load", "seq_remove", "aborted")
_MAY_BE_HALF = ("decode", "decode_spans", "decode_batch", "eval", "decode_one")
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class _Positions:
    """Tokens by position, kept by the plainest means: what the contexts say is compared with it.

    The reference has its bookkeeping from the core, as every backend has.
    """

    def __init__(self) -> None:
        self.held: list[dict[int, int]] = [{} for _ in range(N_SEQ)]
        self.saved: list[dict[int, dict[int, int]]] = []
        self.is_sure = True

    def note(self, call: Call) -> None:
        """Do what an accepted call does."""
        method, given, fields = call
        seq = fields.get("seq_id", given[0] if given and isinstance(given[0], int) else 0)
        if method in ("decode", "decode_one", "eval"):
            seq = fields["seq_id"]
            if method == "eval":
                self._keep(seq, lambda at: at < given[1])
            self._append(seq, given[0] if isinstance(given[0], list) else [given[0]])
        elif method == "decode_spans":
            self._append(given[0][0][0], numbers_of(given[0][0][1]))
        elif method == "decode_batch":
            for token, seqs, _ in given[0]:
                for each in seqs:
                    self._append(each, [token])
        elif method == "load":
            self._load(seq, given[1])
        elif method == "seq_remove":
            p0, p1 = self._range(*given[1:])
            for each in range(N_SEQ) if seq == -1 else (seq,):
                self._keep(each, lambda at: not p0 <= at < p1)
        elif method == "seq_copy":
            p0, p1 = self._range(*given[2:])
            part = {at: token for at, token in self.held[seq].items() if p0 <= at < p1}
            if given[1] != seq:  # the target holds in that range what the source does
                is_whole = len(given) == 2 or (part and part == self.held[seq])
                self._keep(given[1], lambda at: not (is_whole or p0 <= at < p1))
                self.held[given[1]].update(part)
        elif method in ("seq_keep", "clear"):
            kept = self.held[seq] if method == "seq_keep" else {}
            self.held = [kept if each == seq else {} for each in range(N_SEQ)]
        else:
            self._move(method, seq, *given[1:])

    def save(self, seq: int) -> None:
        """Keep what a sequence, or all of them (-1), hold."""
        kept = {each: dict(self.held[each]) for each in (range(N_SEQ) if seq < 0 else (seq,))}
        self.saved.append(kept)

    def _load(self, seq: int, number: int) -> None:
        kept = self.saved[number]
        for each in range(N_SEQ) if seq < 0 else (seq,):
            self.held[each] = dict(kept[each] if seq < 0 else next(iter(kept.values())))

    def _move(self, method: str, seq: int, p0: int, p1: int, by: int) -> None:
        p0, p1 = self._range(p0, p1)
        moved: dict[int, int] = {}
        for at, token in sorted(self.held[seq].items()):
            new = (at + by if method == "seq_shift" else at // by) if p0 <= at < p1 else at
            self.is_sure = self.is_sure and new >= 0 and new not in moved
            moved[new] = token
        self.held[seq] = moved

    def _append(self, seq: int, tokens: list[int]) -> None:
        start = max(self.held[seq], default=-1) + 1
        self.held[seq].update(enumerate(tokens, start))

    def _keep(self, seq: int, is_kept: Any) -> None:
        self.held[seq] = {at: token for at, token in self.held[seq].items() if is_kept(at)}

    @staticmethod
    def _range(p0: int = -1, p1: int = -1) -> tuple[int, int]:
        return max(p0, 0), 2**31 if p1 < 0 else p1

    def complaint(self, engine: Any) -> str | None:
        """Return what the context says otherwise; what it is unsure of is never compared again."""
        for seq, held in enumerate(self.held if self.is_sure else ()):
            wanted = [held[at] for at in sorted(held)], max(held, default=-1) + 1
            if (found := (list(engine.tokens(seq)), engine.n_past(seq))) != wanted:
                return f"sequence {seq} is {found}, and by hand {wanted}"
        return None


class Walks:
    """Makes the same calls on an engine and on the reference, and compares what both hold."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, str], Any] = {}

    def _model(self, name: str, backend: str) -> Any:
        """Return a model of the pack, loaded once; its reference where there is one."""
        import infercore_models  # noqa: PLC0415
        from infercore.testing import load_reference_model  # noqa: PLC0415

        if (name, backend) not in self._loaded:
            if backend == "reference":
                model = load_reference_model(infercore_models.path(name, "hf"))
            else:
                path = infercore_models.path(name, FORMATS[backend][1])
                model = ic.load_model(path, backend=backend)
            self._loaded[name, backend] = model
        return self._loaded[name, backend]

    def case(self, random: Random) -> str:
        """Walk; compare after every call."""
        import infercore_models  # noqa: PLC0415

        is_planned = random.random() < _SHARE_PLANNED
        name = random.choice(PLANNED_MODELS if is_planned else MODELS)
        forms = infercore_models.names()[name]
        here = [b for b, (module, form) in FORMATS.items() if form in forms and find_spec(module)]
        here += ["llamacpp"] * 3 * (is_planned and "llamacpp" in here)  # who puts off most
        if not here:
            return "no engine for it"
        model = self._model(name, backend := random.choice(here))
        if name == "encoder":
            return _encode(random, f"{name} on {backend}", model)
        has_oracle = "hf" in forms
        oracle = self._model(name if has_oracle else "storyteller", "reference")
        self._n_embd = model.info.n_embd if has_oracle else 1  # rows of it are refused
        self._n_vocab = min(m.tokenizer.n_vocab for m in (model, oracle))
        fields = {
            "n_ctx": N_CTX,
            "n_seq_max": N_SEQ,
            "kv_unified": random.random() < _SHARE_UNIFIED,
        }
        is_exact = has_oracle and random.random() < (0.8 if is_planned else _SHARE_EXACT)
        kind = EXACT if is_exact else _kind(random, model)
        made: list[Any] = []
        try:
            made.append(model.new_context(**fields, **kind))
            made.append(oracle.new_context(**fields))
            if not is_exact:
                made.append(model.new_context(n_ctx=N_CTX, **kind))
            plan = self._pending(random) if is_planned else []
            return self._walk(random, f"{name} on {backend} {kind}", plan, *made)
        finally:
            for context in made:
                context.close()

    def _walk(
        self,
        random: Random,
        name: str,
        plan: list[Call],
        engine: Any,
        reference: Any,
        fresh: Any = None,
    ) -> str:
        """Make calls; ``fresh`` is what logits are compared with, None for the reference."""
        walk: list[Call] = []
        saved: list[list[Any]] = []
        told = _Positions()
        for i in range(N_CALLS):
            last = walk[-1][0] if walk else ""
            call = plan[i] if i < len(plan) else self._call(random, engine, last)
            walk.append(call)
            if call[0] == "save":
                saved.append([_saved(each, call[1][0]) for each in (engine, reference)])
                told.save(call[1][0])
                continue
            if call[0] == "aborted":
                walk[-1] = call = self._aborted(engine, reference, call, walk, name)
                if call[0] == "decode":
                    told.note(call)
            elif call[0] == "load":
                seq, of_all = call[1][0], call[1][0] < 0
                fitting = [at for at, kept in enumerate(told.saved) if (len(kept) > 1) == of_all]
                if not fitting:
                    continue
                at = fitting[call[1][1] % len(fitting)]
                load = ("load_state" if of_all else "load_sequence", () if of_all else (seq,), {})
                self._both(walk, name, load, *zip((engine, reference), saved[at], strict=True))
                told.note(("load", (seq, at), {}))
            elif self._both(walk, name, call, (engine, None), (reference, None)) != "ok":
                walk[-1] = (f"refused {call[0]}", *call[1:])
                told.is_sure = told.is_sure and call[0] not in _MAY_BE_HALF
            else:
                told.note(call)
            self._compare(name, walk, engine, reference)
            if (found := told.complaint(engine)) is not None:
                raise Wrong(f"{name}: {walk}: {found}")
            if fresh is None:
                self._compare_logits(name, walk, engine, reference)
            elif _is_plain(walk):
                self._compare_with_fresh(name, walk, engine, fresh)
        return f"{name}: {walk}"

    @staticmethod
    def _both(walk: list[Call], name: str, call: Call, *each: tuple[Any, Any]) -> str:
        """Do it on both; what one refuses, the other refuses too, or is left alone.

        Returns what came of it.
        """
        results = [_outcome(context, call, data) for context, data in each[:1]]
        if results[0] in ("UnsupportedFeatureError", "False"):
            return results[0]  # nothing changed
        results += [_outcome(context, call, data) for context, data in each[1:]]
        if "SessionFatalError" in results or results[0] != results[1]:
            raise Wrong(f"{name}: {walk}: {results[0]}, the reference {results[1]}")
        return results[0]

    @staticmethod
    def _aborted(engine: Any, reference: Any, call: Call, walk: list[Call], name: str) -> Call:
        """Decode until the engine has asked a number of times; return what that came to.

        The reference is given the tokens that are there.
        """
        _, (tokens, n_asked), fields = call
        asked = itertools.count()
        before = engine.n_resident(seq := fields["seq_id"])
        engine.set_abort_callback(lambda: next(asked) >= n_asked)
        outcome = _outcome(engine, ("decode", (tokens,), fields), None)
        engine.set_abort_callback(None)
        if outcome not in ("ok", "DecodeAbortedError", "ContextOverflowError"):
            raise Wrong(f"{name}: {walk}: {outcome}")
        if not (done := tokens[: engine.n_resident(seq) - before]):
            return "refused decode", (tokens,), fields
        reference.decode(done, **fields)
        return "decode", (done,), fields

    def _pending(self, random: Random) -> list[Call]:
        """Return calls of which one is put off by some engines, and must not be over the next."""
        r = random
        texts = [[r.randrange(self._n_vocab) for _ in range(n)] for n in (6, 9, 12)]
        saves: list[list[Call]] = [
            *[[("save", (seq,), {}), ("load", (2, 1), {})] for seq in (0, 0, 1)],
            [("save", (-1,), {}), ("clear", (), {}), ("load", (-1, 1), {})],
        ]  # fmt: skip
        loads: list[list[Call]] = [[("load", (seq, 0), {})] for seq in (-1, -1, 0, 1, 2)]
        clears: list[list[Call]] = [[("clear", (), {}), *load] for load in loads]
        rest: list[list[Call]] = [
            [("seq_copy", (1, 2), {})], [("seq_remove", (0, -1, -1), {})], [("clear", (), {})],
            [("seq_remove", (0, 1, 3), {})], [("seq_remove", (1, 1, 3), {})],
            [("eval", (texts[0], 2), {"seq_id": 0})],
        ]  # fmt: skip
        turned: list[list[Call]] = [
            [("aborted", (texts[0], r.randrange(12)), {"seq_id": 0})] for _ in range(6)
        ]
        late, over = r.choice((
            *[(("seq_copy", (0, 1), {}), (*saves, *loads * 2, *clears, *rest))] * 3,
            (("seq_copy", (0, 1, 4, -1), {}), ([("seq_copy", (0, 1, 0, 4), {})], *rest)),
            (("seq_shift", (0, 0, -1, 2), {}), (*saves, *loads, *turned)),
            (("seq_divide", (0, 0, -1, 2), {}), (*saves, *turned)),
        ))  # fmt: skip
        ends: list[Call] = [("decode_one", (texts[0][0],), {"seq_id": s}) for s in (0, 1, 2)]
        r.shuffle(ends)
        return [
            ("decode", (texts[0],), {"seq_id": 0}), ("decode", (texts[2],), {"seq_id": 1}),
            ("save", (0,), {}), ("save", (-1,), {}), ("clear", (), {}),
            ("decode", (texts[1],), {"seq_id": 0}), late, *r.choice(over), *ends,
        ]  # fmt: skip

    def _call(self, random: Random, engine: Any, last: str) -> Call:
        """Return a call; what an engine may put off is often followed by what must not wait."""
        r = random
        seq = r.randrange(N_SEQ)
        tokens = [r.randrange(self._n_vocab) for _ in range(r.choice((1, 1, 2, 5, 17)))]
        rows = np.array([[r.gauss(0, 1) for _ in range(self._n_embd)] for _ in range(2)])
        rows[1, -1] = r.choice((0.5, np.nan, np.inf))
        end = max(0, engine.n_past(seq))
        p0, p1 = sorted((r.randrange(end + 1), r.randrange(end + 2)))
        ways: tuple[Call, ...] = (
            ("decode", (tokens,), {"seq_id": seq, "logits": r.choice(("last", "last", "all"))}),
            ("decode", (tokens,), {"seq_id": seq}),
            ("decode_one", (tokens[0],), {"seq_id": seq}),
            ("decode_spans", ([(seq, rows.astype(np.float32), "last")],), {}),
            ("aborted", (tokens, r.randrange(60)), {"seq_id": seq}),
            ("eval", (tokens, r.randrange(end + 2)), {"seq_id": seq}),
            (
                "decode_batch",
                ([(token, (s,), True) for s, token in enumerate(tokens[:N_SEQ])],),
                {},
            ),
            ("seq_remove", (seq, r.choice((p0, -1)), r.choice((p1, -1, -1))), {}),
            ("seq_remove", (seq, p0, -1), {}),
            ("seq_copy", (seq, r.randrange(N_SEQ)), {}),
            ("seq_copy", (seq, r.randrange(N_SEQ), r.choice((0, p0)), p1), {}),
            ("seq_keep", (seq,), {}),
            ("seq_shift", (seq, p0, -1, r.choice((-1, 1, 3, -p0))), {}),
            ("seq_divide", (seq, p0, r.choice((p1, -1)), r.choice((1, 2, 3))), {}),
            ("clear", (), {}),
            ("save", (seq,), {}),
            ("load", (seq, r.randrange(9)), {}),
            ("save", (-1,), {}),
            ("load", (-1, r.randrange(9)), {}),
        )
        if last in ("seq_copy", "seq_shift", "seq_divide") and r.random() < _SHARE_PENDING:
            return r.choice([way for way in ways if way[0] in _AFTER_PENDING])
        if last == "load" and r.random() < _SHARE_PENDING:
            return r.choice(ways[:3])
        return r.choice((*ways[:4] * 2, *ways, ("save", (seq,), {})))

    def _compare(self, name: str, walk: list[Call], engine: Any, reference: Any) -> None:
        for seq in range(N_SEQ):
            held = [(c.tokens(seq), c.n_past(seq), c.n_resident(seq)) for c in (engine, reference)]
            if held[0] != held[1]:
                raise Wrong(f"{name}: {walk}: sequence {seq} {held[0]}, the reference {held[1]}")

    def _compare_logits(self, name: str, walk: list[Call], engine: Any, reference: Any) -> None:
        if walk[-1][0] not in _MAY_BE_HALF:
            return
        try:
            rows = [context.logits(-1).copy() for context in (engine, reference)]
        except ic.OutputNotAvailableError:
            return
        span = float(np.ptp(rows[1]))
        off = float(np.abs(rows[0] - rows[1]).max())
        if not off <= TOLERANCE * max(1.0, span / 20):
            raise Wrong(f"{name}: {walk}: logits off by {off:.4f} of {span:.1f}")

    @staticmethod
    def _compare_with_fresh(name: str, walk: list[Call], engine: Any, fresh: Any) -> None:
        method, _, fields = walk[-1]
        seq = fields.get("seq_id", 0)
        tokens = engine.tokens(seq)
        if method not in ("decode", "decode_one") or not 0 < len(tokens) == engine.n_past(seq):
            return
        try:
            row = engine.logits(-1).copy()
        except ic.OutputNotAvailableError:
            return
        fresh.clear()
        fresh.decode(tokens)
        other = fresh.logits(-1)
        off = float(np.abs(row - other).max())
        if not off <= max(engine.tolerance, TOLERANCE):
            raise Wrong(f"{name}: {walk}: logits off by {off:.4f} of {float(np.ptp(other)):.1f}")


def _encode(random: Random, name: str, model: Any) -> str:
    """Encode texts one after another, and compare each with what a new context makes of it."""
    pooling = random.choice(("mean", "cls", "last"))
    fields = {"n_ctx": N_CTX, "n_ubatch": N_CTX, "pooling_type": pooling, **ONE}
    walk: list[list[int]] = []
    with model.new_context(**fields) as context, model.new_context(**fields) as fresh:
        for _ in range(5):
            n_tokens = random.choice((1, 2, 9, 60, N_CTX, N_CTX + 1))
            walk.append([random.randrange(model.tokenizer.n_vocab) for _ in range(n_tokens)])
            outcomes = [
                _outcome(each, ("encode", (walk[-1],), {}), None) for each in (context, fresh)
            ]
            if len({*outcomes, "ok" if n_tokens <= N_CTX else outcomes[0]}) > 1:
                raise Wrong(f"{name}: {walk}: {outcomes}")
            if outcomes[0] == "ok":
                off = float(np.abs(context.embedding() - fresh.embedding()).max())
                if not off <= TOLERANCE:
                    raise Wrong(f"{name}: {walk}: off by {off:.4f}")
            if random.random() < 0.3:
                context.clear()
            fresh.clear()
    return f"{name} {pooling}: {walk}"


def _kind(random: Random, model: Any) -> dict[str, Any]:
    """Return fields of a context whose keys and values are of any types."""
    if model.info.is_recurrent:
        return dict(ONE)
    types = sorted(model.capabilities.kv_types)
    fields = {"type_k": random.choice(types), "type_v": random.choice(types)}
    if random.random() < _SHARE_EXACT:
        fields["type_v"] = fields["type_k"]
    return {**fields, "flash_attn": random.choice((None, "on", "off", "auto")), **ONE}


def _is_plain(walk: list[Call]) -> bool:
    """Whether no key was turned, and nothing cut out of what other keys have seen."""
    moves = ("seq_shift", "seq_divide", "eval", "decode_spans")
    return all(
        method not in moves and (method != "seq_remove" or arguments[2] == -1)
        for method, arguments, _ in walk
    ) and not any(method == "seq_copy" and len(arguments) > 2 for method, arguments, _ in walk)


def _saved(context: Any, seq: int) -> Any:
    return context.save_state() if seq < 0 else context.save_sequence(seq)


def _outcome(context: Any, call: Call, data: Any) -> str:
    method, arguments, fields = call
    try:
        done = getattr(context, method)(*arguments, *(() if data is None else (data,)), **fields)
    except ic.InferCoreError as error:
        return type(error).__name__
    return "False" if done is False else "ok"


def open_target() -> Walks:
    """Return the target."""
    return Walks()
