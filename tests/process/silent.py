"""Calls that engines answer with wrong results and no word: S, the table of silent corruption."""

from __future__ import annotations

import numpy as np

import infercore as ic
from process.rig import Rig, case, fresh, ids, near, refused

LLAMA = ("llamacpp",)


@case("S-1")
def keeping_one_of_several_streams(rig: Rig) -> None:
    for unified in (False, True):
        context = rig.open(n_seq_max=3, kv_unified=unified)
        for s in range(3):
            context.decode(ids(4, start=5 + s), seq_id=s)
        context.seq_keep(1)
        assert [context.n_past(s) for s in range(3)] == [0, 4, 0]
        context.decode(ids(6), seq_id=0)
        near(context.logits(), fresh(rig, ids(6)))


@case("S-2")
def a_mean_over_two_steps(rig: Rig) -> None:
    context = rig.open(pooling_type="mean", embeddings=True, n_ubatch=8, n_batch=32)
    context.decode(ids(8))
    with rig.unchanged(context), refused(ic.InvalidInputError):
        context.decode(ids(9))
    each = rig.open(embeddings=True)
    each.decode(ids(8))
    near(context.embedding(), each.embeddings().mean(axis=0))


@case("S-3")
def embeddings_of_the_other_kind(rig: Rig) -> None:
    pooled, each = rig.open(pooling_type="mean", embeddings=True), rig.open(embeddings=True)
    for context in (pooled, each):
        context.decode(ids(6))
    with rig.unchanged(pooled), refused(ic.InvalidInputError):
        pooled.embeddings()
    with rig.unchanged(each), refused(ic.InvalidInputError):
        each.embedding()
    plain = rig.open()
    plain.decode(ids(6))
    with rig.unchanged(plain), refused(ic.OutputNotAvailableError):
        plain.embeddings()


@case("S-4")
def a_restored_sequence_is_there(rig: Rig) -> None:
    context = rig.open(n_seq_max=2)
    context.decode(ids(9))
    data = context.save_sequence()
    context.load_sequence(1, data)
    assert context.tokens(1) == ids(9)
    assert context.n_past(1) == 9
    context.decode_one(5, seq_id=1)
    near(context.logits(), fresh(rig, [*ids(9), 5]))


@case("S-5")
def a_gap_before_an_empty_sequence(rig: Rig) -> None:
    context = rig.open(n_seq_max=2)
    with rig.unchanged(context), refused(ic.InvalidPositionError):
        context.eval([5], 3)
    context.decode(ids(4))
    with rig.unchanged(context), refused(ic.InvalidPositionError):
        context.eval([5], 1, seq_id=1)


@case("S-6")
def penalties_over_the_whole_context(rig: Rig) -> None:
    context = rig.open()
    context.decode(ids(6))
    best = int(context.logits().argmax())
    others = [t for t in range(200, 300) if t != best]
    kinds = ("portable", "native") if rig.model.capabilities.native_sampler else ("portable",)
    for kind in kinds:
        drawn = []
        for last_n in (64, -1):
            sampler = rig.model.new_sampler(
                implementation=kind,
                temperature=0,
                presence_penalty=1e6,
                penalty_last_n=last_n,
            )
            sampler.observe([best, *others])
            drawn.append(sampler.sample(context))
        assert drawn[0] == best
        assert drawn[1] != best


@case("S-7")
def logits_of_what_is_gone(rig: Rig) -> None:
    context = rig.open(n_seq_max=2)
    context.decode(ids(6))
    blob = context.save_state()
    for call in (
        lambda: context.seq_remove(0, 4),
        lambda: context.clear(),
        lambda: context.decode(ids(4), logits="none"),
        lambda: context.decode_batch([(5, (0,), False)]),
    ):
        context.load_state(blob)
        assert context.logits() is not None
        call()
        with refused(ic.OutputNotAvailableError):
            context.logits()
        with refused(ic.OutputNotAvailableError):
            context.logits_all()


@case("S-7")
def a_refused_call_leaves_the_last_logits(rig: Rig) -> None:
    context = rig.open()
    context.decode(ids(6))
    for call in (
        lambda: context.decode([-1]),
        lambda: context.decode(ids(400)),
        lambda: context.eval([5], 50),
    ):
        with rig.unchanged(context), refused(ic.InferCoreError):
            call()


