"""Calls that end the process when an engine gets them as they are; here each is a typed error.

The names are those of the rows of the tables of what was measured: K, of calls that kill.
"""

from __future__ import annotations

import infercore as ic
from process.rig import Rig, case, fresh, ids, near, refused

LLAMA = ("llamacpp",)


@case("K1")
def more_tokens_than_a_batch(rig: Rig) -> None:
    context = rig.open(n_batch=8, n_ubatch=8)
    context.decode(ids(30))
    assert context.n_past() == 30
    near(context.logits(), fresh(rig, ids(30)))
    entries = [(token, (0,), False) for token in ids(context.n_batch + 1)]
    with rig.unchanged(context), refused(ic.InvalidInputError):
        context.decode_batch(entries)


@case("K1")
def more_output_rows_than_a_batch(rig: Rig) -> None:
    context = rig.open(n_batch=8, n_ubatch=8)
    context.decode(ids(30), logits="all")
    assert context.logits_all().shape == (30, rig.model.info.n_vocab)


@case("K2")
def bidirectional_attention_over_two_steps(rig: Rig) -> None:
    if rig.backend == "openvino":
        context = rig.open(n_ubatch=8)
        with rig.unchanged(context), refused(ic.UnsupportedFeatureError):
            context.set_causal_attention(False)
        context = rig.open(attention_type="non-causal")  # which has no steps
        context.decode(ids(9))
        assert context.n_past() == 9
        return
    for context in (rig.open(n_ubatch=8, attention_type="non-causal"), rig.open(n_ubatch=8)):
        context.set_causal_attention(False)
        context.decode(ids(8))
        with rig.unchanged(context), refused(ic.InvalidInputError):
            context.decode(ids(9))


@case("K2", on=LLAMA)
def an_encoder_over_two_steps(rig: Rig) -> None:
    context = rig.plain("encoder", n_ubatch=8, n_batch=16)
    with refused(ic.InvalidInputError):
        context.encode(ids(9))
    context.encode(ids(8))
    assert context.embedding().shape == (64,)


@case("K3")
def sampling_without_logits(rig: Rig) -> None:
    context = rig.open()
    kinds = ("portable", "native") if rig.model.capabilities.native_sampler else ("portable",)
    for kind in kinds:
        context.clear()
        sampler = rig.model.new_sampler(implementation=kind)
        with rig.unchanged(context), refused(ic.OutputNotAvailableError):
            sampler.sample(context)
        context.decode(ids(5), logits="none")
        with rig.unchanged(context), refused(ic.OutputNotAvailableError):
            sampler.sample(context)
        context.decode(ids(5))
        with rig.unchanged(context), refused(ic.OutputNotAvailableError):
            sampler.sample(context, 1)
        with rig.unchanged(context):
            assert 0 <= sampler.sample(context) < rig.model.info.n_vocab
        sampler.close()


@case("K4")
def a_chain_in_which_nothing_selects(rig: Rig) -> None:
    context = rig.open()
    context.decode(ids(5))
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "min_keep": 0}
    kinds = ("portable", "native") if rig.model.capabilities.native_sampler else ("portable",)
    for kind in kinds:
        sampler = rig.model.new_sampler(implementation=kind, **off)
        assert 0 <= sampler.sample(context) < rig.model.info.n_vocab


@case("K4")
def every_token_forbidden(rig: Rig) -> None:
    context = rig.open()
    context.decode(ids(5))
    bias = dict.fromkeys(range(rig.model.info.n_vocab), float("-inf"))
    kinds = ("portable", "native") if rig.model.capabilities.native_sampler else ("portable",)
    for kind in kinds:
        for temperature in (0.0, 1.0):
            with refused(ic.InferCoreError):
                sampler = rig.model.new_sampler(
                    implementation=kind, logit_bias=bias, temperature=temperature
                )
                sampler.sample(context)
    assert context.n_past() == 5


@case("K5 K6")
def nothing_is_accepted_twice(rig: Rig) -> None:
    sampler = rig.model.new_sampler()
    assert not hasattr(sampler, "accept")
    for bad in (-1, rig.model.info.n_vocab):
        with refused(ic.InvalidTokenError):
            sampler.observe([bad])
    with rig.model.new_session(n_ctx=64) as session:
        session.ensure_prefix("Once")
        with refused(ic.GrammarError, ic.UnsupportedFeatureError):
            list(session.decode(max_tokens=2, response_format={"type": "regex", "pattern": "("}))
        if rig.model.capabilities.native_sampler:
            with refused(ic.UnsupportedFeatureError):
                list(session.decode(implementation="native", response_format={"choice": ["a"]}))


