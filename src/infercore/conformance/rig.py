"""What a backend supplies so that laws can be run on it, and what laws take from it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import numpy as np

import infercore
from infercore.conformance import expect
from infercore.conformance.expect import NotApplicable
from infercore.conformance.law import RELEASES
from infercore.conformance.options import NATIVE
from infercore.conformance.oracle import Oracle
from infercore.conformance.texts import STORY, TEXTS
from infercore.errors import UnsupportedFeatureError
from infercore.values import checks
from infercore.values.config import AdapterSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float32]

THREADS = ("n_threads", "n_threads_batch")
N_NOTED = 8
"""Draws of a law that its failure shows."""
OF_SESSION = ("profile_id", "prompt_format", "add_bos", "overflow")
"""Options of a session, beside the fields of its context."""
OWNERS = ("backend", "engine", "hardware", "model", "suite")


@attrs.frozen(kw_only=True)
class Observation:
    """What the engine itself holds and has done, read past the API; None = it does not tell.

    ``resident`` counts the tokens of the sequence, ``evaluated`` all tokens that the context
    has evaluated since it was opened. ``threads`` are the engine's own counts, for single tokens
    and for batches.
    """

    resident: int | None = None
    evaluated: int | None = None
    tokens: tuple[int, ...] | None = None
    threads: tuple[int, int] | None = None


def _known(_: Any, attribute: attrs.Attribute[Any], value: Mapping[str, str]) -> None:
    if not isinstance(value, Mapping):
        raise checks.refuse(attribute.name, value, "a mapping of ids of laws to reasons")
    for identifier, reason in value.items():
        if not isinstance(reason, str) or not reason.startswith(tuple(f"{o}:" for o in OWNERS)):
            owners = ", ".join(f"'{owner}: ...'" for owner in OWNERS)
            raise checks.refuse(attribute.name, {identifier: reason}, f"reasons as {owners}")


def _suite(_: Any, attribute: attrs.Attribute[Any], value: str) -> None:
    if value not in RELEASES:
        allowed = f"a version of the suite that was released: {', '.join(RELEASES)}"
        raise checks.refuse(attribute.name, value, allowed)


def _texts(value: Sequence[str]) -> tuple[str, ...]:
    """The suite's own texts are always tried, whatever a rig adds to them."""
    own = checks.items("texts", value, "a sequence of strings")
    return tuple(dict.fromkeys([*TEXTS, *(checks.check_text("texts", text) for text in own)]))


def _names(value: Sequence[str]) -> tuple[str, ...]:
    return tuple(checks.items("require", value, "a sequence of names"))


@attrs.frozen(eq=False)
class Golden:
    """Token ids, and the logits [n_tokens, n_vocab] after each of them, from elsewhere."""

    tokens: tuple[int, ...]
    logits: FloatArray


def _golden(value: Iterable[Golden | tuple[Sequence[int], Any]]) -> tuple[Golden, ...]:
    return tuple(pair if isinstance(pair, Golden) else _golden_of(*pair) for pair in value)


def _golden_of(tokens: Sequence[int], logits: Any) -> Golden:
    rows = np.asarray(logits, dtype=np.float32)
    if rows.ndim != 2 or len(rows) != len(tokens):  # noqa: PLR2004  (rows of logits)
        raise checks.refuse("golden", rows.shape, "logits [n_tokens, n_vocab], a row for each id")
    return Golden(tuple(int(token) for token in tokens), rows)