def _damaged(data: bytes) -> dict[str, bytes]:
    middle = len(data) // 2
    return {
        "empty": b"",
        "short": data[:20],
        "cut": data[:-40],
        "half": data[:middle],
        "flipped": data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :],
        "magic": b"x" + data[1:],
        "longer": data + b"more",
        "text": b"no state at all, but a text of some length" * 5,
    }


@case("S-8")
def state_that_is_damaged(rig: Rig) -> None:
    context = rig.open()
    context.decode(ids(20))
    whole, one = context.save_state(), context.save_sequence()
    for load, data in (
        (context.load_state, whole),
        (lambda d: context.load_sequence(0, d), one),
    ):
        for damaged in _damaged(data).values():
            with rig.unchanged(context), refused(ic.SnapshotError):
                load(damaged)
        load(data)
    context.decode_one(5)
    near(context.logits(), fresh(rig, [*ids(20), 5]))


@case("S-8")
def state_of_another_shape(rig: Rig) -> None:
    source = rig.open(type_k="f16", type_v="f16")
    source.decode(ids(20))
    whole, one = source.save_state(), source.save_sequence()
    for fields in ({}, {"n_seq_max": 2, "kv_unified": False}):
        target = rig.open(**fields)
        target.decode(ids(6))
        with rig.unchanged(target), refused(ic.SnapshotError):
            target.load_state(whole)
        with rig.unchanged(target), refused(ic.SnapshotError):
            target.load_sequence(0, one)
    small = rig.open(type_k="f16", type_v="f16", n_ctx=16)
    with rig.unchanged(small), refused(ic.ContextOverflowError):
        small.load_state(whole)