def _sequence_calls(context: object, bad: object) -> list[object]:
    c = context
    return [
        lambda: c.seq_copy(0, bad),
        lambda: c.seq_copy(bad, 0),
        lambda: c.seq_keep(bad),
        lambda: c.seq_shift(bad, 0, -1, 1),
        lambda: c.seq_divide(bad, 0, -1, 2),
        lambda: c.seq_pos_min(bad),
        lambda: c.seq_pos_max(bad),
        lambda: c.n_past(bad),
        lambda: c.n_resident(bad),
        lambda: c.n_free(bad),
        lambda: c.tokens(bad),
        lambda: c.decode([5], seq_id=bad),
        lambda: c.decode_one(5, seq_id=bad),
        lambda: c.eval([5], 0, seq_id=bad),
        lambda: c.decode_batch([(5, (bad,), True)]),
        lambda: c.save_sequence(bad),
        lambda: c.load_sequence(bad, b""),
    ]


@case("K7")
def a_sequence_that_there_is_not(rig: Rig) -> None:
    for fields in ({"n_seq_max": 3, "kv_unified": False}, {"n_seq_max": 3, "kv_unified": True}, {}):
        context = rig.open(**fields)
        context.decode(ids(6))
        for bad in (-1, context.n_seq_max, 255, 256, 2**31, -(2**31) - 1, "0", None):
            for call in _sequence_calls(context, bad):
                with rig.unchanged(context), refused(ic.InvalidSequenceError):
                    call()


@case("K8")
def part_of_a_sequence_across_streams(rig: Rig) -> None:
    context = rig.open(n_seq_max=2, kv_unified=False)
    context.decode(ids(8))
    if context.capabilities.kv_copy == "any":
        context.seq_copy(0, 1, 0, 4)
        assert context.tokens(1) == ids(8)[:4]
        return
    with rig.unchanged(context), refused(ic.UnsupportedFeatureError):
        context.seq_copy(0, 1, 0, 4)
    context.seq_copy(0, 1)
    assert context.tokens(1) == ids(8)


@case("K9")
def removing_from_a_sequence_that_there_is_not(rig: Rig) -> None:
    context = rig.open(n_seq_max=2, kv_unified=False)
    context.decode(ids(6))
    for bad in (-2, 2, 256, 2**40):
        with rig.unchanged(context), refused(ic.InvalidSequenceError):
            context.seq_remove(bad)
    assert context.seq_remove(-1)
    assert context.n_past() == 0


@case("K10")
def dividing_by_zero(rig: Rig) -> None:
    context = rig.open()
    context.decode(ids(6))
    for bad in (0, -1, 2**31, 1.5, None):
        with rig.unchanged(context), refused(ic.InvalidInputError):
            context.seq_divide(0, 0, -1, bad)


@case("K11")
def a_batch_of_nothing(rig: Rig) -> None:
    for fields in ({"n_batch": 0}, {"n_batch": 0, "n_ubatch": 8}, {"n_ubatch": 0}):
        with refused(ic.InvalidInputError):
            rig.open(**fields)


@case("K12")
def encoding_on_a_decoder(rig: Rig) -> None:
    context = rig.open()
    context.decode(ids(6))
    with rig.unchanged(context), refused(ic.UnsupportedFeatureError):
        context.encode(ids(4))


def _all_calls(c: object) -> list[object]:
    return [
        lambda: c.decode([5]),
        lambda: c.decode_one(5),
        lambda: c.eval([5], 0),
        lambda: c.decode_batch([(5, (0,), True)]),
        lambda: c.encode([5]),
        lambda: c.logits(),
        lambda: c.logits_all(),
        lambda: c.embedding(),
        lambda: c.embeddings(),
        lambda: c.n_past(),
        lambda: c.n_resident(),
        lambda: c.n_free(),
        lambda: c.tokens(),
        lambda: c.seq_pos_min(),
        lambda: c.seq_pos_max(),
        lambda: c.seq_remove(0),
        lambda: c.seq_copy(0, 0),
        lambda: c.seq_keep(0),
        lambda: c.seq_shift(0, 0, -1, 1),
        lambda: c.seq_divide(0, 0, -1, 2),
        lambda: c.clear(),
        lambda: c.save_state(),
        lambda: c.load_state(b""),
        lambda: c.save_sequence(),
        lambda: c.load_sequence(0, b""),
        lambda: c.set_threads(1),
        lambda: c.set_embeddings(True),
        lambda: c.set_causal_attention(True),
        lambda: c.set_abort_callback(None),
        lambda: c.set_adapters([]),
        lambda: c.warmup(),
        lambda: c.synchronize(),
        lambda: c.perf(),
        lambda: c.reset_perf(),
    ]


