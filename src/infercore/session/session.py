"""The session that the core provides over any context."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from weakref import ref

import attrs

from infercore.engine.arguments import check_token
from infercore.errors import (
    ContextOverflowError,
    InvalidInputError,
    InvalidStateError,
    UnsupportedFeatureError,
)
from infercore.session import branches, chatting, evicting, infilling, snapshots, tool_loop
from infercore.session.chat_stream import ChatStream
from infercore.session.drafting import drafter_of
from infercore.session.generation import Generation
from infercore.session.homes import OwnContext
from infercore.session.parts import EMPTY, PREFIXED, Parts
from infercore.session.prefill import Prefilling, as_input
from infercore.values import checks
from infercore.values.config import DecodeConfig, SamplingConfig, sampling_of
from infercore.values.field_texts import lists_fields
from infercore.values.manifest import hash_text, hash_token_ids
from infercore.values.session import PrefixInput, PrefixStatus, SuffixInput

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Unpack

    from infercore.session.base import Home, SessionOptions
    from infercore.session.stream import DecodeStream
    from infercore.values.fields import DecodeFields, RunToolsFields
    from infercore.values.info import ModelInfo
    from infercore.values.session import Beam, Completion, Message, Snapshot


class CoreSession(Prefilling):
    """A `Session` over one sequence of a context."""

    # -- decode --------------------------------------------------------------------------------

    @lists_fields("DecodeConfig", "SamplingConfig")
    def decode(
        self, config: DecodeConfig | None = None, **fields: Unpack[DecodeFields]
    ) -> DecodeStream:
        """Return an iterator that generates from here; see `Session.decode`.

        Fields of `SamplingConfig` may be given as well. The session is held until the iterator
        ends, is closed or dropped. Raises `InvalidStateError` on nothing, `ContextOverflowError`
        (stage "decode") without room for one token; both *unchanged*.
        """
        built = self._decode_config(config, fields)
        if built.response_format is None:  # the time begins with the first step
            with self.entered("decode"):
                self._check_decodable()
                return self.stream_of(self.generation(built))
        started = time.perf_counter()
        with self.entered("decode", built.timeout):
            self._check_decodable()
            return self.stream_of(self.generation(built), started=started)

    def check_decode(self, config: DecodeConfig | None, fields: Mapping[str, Any]) -> DecodeConfig:
        """Return the config of a decode that could begin now; raises what `decode` raises.

        Quick: what takes its time (a grammar, a draft model) is left to `decode`.
        """
        built = self._decode_config(config, fields)
        with self.entered("decode"):
            self._check_decodable()
        return built

    def _decode_config(
        self, config: DecodeConfig | None, fields: Mapping[str, Any]
    ) -> DecodeConfig:
        return decode_config(config, fields, self.model.info)

    def _check_decodable(self, *, may_shift: bool = True) -> None:
        prefixed = self._state == PREFIXED
        target = self.parts.prefix_ids if prefixed else self.resident.wanted()
        check_begun(self._state, len(target))
        n_prefix = len(target) if prefixed else self.parts.n_prefix
        self.check_room(target, n_prefix, may_shift=may_shift)

    def generation(self, config: DecodeConfig) -> Generation:
        """Return what makes tokens and text as ``config`` says."""
        if config.prompt_logprobs is not None:
            self._check_rows()
        drafter = drafter_of(config, self)
        started = time.perf_counter()
        try:
            sampler = self.new_sampler(config)
        except BaseException:
            if drafter is not None:
                drafter.close()
            raise
        if config.response_format is not None:
            self.context.count_time("grammar", time.perf_counter() - started)
        return Generation(sampler, config, drafter=drafter, pieces=self.pieces)

    def _check_rows(self) -> None:
        """Raise `UnsupportedFeatureError` where not every token of a prompt can have its row."""
        if not self.context.capabilities.logits_all:
            raise UnsupportedFeatureError(
                feature="prompt_logprobs",
                backend=self.model.backend,
                hint="this engine makes one row a call",
            )

    def stream_of(
        self,
        generation: Generation,
        dropped: Sequence[int] = (),
        *,
        started: float | None = None,
    ) -> DecodeStream:
        """Return the iterator over what ``generation`` makes, for a call that began at ``started``.

        None: it begins with the iterator's first step.
        """
        stream: DecodeStream = self.shared.new_stream(self, generation, dropped, started)
        self._stream = ref(stream)
        if self.resident.was_cancelled:  # behind the prompt, and before there was a stream
            stream.cancel()
        return stream

    def beam_search(
        self,
        n_beams: int,
        *,
        max_tokens: int,
        length_penalty: float = 1.0,
        n_return: int = 1,
        early_stopping: bool = True,
    ) -> list[Beam]:
        """Return the likeliest continuations, best first; see `Session.beam_search`.

        Raises `InvalidInputError` for an option, and what `decode` raises; *unchanged*.
        """
        options = branches.BeamOptions(
            n_beams=n_beams,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            n_return=n_return,
            early_stopping=early_stopping,
        )
        if self.context.capabilities.logits != "full":
            hint = "beams are compared by logits, and this engine does not show all"
            raise UnsupportedFeatureError(
                feature="beam_search", backend=self.model.backend, hint=hint
            )
        with self.entered("beam_search"):
            self._check_decodable(may_shift=False)
            return branches.beam_search(self, options)

    @lists_fields("DecodeConfig", "SamplingConfig")
    def sample_many(self, n: int, **decode: Unpack[DecodeFields]) -> list[Completion]:
        """Return ``n`` continuations, each with its own seed; see `Session.sample_many`.

        Raises `InvalidInputError` for an option, and what `decode` raises; *unchanged*.
        """
        if not checks.is_integer(n) or not 1 <= n <= branches.MOST:
            raise checks.refuse("n", n, f"an integer from 1 to {branches.MOST}")
        config = self._decode_config(None, decode)
        if config.prompt_logprobs is not None:
            raise checks.refuse("prompt_logprobs", config.prompt_logprobs, "it to one decode")
        configs = branches.seeded(config, n)
        with self.entered("sample_many"):
            self._check_decodable()
            return branches.sample_many(self, configs)

    def evict(self, start: int, end: int) -> PrefixStatus:
        """Take the tokens in [start, end) out of the context; see `Session.evict`.

        Raises `InvalidInputError` for a range that is none, *unchanged*; `DecodeAbortedError` when
        cancelled (*partial*).
        """
        with self.entered("evict"):
            return PrefixStatus(**self._status_fields(evicting.evict(self, start, end)))

    @lists_fields("DecodeConfig", "SamplingConfig")
    def infill(
        self,
        prefix: str,
        suffix: str,
        config: DecodeConfig | None = None,
        **decode: Unpack[DecodeFields],
    ) -> DecodeStream:
        """Return an iterator over the text between ``prefix`` and ``suffix``; see `Session.infill`.

        Raises `UnsupportedFeatureError` where the vocabulary lacks the marks, and what
        `prefill_suffix` and `decode` raise.
        """
        started = time.perf_counter()
        built = self._decode_config(config, decode)
        with self.entered("infill", built.timeout):
            before, after = infilling.parts_of(
                self._tokenizer, prefix, suffix, add_bos=self._add_bos
            )
            generation = self.generation(built)
            try:
                whole = [*before, *after]
                self.resident.check_fits(whole, stage="suffix", resident=self.resident.n_wanted)
                self.check_room(whole, len(before))
                self.put_prefix(PrefixInput(tokens=before))
                self.put_suffix(SuffixInput(tokens=after))
            except BaseException:
                generation.close()
                raise
            return self.stream_of(generation, started=started)

    def completion(
        self,
        prompt: PrefixInput | str | Sequence[int],
        config: DecodeConfig | None = None,
        **decode: Unpack[DecodeFields],
    ) -> DecodeStream:
        """Return an iterator over what follows ``prompt``, which the context is made to equal.

        `ensure_prefix` and `decode` as one call, which waits for a place once. Raises what both
        raise; a bad option leaves the state unchanged.
        """
        started = time.perf_counter()
        built = self._decode_config(config, decode)
        given: PrefixInput = as_input(prompt, PrefixInput, "prompt")
        with self.entered("completion", built.timeout):
            generation = self.generation(built)
            try:
                ids = self.prefix_ids(given)
                self.resident.check_fits(ids, stage="prefix", resident=0)
                check_begun(PREFIXED, len(ids))
                self.check_room(ids, len(ids))
                self.put_prefix(given, ids)
            except BaseException:
                generation.close()
                raise
            return self.stream_of(generation, started=started)

    @lists_fields("DecodeConfig", "SamplingConfig")
    def generate(self, text: str | Sequence[int], **decode: Unpack[DecodeFields]) -> str:
        """Return the text generated after ``text`` as suffix; see `Session.generate`.

        Raises what `prefill_suffix` and `decode` raise; a bad option leaves the state unchanged.
        """
        return "".join(chunk.text for chunk in self.generating(text, **decode))

    def generating(self, text: str | Sequence[int], **decode: Unpack[DecodeFields]) -> DecodeStream:
        """Return an iterator over what `generate` returns."""
        started = time.perf_counter()
        built = self._decode_config(None, decode)
        given: SuffixInput = as_input(text, SuffixInput, "text")
        with self.entered("generate", built.timeout):
            generation = self.generation(built)
            was_empty = self._state == EMPTY
            try:
                if was_empty:
                    self.put_empty_prefix(as_text=given.tokens is None)
                self.put_suffix(given, decodes=True)
                self._check_decodable()
            except BaseException as error:
                generation.close()
                refused = isinstance(error, (ContextOverflowError, InvalidInputError))
                if was_empty and (refused or not self.resident.n_wanted):
                    self.resident.put_back([])
                    self.enter(EMPTY, Parts())
                raise
            return self.stream_of(generation, started=started)

    @lists_fields("ChatRequest", "DecodeConfig", "SamplingConfig")
    def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        reasoning: chatting.Reasoning = "parsed",
        reasoning_budget: int | None = None,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        parse_special: bool = False,
        **decode: Unpack[DecodeFields],
    ) -> ChatStream:
        """Return an iterator over the answer to ``messages``; see `Session.chat`.

        What two renders with different last user turns have in common becomes the prefix, the
        rest the suffix. Thoughts and tool calls come apart from the text. Raises
        `UnsupportedFeatureError` for what the template or its form of calls lacks,
        `InvalidInputError` for messages, tools or choices that are malformed or that the template
        refuses, and what `prefill_suffix` and `decode` raise.
        """
        started = time.perf_counter()
        config = self._decode_config(None, {"sampling": "model", **decode})
        request = chatting.ChatRequest(
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            reasoning=reasoning,
            reasoning_budget=reasoning_budget,
            chat_template=chat_template,
            template_variables=template_variables,
            parse_special=parse_special,
        )
        with self.entered("chat", config.timeout):
            has_form = config.response_format is not None
            chat = chatting.ChatTurn(
                self._tokenizer, request, add_bos=self._add_bos, has_form=has_form
            )
            fits = self._chat_fits(config) if self.overflow != "error" else None
            turn = chat.render(fits, window=int(self.context.n_ctx_seq))
            self._check_turn_fits(turn)
            built = chat.decode_config(config, turn)
            generation = self.generation(built)
            try:
                self._hold_turn(turn)
            except BaseException:
                generation.close()
                raise
            return ChatStream(
                self.stream_of(generation, started=started),
                chat.reader(turn),
                pieces=None if config.special_text else self.pieces,
                dropped_messages=turn.dropped,
            )

    @lists_fields("ChatRequest", "DecodeConfig", "SamplingConfig")
    def run_tools(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        functions: Sequence[Callable[..., Any]],
        *,
        max_rounds: int = 8,
        **decode: Unpack[RunToolsFields],
    ) -> list[Message]:
        """Chat, run what the model calls, and go on until it answers; see `Session.run_tools`."""
        return tool_loop.run(self.chat, messages, functions, max_rounds=max_rounds, **decode)

    def _chat_fits(self, config: DecodeConfig) -> Callable[[list[int]], bool]:
        """Whether a rendered chat leaves room for an answer: a quarter of the window at most."""
        window = int(self.context.n_ctx_seq)
        answer = min(config.max_tokens or window, max(1, window // 4))
        return lambda tokens: len(tokens) + answer <= self.resident.capacity(tokens)

    def _check_turn_fits(self, turn: chatting.Turn) -> None:
        """Raise `ContextOverflowError` that names what can be done about this chat."""
        try:
            self.resident.check_fits(turn.tokens, stage="suffix", resident=self.resident.n_wanted)
            self.check_room(turn.tokens, turn.n_stable)
        except ContextOverflowError as error:
            n_ctx = error.n_ctx
            hint = "open the session with overflow='truncate', which leaves out the oldest turns, "
            if self.overflow != "error":
                hint = "what is left is the last turn and the system message; shorten these, "
            raise ContextOverflowError(
                f"{error.stage}: a chat of {len(turn.tokens)} tokens and its answer exceed the "
                f"window of {n_ctx}; {hint}or open it with a larger n_ctx",
                stage=error.stage,
                resident_tokens=error.resident_tokens,
                additional_tokens=error.additional_tokens,
                n_ctx=n_ctx,
            ) from None

    def _hold_turn(self, turn: chatting.Turn) -> None:
        """Hold both parts of a turn, in one engine call where no state is kept between them."""
        tokens, n_stable = turn.tokens, turn.n_stable
        self.begin_anew_if_changed()
        at_once = self.resident.goes_back_freely and len(tokens) <= self.resident.capacity(tokens)
        first = tokens if at_once else tokens[:n_stable]
        parts = Parts(
            prefix=PrefixInput(text=turn.stable_text),
            prefix_ids=tokens[:n_stable],
            byte_hash=hash_text(turn.stable_text),
            token_hash=hash_token_ids(tokens[:n_stable]),
            n_prefix=n_stable,
            templated=True,
        )
        try:
            outcome = self.prefilled(lambda: self.resident.hold_prefix(first, at_once), EMPTY)
        except BaseException:
            self._keep_stable(parts)
            raise
        self.resident.tape.logical = n_stable
        ahead = min(outcome.prefilled, len(first) - n_stable)
        parts.n_evaluated = outcome.prefilled - ahead
        self.context.count_reused(n_stable - parts.n_evaluated)
        self.enter(PREFIXED, parts)
        self.resident.checkpoint()
        text = turn.text[len(turn.stable_text) :]
        self.set_suffix(tokens, text, merges=False, n_ahead=ahead)

    def _keep_stable(self, parts: Parts) -> None:
        """After a failure: be PREFIXED where the stable part was reached."""
        tape = self.resident.tape
        if tape.common(parts.prefix_ids) == len(parts.prefix_ids):
            tape.logical = len(parts.prefix_ids)
            self.resident.owed = []
            self.enter(PREFIXED, parts)

    # -- state as a value ----------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the session's state as a value; see `Session.snapshot`."""
        with self.entered("snapshot"):
            return snapshots.take(self)

    def restore(self, snapshot: Snapshot) -> None:
        """Take the state of ``snapshot``.

        Raises `ManifestMismatchError` and `ContextOverflowError` (stage "restore"), *unchanged*;
        `SnapshotError`: *unchanged*, or *cleared* where the engine refused it.
        """
        with self.entered("restore"):
            snapshots.put(self, snapshot)

    def save(self, path: str | os.PathLike[str]) -> Snapshot:
        """Write the state to a file, whole or not at all; return what was written.

        Raises `InvalidInputError` for what is no path of a file, OSError where it cannot be
        written.
        """
        where = checks.check_path("path", path)
        snapshot = self.snapshot()
        snapshots.write(snapshot, where)
        return snapshot

    def load(self, path: str | os.PathLike[str]) -> Snapshot:
        """Take on the state in a file that `save` wrote; return what was read.

        Raises `ModelNotFoundError` where there is no file, and what `restore` raises.
        """
        where = checks.check_path("path", path)
        with self.entered("load"):
            snapshot = snapshots.read(where)
            snapshots.put(self, snapshot)
            return snapshot

    def fork(self) -> CoreSession:
        """Return an independent session in the same state, on the same weights.

        A copy of the sequence where the context has a free one (see ``n_seq_max``), else a new
        context. The context that both share is closed with the last of them.
        """
        with self.entered("fork"):
            self.make_whole()
            return self._fork()

    def make_whole(self) -> None:
        """Evaluate what a failure took from the logical context."""
        if self.resident.owed:
            self.resident.go_on()

    def _fork(self) -> CoreSession:
        return self.twin_at(*self.shared.for_twin(self))

    def twin_at(self, shared: Home, seq_id: int = 0) -> CoreSession:
        """Return a session in the same state that lives in ``shared``."""
        twin = self._twin(shared, seq_id)
        try:
            twin.identify_as(self)
            anew = self.shared.copy(self.resident, twin.resident)
            twin.resident.adopt(self.resident, anew=anew)
            twin.enter(self._state, self.parts.copy())
        except BaseException:
            twin.close()
            raise
        return twin

    def _twin(self, shared: Home, seq_id: int) -> CoreSession:
        try:
            return CoreSession(
                self.model,
                shared,
                seq_id=seq_id,
                new_sampler=self._new_sampler,
                options=self._options,
            )
        except BaseException:
            shared.give_back(seq_id)
            raise