@attrs.define(kw_only=True, eq=False)
class Rig:
    """How to try a backend.

    ``open_model()`` returns an `infercore.Model`; laws open it more than once.
    ``open_path(path)`` opens another file or folder of the same format, ``path`` is where the
    model lies (damaged copies of it are tried). ``model_name`` names a model of the pack, whose
    golden outputs are then compared with. ``tolerance`` bounds how far logits move in another
    split, with the context fields ``exact``. ``observe(context, seq_id)`` looks into the engine
    past the API. ``known`` maps ids of laws that fail to reasons, each "backend: ...",
    "engine: ...", "hardware: ...", "model: ..." or "suite: ..." (a law that asks too much; say
    where you reported it). ``suite_version`` pins the suite: newer laws
    only report. ``require`` names what must be there: "oracle", "observe", "adapter", "encoder",
    "constraints", "suite" (all of it, in today's version), what laws need ("kv_shift", "state",
    ...), or options and calls that the backend honours ("n_ubatch", "rope_freq_base",
    "set_control_vector", "native.mirostat", ...), so that what is lost fails the run and is not
    refused in silence.
    ``story`` is plain text of 300 tokens or more, ``texts`` must survive encode and decode, beside
    the suite's own. ``variant`` names a way of running the backend that has a rig of its own. With
    ``in_pool`` the sessions that laws open are each one of a pool (`find_rig` makes such a rig of
    any other, as "NAME-pool"); with ``isolated`` too that pool's engine is a process of its own
    ("NAME-isolated").

    ``adapter`` is the path of a LoRA adapter for the model, in the backend's format;
    ``adapter_name`` names it in the pack, and its logits are then compared with those that the
    reference backend computes. ``oracle`` is the path of a folder in Hugging Face's format with the
    same weights, a plain llama in float32, whose logits are computed anew and compared with; a
    model of the pack has one. ``golden`` are texts with their logits that any other implementation
    has computed: pairs of token ids and a float32 array [n_tokens, n_vocab], row i behind token i.
    ``narrow`` is the path of the same weights in a narrower format (quantised); or what writes them
    into a folder that it is given, and returns what turns weights into what they are there.
    ``engine`` is the package of the engine, as pip names it: the backend must take the releases of
    it that its own package requires, and no other, and refuse others (its descriptor's ``check``)
    with a reason that names package and release; where another package that the plugin requires is
    missing, it must be unavailable, and name that. ``own_options`` are pairs of
    ``backend_options`` to load a model (or open a context) with, or fields of a model's config, or
    both, and of a function of that model (or context), which tells whether they show;
    ``wrong_options`` are such options (or, together with fields, those of a context) that must be
    refused by the name of the first. ``wrong_files`` each write into a folder that they are given
    what is nearly a model of the backend's format and cannot be one, and return its path: it must
    be refused. Each of ``others`` writes into such a folder a model with the same vocabulary and
    another architecture (other positions, states beside keys and values, other shapes), and returns
    its path: what it declares must hold there too, within ``tolerance``. Where it leaves the same
    weights in a folder ``oracle`` there, in Hugging Face's format (with ``layer_types`` and
    ``sliding_window``, if it has such layers), logits are compared with the oracle's. ``ranker``
    writes into such a folder an encoder with a head that scores texts (a file of its own, or all
    that the folder holds), and returns a function of ids and kinds (1 for those of the second text
    of a pair) to a score, computed apart from the backend; its weights are those of ``encoder``, if
    the rig has one. ``n_ctx`` is the window of the laws'
    contexts, at least 128.
    ``encoder`` is the path of an encoder that ``open_path`` reads,
    ``encoder_name`` its name in the pack. ``is_encoder`` tells that ``open_model`` itself opens an
    encoder: laws about models that generate are then left.
    """

    backend: str = attrs.field(validator=checks.text())
    open_model: Callable[[], Any]
    tolerance: float = attrs.field(validator=checks.number(0, optional=False))
    suite_version: str = attrs.field(validator=_suite)
    open_path: Callable[[str], Any] | None = None
    path: str | None = None
    model_name: str | None = None
    exact: Mapping[str, Any] = attrs.field(factory=dict)
    adapter: str | None = None
    adapter_name: str | None = None
    oracle: str | None = None
    golden: tuple[Golden, ...] = attrs.field(factory=tuple, converter=_golden)
    narrow: str | Callable[[str], Callable[[FloatArray], FloatArray]] | None = None
    encoder: str | None = None
    encoder_name: str | None = None
    is_encoder: bool = False
    engine: str | None = None
    own_options: Sequence[tuple[Mapping[str, Any], Callable[[Any], bool]]] = ()
    wrong_options: Sequence[Mapping[str, Any]] = ()
    wrong_files: Sequence[Callable[[str], str]] = ()
    others: Sequence[Callable[[str], str]] = ()
    ranker: Callable[[str], Callable[[Sequence[int], Sequence[int]], float]] | None = None
    observe: Callable[[Any, int], Observation] | None = None
    known: Mapping[str, str] = attrs.field(factory=dict, validator=_known)
    story: str = STORY
    texts: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    n_ctx: int = attrs.field(default=256, validator=checks.integer(128, optional=False))
    require: tuple[str, ...] = attrs.field(default=(), converter=_names)
    variant: str = ""
    in_pool: bool = False
    isolated: bool = False
    child: tuple[str, str | None] | None = None
    random: random.Random = attrs.field(factory=lambda: random.Random(0), init=False)
    _model: Any = attrs.field(default=None, init=False)
    _encoder: Any = attrs.field(default=None, init=False)
    _opened: list[Any] = attrs.field(factory=list, init=False)
    _pools: dict[str, Any] = attrs.field(factory=dict, init=False)
    _n_sessions: int = attrs.field(default=0, init=False)
    _drawn: list[str] = attrs.field(factory=list, init=False)
    asked: set[str] = attrs.field(factory=set, init=False)
    _oracle: Any = attrs.field(default=None, init=False)
    _story_ids: list[int] = attrs.field(factory=list, init=False)

    @property
    def label(self) -> str:
        """What reports call it: the backend's name, and the variant's."""
        return f"{self.backend}-{self.variant}" if self.variant else self.backend

    # -- what laws open; all of it is closed after the law ---------------------------------------

    @property
    def model(self) -> Any:
        """The model, opened once for all laws."""
        if self._model is None:
            self._model = self.open_model()
        return self._model

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.model.tokenizer

    @property
    def encoder_model(self) -> Any:
        """The encoder, opened once for all laws. Raises `NotApplicable` where there is none."""
        if self.is_encoder:
            return self.model
        if self._encoder is None:
            if self.encoder is None:
                self.leave("the rig has no encoder")
            self._encoder = self.open_at(self.encoder)
        return self._encoder

    def open_at(self, path: str) -> Any:
        """Return the model at ``path``, opened as the rig says or else as users do."""
        if self.open_path is not None:
            return self.open_path(path)
        return infercore.load_model(path, backend=self.backend)

    def another_model(self) -> Any:
        """Return the model opened once more."""
        return self.opened(self.open_model())

    def context(self, **fields: Any) -> Any:
        """Return a context with the exact settings and a window of ``n_ctx``."""
        self.note(f"context({_shown(fields)})")
        return self.opened(self.model.new_context(**self.fields(**fields)))

    def session(self, **fields: Any) -> Any:
        """Return a session with the exact settings and a window of ``n_ctx``."""
        self.note(f"session({_shown(fields)})")
        if not self.in_pool:
            return self.opened(self.model.new_session(**self.fields(**fields)))
        options = {name: fields.pop(name) for name in OF_SESSION if name in fields}
        if "n_seq_max" in fields:
            fields["n_parallel"] = fields.pop("n_seq_max")
        if not self.isolated:
            return self.opened(self.pool(**fields).open_session(**options))
        given = self._pool_fields(fields)
        pool = self._pools.get(repr(given))  # processes take long to start
        if pool is None:
            pool = self._pools[repr(given)] = self._open_pool(given)
        self._n_sessions += 1
        return self.opened(pool.open_session(namespace=str(self._n_sessions), **options))

    def pool(self, **fields: Any) -> Any:
        """Return a pool with the exact settings, in which each session has a window of ``n_ctx``.

        It batches wherever the engine can, unless ``fields`` say otherwise.
        """
        self.note(f"pool({_shown(fields)})")
        return self.opened(self._open_pool(self._pool_fields(fields)))

    def _pool_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return self.fields(**{"batching": "always", "n_parallel": 4, **fields})

    def _open_pool(self, given: Mapping[str, Any]) -> Any:
        if not self.isolated:
            return self.model.new_pool(**given)
        path: Any = self.path
        return infercore.open_pool(path, backend=self.backend, isolate=True, **given)

    def sampler(self, **fields: Any) -> Any:
        """Return a sampler, the portable one unless ``fields`` say otherwise."""
        if fields.get("implementation") == "native":
            self.asked.update(NATIVE + name for name in fields)
        return self.opened(self.model.new_sampler(**{"implementation": "portable", **fields}))

    def encoder_context(self, **fields: Any) -> Any:
        """Return a context of the encoder, with as many threads as the exact settings have."""
        self.asked.update(fields)
        threads = {name: self.exact[name] for name in THREADS if name in self.exact}
        return self.opened(self.encoder_model.new_context(**{**threads, **fields}))

    def encoder_pooling(self) -> str:
        """Return a way in which the encoder pools; `NotApplicable` where there is none."""
        declared = self.encoder_model.capabilities.pooling
        kinds = [kind for kind in ("mean", "cls", "last") if kind in declared]
        return kinds[0] if kinds else self.leave("the encoder pools in no way")

    def two(self, **fields: Any) -> Any:
        """Return a context of two sequences, each with a window of ``n_ctx`` at least."""
        return self.context(**{"n_seq_max": 2, "n_ctx": 2 * self.n_ctx, **fields})

    def fields(self, **fields: Any) -> dict[str, Any]:
        """Return the context fields for ``fields``."""
        self.asked.update(name for name in fields if name not in self.exact)
        return {**self.exact, "n_ctx": self.n_ctx, **fields}

    def opened(self, thing: Any) -> Any:
        """Return ``thing``, which is closed after the law."""
        self._opened.append(thing)
        return thing

    def begin(self, name: str, seed: int) -> None:
        """Start anew, with random numbers of ``seed`` for the law ``name``."""
        self.random = random.Random(f"{seed}/{name}")
        self._drawn = []
        self.asked.clear()

    def note(self, text: str) -> None:
        """Keep what a law is made of, to be shown if it fails."""
        if len(self._drawn) < N_NOTED and text not in self._drawn:
            self._drawn.append(text)

    @property
    def drawn(self) -> tuple[str, ...]:
        """What the law was made of so far: the tokens that it drew, the contexts it opened."""
        return tuple(self._drawn)

    def tidy(self) -> None:
        """Close what laws opened, the last first."""
        opened, self._opened = self._opened[::-1], []
        for thing in opened:
            thing.close()

    def close(self) -> None:
        """Close the models too, and the pools that laws shared."""
        self.tidy()
        while self._pools:
            self._pools.popitem()[1].close()
        models = self._encoder, self._model
        self._encoder = self._model = None
        for model in models:
            if model is not None:
                model.close()

    # -- material --------------------------------------------------------------------------------

    def tokens(self, n: int) -> list[int]:
        """Return ``n`` tokens of the story, from a random place."""
        found = self.story_at(self.random.randrange(max(1, len(self._story()) - n)), n)
        self.note(f"tokens {found}")
        return found

    def _story(self) -> list[int]:
        if not self._story_ids:
            self._story_ids = list(self.tokenizer.encode(self.story, add_special=False))
        return self._story_ids

    def story_at(self, at: int, n: int) -> list[int]:
        """Return ``n`` tokens of the story from its place ``at`` on, which may be any number."""
        ids = self._story()
        return [ids[(at + i) % len(ids)] for i in range(n)]

    def passage(self, n: int) -> str:
        """Return plain text of about ``n`` tokens from the story."""
        text: str = self.tokenizer.decode(self.tokens(n))
        return text.strip()

    def cold(self, tokens: Sequence[int], **fields: Any) -> FloatArray:
        """Return the logits after ``tokens`` in a context of their own."""
        with contextlib.closing(self.model.new_context(**self.fields(**fields))) as fresh:
            fresh.decode(tokens)
            return np.array(fresh.logits())

    # -- the oracle ------------------------------------------------------------------------------

    def live_oracle(self) -> Oracle | None:
        """Return what computes the logits of the same weights apart from the backend, or None.

        It is found by `oracle`, or else by `model_name` in the pack.
        """
        if self._oracle is None:
            where = self.oracle_path()
            self._oracle = (where is not None and Oracle.of_folder(where),)
        return self._oracle[0] or None

    def oracle_path(self) -> str | None:
        """Return where the oracle's weights and files lie, None where there are none."""
        return self.oracle or _in_pack(self.model_name)

    def oracle_name(self) -> str | None:
        """Return what logits, or an encoder's vectors, are compared with; None for nothing."""
        if self.is_encoder:
            known = self.encoder_name is not None and _in_pack(self.encoder_name) is not None
            return "reference" if known else None
        if self.live_oracle() is not None:
            return "reference"
        return "golden" if self.golden_texts() else None

    def golden_texts(self) -> tuple[Golden, ...]:
        """Return the rig's golden texts, or those that the pack has for `model_name`."""
        return self.golden or _golden_in_pack(self.model_name)

    def need_oracle(self) -> Oracle:
        """Return the oracle. Raises `NotApplicable` where there is none."""
        oracle = self.live_oracle()
        if oracle is None:
            self.leave("the rig has no oracle: name a folder with the same weights, a plain llama")
        return oracle

    def adapted(self, oracle: Oracle, scale: float) -> Oracle:
        """Return the oracle with the rig's adapter at ``scale``."""
        where = _in_pack(self.adapter_name)
        if where is None:
            self.leave("the adapter is none of the pack's")
        return oracle.with_adapter(where, scale)

    def adapters_at(self, scale: float) -> list[AdapterSpec]:
        """Return the rig's adapter at ``scale``, as a context takes it; nothing for 0."""
        if not scale:
            return []
        if self.adapter is None:
            self.leave("the rig has no adapter")
        return [AdapterSpec(path=self.adapter, scale=scale)]

    # -- comparisons -----------------------------------------------------------------------------

    def near(self, found: Any, expected: Any, what: str) -> None:
        """Raise `LawError` unless logits agree within the tolerance, and in the likeliest token.

        The likeliest may differ where the two best are closer than twice the tolerance.
        """
        found, expected = np.asarray(found), np.asarray(expected)
        expect.equal(found.shape, expected.shape, f"{what}, shape")
        if not self.shows_all_logits:  # at the edge of what is told, one may have what others lack
            found, expected = (_told(row) for row in (found, expected))
            expected = np.maximum(expected, found.min(axis=-1, keepdims=True))
        gap = float(np.abs(found - expected).max(initial=0.0))
        expect.that(
            gap <= self.tolerance,
            f"{what}: logits differ by {gap:.3g}, the tolerance is {self.tolerance:.3g}",
        )

    def same_bits(self, found: Any, expected: Any, what: str) -> None:
        """Raise `LawError` unless two arrays are equal to the last bit."""
        expect.that(np.array_equal(found, expected), f"{what}: the values are not the same bits")

    def follows(
        self, prompt: Sequence[int], generated: Sequence[int], what: str, **fields: Any
    ) -> None:
        """Raise `LawError` unless greedy decoding of a cold context gives ``generated``.

        At each step the token must be the likeliest one that is no end of generation, or within
        twice the tolerance of it. An engine that shows no logits must generate the same tokens.
        """
        if self.shows_no_logits:
            self._generates(prompt, generated, what, **fields)
            return
        with contextlib.closing(self.model.new_context(**self.fields(**fields))) as fresh:
            fresh.decode(prompt)
            for i, token in enumerate(generated):
                row = fresh.logits()
                gap = self._likeliest(row) - float(row[token])
                expect.that(
                    gap <= 2 * self.tolerance,
                    f"{what}: token {i} is {token}, {gap:.3g} below the likeliest of a cold run",
                )
                fresh.decode_one(token)

    @property
    def shows_all_logits(self) -> bool:
        """Whether every logit of a row can be read: what needs that is refused otherwise."""
        return bool(self.model.capabilities.logits == "full")

    def need_all_logits(self) -> None:
        """Leave a law that needs every logit, where not all can be read: it is refused then."""
        if not self.shows_all_logits:
            raise UnsupportedFeatureError(feature="logits", backend=self.backend)

    @property
    def shows_no_logits(self) -> bool:
        """Whether the engine generates by itself: what needs logits is refused then."""
        return bool(self.model.capabilities.logits == "none")

    def _generates(
        self, prompt: Sequence[int], generated: Sequence[int], what: str, **fields: Any
    ) -> None:
        with contextlib.closing(self.model.new_session(**self.fields(**fields))) as fresh:
            fresh.ensure_prefix(list(prompt))
            found = greedy(fresh, len(generated))
        expect.equal(list(generated), found, f"{what}: what a cold session generates")

    def _likeliest(self, row: FloatArray) -> float:
        """Return the highest logit of a token that ends no generation."""
        order = np.argsort(-row, kind="stable")
        best = next(token for token in order.tolist() if not self.tokenizer.is_eog(token))
        return float(row[best])

    @contextlib.contextmanager
    def unchanged(self, context: Any, what: str = "the context") -> Iterator[None]:
        """Raise `LawError` where the block leaves ``context`` other than it was."""
        before = self.look(context)
        yield
        self.still(before, context, what)

    def still(self, before: Mapping[str, Any], context: Any, what: str) -> None:
        """Raise `LawError` where ``context`` is other than `look` found it ``before``."""
        after = self.look(context)
        for name, value in before.items():
            same = np.array_equal(after[name], value) if name == "row" else after[name] == value
            expect.that(same, f"{what}: {name} changed from {value!r} to {after[name]!r}")

    def look(self, context: Any) -> dict[str, Any]:
        """Return all that a context and its engine tell of what they hold."""
        ids = range(context.n_seq_max)
        return {
            "tokens": [list(context.tokens(s)) for s in ids],
            "n_past": [context.n_past(s) for s in ids],
            "n_resident": [context.n_resident(s) for s in ids],
            "observed": [self.observe(context, s) for s in ids] if self.observe else [],
            "row": np.array(context.logits()) if context.n_outputs else np.empty(0),
        }

    def inner(self, session: Any) -> Any:
        """Return the context of a session. Raises `NotApplicable` where it shows none."""
        context = None if self.isolated else getattr(session, "context", None)
        if context is None:
            self.leave("this session does not show its context")
        return Placed(context) if self.in_pool else context

    def leave(self, reason: str) -> NoReturn:
        """Leave a law that cannot be tried here."""
        raise NotApplicable(reason)