@case("K13")
def any_call_after_close(rig: Rig) -> None:
    context = rig.open()
    context.decode(ids(6))
    sampler = rig.model.new_sampler()
    context.close()
    for call in [*_all_calls(context), lambda: sampler.sample(context)]:
        with refused(ic.SessionClosedError):
            call()
    context.abort()
    assert context.closed
    assert (context.n_ctx, context.effective["n_ctx"]) == (256, 256)


@case("K14", on=LLAMA)
def moving_positions_that_cannot_move(rig: Rig) -> None:
    small = {"swa_full": False, "n_ctx": 512, "n_ubatch": 8}  # its layers differ in size then
    moving = (("sliding", small), *((kind, {}) for kind in ("recurrent", "mrope", "learned")))
    for kind, fields in moving:
        context = rig.plain(kind, **fields)
        context.decode(ids(6))
        assert not context.capabilities.kv_shift
        for call in (
            lambda c=context: c.seq_shift(0, 2, -1, 3),
            lambda c=context: c.seq_divide(0, 2, -1, 2),
        ):
            with rig.unchanged(context), refused(ic.UnsupportedFeatureError):
                call()


@case("K15")
def a_token_that_there_is_not(rig: Rig) -> None:
    context, tokenizer = rig.open(n_seq_max=2), rig.model.tokenizer
    context.decode(ids(6))
    for bad in (-1, rig.model.info.n_vocab, 2**31 - 1, 2**31, 2**64, True, "5", None, 1.0):
        for call in (
            lambda b=bad: tokenizer.token_bytes(b),
            lambda b=bad: tokenizer.is_eog(b),
            lambda b=bad: tokenizer.is_control(b),
            lambda b=bad: tokenizer.decode([b]),
            lambda b=bad: context.decode([5, b]),
            lambda b=bad: context.decode_one(b),
            lambda b=bad: context.eval([b], 6),
            lambda b=bad: context.decode_batch([(b, (0,), True)]),
        ):
            with rig.unchanged(context), refused(ic.InvalidTokenError):
                call()
    assert tokenizer.encode("", add_special=False) == []
    with refused(ic.InvalidTokenError):
        rig.model.new_sampler(
            logit_bias={rig.model.info.n_vocab: 1.0}, implementation="portable"
        ).sample(context)


@case("K16")
def the_model_closed_before_its_context(rig: Rig) -> None:
    model = ic.load_model(rig.path, backend=rig.backend)
    context, other = rig.open(model), rig.open(model)
    context.decode(ids(6))
    model.close()
    model.close()
    context.decode_one(5)
    near(context.logits(), fresh(rig, [*ids(6), 5]))
    with refused(ic.SessionClosedError):
        model.new_context()
    context.close()
    context.close()
    other.decode(ids(6))
    other.close()
    with refused(ic.SessionClosedError):
        model.tokenizer.encode("a")


@case("more")
def numbers_that_no_context_has(rig: Rig) -> None:
    for fields in (
        {"n_threads": 100_000},
        {"n_threads_batch": 0},
        {"n_threads": -1},
        {"pooling_type": "median"},
        {"n_seq_max": 257},
        {"n_seq_max": 0},
        {"type_k": "q3_7"},
        {"type_v": "u4"},
        {"n_ctx": -1},
        {"defrag_thold": 0.1},
        {"flash_attn": "off", "type_v": "q8_0"},
        {"rope_freq_base": float("nan")},
        {"yarn_ext_factor": float("inf")},
    ):
        with refused(ic.InvalidInputError) as caught:
            rig.open(**fields)
        assert caught[0].field in fields
    with refused(ic.UnsupportedFeatureError):
        rig.open(pooling_type="rank")