def new_session(
    model: Any,
    context: Any,
    new_sampler: Callable[[DecodeConfig], Any],
    options: SessionOptions,
) -> CoreSession:
    """Return a session that owns ``context``."""
    return CoreSession(
        model, OwnContext(model, context), seq_id=0, new_sampler=new_sampler, options=options
    )


def check_begun(state: str, n_tokens: int) -> None:
    """Raise `InvalidStateError` where there is nothing that a decode could go on from."""
    if state == EMPTY or not n_tokens:
        raise InvalidStateError(
            "there is nothing to decode from; call ensure_prefix with some text first",
            operation="decode",
            state=state,
        )


def decode_config(
    config: DecodeConfig | None, fields: Mapping[str, Any], info: ModelInfo
) -> DecodeConfig:
    """Return the config for a model, with fields of the sampling config taken as its own.

    Raises `InvalidInputError`, `InvalidTokenError` for a stop token that the model does not have.
    """
    names = {attribute.name for attribute in attrs.fields(SamplingConfig)}
    known = names | {attribute.name for attribute in attrs.fields(DecodeConfig)}
    checks.check_options("DecodeConfig", fields, known)
    own = {name: value for name, value in fields.items() if name not in names}
    built = checks.build(DecodeConfig, config, own)
    for token in built.stop_tokens:
        check_token(token, info.n_vocab, field="stop_tokens")
    sampling = {name: value for name, value in fields.items() if name in names}
    if not sampling and built.sampling != "model":
        return built
    return attrs.evolve(built, sampling=attrs.evolve(sampling_of(built, info.sampling), **sampling))