@case("S-8")
def state_with_whole_checksums_and_a_wrong_payload(rig: Rig) -> None:
    from infercore.engine import blob

    context = rig.open()
    context.decode(ids(20))
    for data, load in (
        (context.save_state(), context.load_state),
        (context.save_sequence(), lambda d: context.load_sequence(0, d)),
    ):
        header, payload, logits = blob.unpack(data)
        for wrong in (b"", payload[:-8], payload[: len(payload) // 2], b"\xff" * len(payload)):
            with refused(ic.SnapshotError) as caught:
                load(blob.pack(header, wrong, logits))
            assert caught[0].state_after == "cleared"
            assert (context.n_past(), context.tokens(), context.n_outputs) == (0, [], 0)
            context.decode(ids(4))
            near(context.logits(), fresh(rig, ids(4)))


@case("S-9")
def a_copy_into_a_sequence_that_there_is_not(rig: Rig) -> None:
    context = rig.open()
    context.decode(ids(6))
    with rig.unchanged(context), refused(ic.InvalidSequenceError):
        context.seq_copy(0, 5)


@case("state")
def state_of_another_model(rig: Rig) -> None:
    if rig.backend == "llamacpp":
        from infercore_models import path

        other = ic.load_model(path("storyteller", "gguf-q8_0"), backend="llamacpp")
    else:
        other = _changed_ir(rig)
    with other, rig.open(other) as source:
        source.decode(ids(12))
        whole, one = source.save_state(), source.save_sequence()
    context = rig.open()
    context.decode(ids(6))
    with rig.unchanged(context), refused(ic.SnapshotError) as caught:
        context.load_state(whole)
    assert caught[0].reason == "model_digest"
    with rig.unchanged(context), refused(ic.SnapshotError):
        context.load_sequence(0, one)


def _changed_ir(rig: Rig) -> object:
    """Return the same graph with one weight changed."""
    import shutil

    target = rig.folder / "changed"
    shutil.copytree(rig.path, target, dirs_exist_ok=True)
    weights = target / "openvino_model.bin"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    return ic.load_model(target, backend="openvino")


@case("window", on=LLAMA)
def going_back_behind_a_sliding_window(rig: Rig) -> None:
    context = rig.plain("sliding", swa_full=False, n_ubatch=8, n_ctx=512)
    context.decode(ids(300))
    assert context.capabilities.kv_remove == "rollback"
    with rig.unchanged(context):
        assert not context.seq_remove(0, 100)
        with refused(ic.UnsupportedFeatureError):
            context.eval([5], 100)
    full = rig.plain("sliding", swa_full=True, n_ctx=512)
    full.decode(ids(300))
    assert full.seq_remove(0, 100)
    full.decode(ids(20))
    again = rig.plain("sliding", swa_full=True, n_ctx=512)
    again.decode([*ids(300)[:100], *ids(20)])
    near(full.logits(), again.logits(), 5e-2)


@case("recurrent", on=LLAMA)
def part_of_a_recurrent_state(rig: Rig) -> None:
    context = rig.plain("recurrent")
    context.decode(ids(20))
    with rig.unchanged(context):
        assert not context.seq_remove(0, 10)
        assert not context.seq_remove(0, 5, 8)
        with refused(ic.UnsupportedFeatureError):
            context.eval([5], 10)
    blob = context.save_state()
    context.clear()
    context.load_state(blob)
    assert context.n_past() == 20


@case("empty")
def nothing_to_decode(rig: Rig) -> None:
    context = rig.open()
    context.decode(ids(6))
    with rig.unchanged(context):
        context.decode([])
        context.decode(np.empty(0, dtype=np.int64))
        context.eval([], 6)
        context.decode_batch([])


@case("window")
def beyond_the_window(rig: Rig) -> None:
    for fields in ({"n_ctx": 100}, {"n_ctx": 100, "n_batch": 16, "n_ubatch": 16}):
        context = rig.open(**fields)
        context.decode(ids(99))
        with rig.unchanged(context), refused(ic.ContextOverflowError) as caught:
            context.decode(ids(2))
        assert (caught[0].resident_tokens, caught[0].additional_tokens) == (99, 2)
        context.decode_one(5)
        with rig.unchanged(context), refused(ic.ContextOverflowError):
            context.decode_one(5)
        assert context.n_past() == 100


@case("shared")
def moving_a_copy(rig: Rig) -> None:
    context = rig.open(n_seq_max=2, kv_unified=True)
    context.decode(ids(20))
    context.seq_copy(0, 1)
    try:
        context.seq_shift(1, 10, -1, 4)
    except ic.UnsupportedFeatureError:
        pass
    else:
        assert context.seq_pos_max(1) == 23
    assert (context.n_past(0), context.seq_pos_max(0)) == (20, 19)
    context.decode_one(5)
    near(context.logits(), fresh(rig, [*ids(20), 5]))


@case("kv", on=("openvino",))
def a_cache_type_that_corrupts(rig: Rig) -> None:
    for name in ("u4", "i4", "u3"):
        with refused(ic.InvalidInputError):
            rig.open(type_k=name, type_v=name)
    for name in ("q8_0", "q4_0"):
        with refused(ic.UnsupportedFeatureError):
            rig.open(flash_attn="auto", type_k=name, type_v=name)
    with refused(ic.InvalidInputError):
        ic.load_model(rig.path, backend="openvino", backend_options={"KV_CACHE_PRECISION": "u4"})
    with refused(ic.InvalidInputError):
        rig.open(backend_options={"kv_cache_precision": "u4"})


@case("forms", on=("openvino",))
def state_of_the_other_form(rig: Rig) -> None:
    stateful = rig.open(backend_options={"form": "stateful"})
    paged = rig.open()
    for context in (stateful, paged):
        context.decode(ids(12))
    for source, target in ((stateful, paged), (paged, stateful)):
        blob = source.save_state()
        before = target.tokens()
        with refused(ic.SnapshotError) as caught:
            target.load_state(blob)
        assert target.tokens() == (before if caught[0].state_after == "unchanged" else [])
        target.clear()
        target.decode(ids(12))
        near(target.logits(), fresh(rig, ids(12)), 1e-3)


@case("abort", on=("openvino",))
def aborting_between_steps(rig: Rig) -> None:
    context = rig.open(n_ubatch=16)
    asked = []
    context.set_abort_callback(lambda: asked.append(1) or len(asked) > 3)
    with refused(ic.DecodeAbortedError) as caught:
        context.decode(ids(200))
    assert caught[0].resident_tokens == context.n_past() < 200
    context.set_abort_callback(None)
    kept = context.tokens()
    context.decode(ids(200)[len(kept) :])
    near(context.logits(), fresh(rig, ids(200)), 1e-3)