@case("more")
def thread_counts_that_cannot_be(rig: Rig) -> None:
    context = rig.open()
    context.decode(ids(6))
    for n in (0, -1, 100_000, 1.5):
        with rig.unchanged(context), refused(ic.InvalidInputError):
            context.set_threads(n)
    if context.capabilities.live_threads:
        try:
            context.set_threads(2, 1)
            assert (context.n_threads, context.n_threads_batch) == (2, 1)
        except ic.UnsupportedFeatureError:  # an engine with one number for all work
            context.set_threads(2)
            assert context.n_threads == 2
        context.set_threads(1)
    else:
        with rig.unchanged(context), refused(ic.UnsupportedFeatureError):
            context.set_threads(1)


@case("more")
def a_batch_entry_of_no_sequence(rig: Rig) -> None:
    context = rig.open(n_seq_max=2)
    context.decode(ids(6))
    for entry in ((5, (), True), (5, (0, 0), True), (5,), 5, None, (5, 0, True), (5, (0,), 1)):
        with rig.unchanged(context), refused(ic.InvalidInputError):
            context.decode_batch([entry])
    with rig.unchanged(context), refused(ic.InvalidPositionError):
        context.decode_batch([(5, (0, 1), True)])


@case("more")
def fewer_tokens_a_call_than_sequences(rig: Rig) -> None:
    for fields in (
        {"n_batch": 1, "n_ubatch": 1, "n_seq_max": 4},
        {"n_batch": 2, "n_ubatch": 1, "n_seq_max": 8, "kv_unified": False},
        {"n_ctx": 2, "n_seq_max": 4, "kv_unified": True},
        {"n_batch": 1, "n_seq_max": 256, "kv_unified": True},
    ):
        context = rig.open(**fields)
        context.decode(ids(2), seq_id=3)
        assert context.n_past(3) == 2
        near(context.logits(), fresh(rig, ids(2)))


@case("more")
def means_of_sequences_that_do_not_divide_a_step(rig: Rig) -> None:
    for fields in ({"n_ubatch": 31}, {"n_ctx": 31}, {"n_batch": 7}):
        try:
            context = rig.open(pooling_type="mean", embeddings=True, n_seq_max=2, **fields)
        except ic.InvalidInputError as error:
            assert error.field == "n_ubatch"  # noqa: PT017  (either outcome is right)
            continue
        context.decode_batch([(5, (0,), False), (6, (1,), False)])
        assert context.embedding(1).shape == (rig.model.info.n_embd,)


@case("more")
def a_window_larger_than_the_memory(rig: Rig) -> None:
    with refused(ic.OutOfMemoryError) as caught:
        rig.open(n_ctx=2**31 - 1)
    assert len(caught[0].attempts) == 1
    rig.open().decode(ids(4))


@case("more", on=LLAMA)
def positions_beyond_those_learned(rig: Rig) -> None:
    with refused(ic.InvalidInputError) as caught:
        rig.plain("encoder", n_ctx=513)
    assert caught[0].field == "n_ctx"


@case("more")
def an_adapter_that_is_none(rig: Rig) -> None:
    context = rig.open()
    context.decode(ids(6))
    with rig.unchanged(context):
        for path in (str(rig.folder / "no-adapter"), rig.path):
            with refused(ic.ModelLoadError):
                context.set_adapters([ic.AdapterSpec(path=path)])
    context.set_adapters([])
    context.decode_one(5)


@case("more")
def after_a_fork(rig: Rig) -> None:
    import os

    context = rig.open()
    context.decode(ids(6))
    child = os.fork()
    if child == 0:
        outcome = 1
        try:
            with refused(ic.InvalidStateError):
                context.decode_one(5)
            with refused(ic.InvalidStateError):
                rig.model.new_context()
            context.close()
            outcome = 0
        finally:
            os._exit(outcome)
    assert os.waitpid(child, 0)[1] == 0
    context.decode_one(5)


@case("more")
def a_graph_used_after_others_were_closed(rig: Rig) -> None:
    first = fresh(rig, ids(40))
    for fields in ({"type_k": "f16", "type_v": "f16"}, {"n_seq_max": 2}, {}):
        rig.open(**fields).decode(ids(40))
        rig.finish()
    near(fresh(rig, ids(40)), first)