class Placed:
    """The context of a session in a pool: its own tokens, and the rest of the pool's context."""

    def __init__(self, paged: Any) -> None:
        self.tokens = paged.tokens
        self._paged = paged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._paged.scheduler.context, name)

    @property
    def place(self) -> tuple[Any, int]:
        """The pool's context, and the sequence of the session there; 0 where it has none.

        An engine may end the process when it is asked of a sequence that there is not.
        """
        return self._paged.scheduler.context, self._paged.sequence.seq_id or 0


def _shown(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def _in_pack(name: str | None) -> str | None:
    """Return where the pack has a model in Hugging Face's format, None where it has not."""
    if name is None:
        return None
    try:
        import infercore_models  # noqa: PLC0415  (a distribution of its own)
    except ImportError:
        return None
    if "hf" not in infercore_models.names().get(name, ()):
        return None
    return str(infercore_models.path(name, "hf"))


def _golden_in_pack(name: str | None) -> tuple[Golden, ...]:
    if _in_pack(name) is None:
        return ()
    import infercore_models  # noqa: PLC0415  (a distribution of its own)

    return _golden((p.tokens, p.logits) for p in infercore_models.golden(str(name)).prompts)


def generated(chunks: Sequence[Any]) -> list[int]:
    """Return the ids of all tokens in a stream's chunks."""
    return [token for chunk in chunks for token in chunk.tokens]


def joined(chunks: Sequence[Any]) -> str:
    """Return the text of all chunks."""
    return "".join(chunk.text for chunk in chunks)


def greedy(session: Any, n: int, **fields: Any) -> list[int]:
    """Return ``n`` tokens decoded greedily, ends ignored unless asked for."""
    asked = {"max_tokens": n, "temperature": 0, "ignore_eos": True, **fields}
    return generated(list(session.decode(**asked)))


def _told(rows: Any) -> Any:
    """Return rows as log-probabilities; what they do not tell is the least that they do."""
    known = np.isfinite(rows)
    if known.all():  # all logits, an oracle's
        exact = np.asarray(rows, dtype=np.float64)
        exact = exact - exact.max(axis=-1, keepdims=True)
        return exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    return np.where(known, rows, np.where(known, rows, np.inf).min(axis=-1, keepdims=True))
