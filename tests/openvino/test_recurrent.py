"""Graphs with states that sum up a text: the pack's mamba gives llama.cpp's logits."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BETWEEN_ENGINES = 1e-3
EXACT = {"precision": "accurate", "flash_attn": "off"}


@pytest.fixture(scope="module")
def path() -> Path:
    pack.need_backend("openvino")
    import infercore_models

    return infercore_models.path("recurrent", "openvino")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Any]:
    with ic.load_model(path, backend="openvino") as loaded:
        yield loaded


@pytest.fixture
def open_context(model: Any) -> Iterator[Callable[..., Any]]:
    opened = []

    def open_one(**fields: Any) -> Any:
        opened.append(model.new_context(**{**EXACT, "n_ctx": 256, **fields}))
        return opened[-1]

    yield open_one
    for context in opened:
        context.close()


@pytest.fixture
def cold(model: Any) -> Callable[[list[int]], Any]:
    def row(tokens: list[int]) -> Any:
        with model.new_context(**EXACT, n_ctx=256) as context:
            context.decode(tokens)
            return context.logits().copy()

    return row


def test_the_logits_are_llama_cpp_s(open_context: Any, story: list[int]) -> None:
    pack.need_backend("llamacpp")
    import infercore_models

    context = open_context(n_batch=16, n_ubatch=8)
    context.decode(story[:50], logits="all")
    with (
        ic.load_model(infercore_models.path("recurrent", "gguf-f32")) as other,
        other.new_context(n_ctx=256) as expected,
    ):
        expected.decode(story[:50], logits="all")
        gap = np.abs(context.logits_all() - expected.logits_all())
    assert gap.max() < BETWEEN_ENGINES
    assert context.logits().std() > 1


def test_what_it_is(model: Any) -> None:
    assert (model.info.is_recurrent, model.info.is_hybrid) == (True, False)
    kinds = model.capabilities
    assert (kinds.kv_remove, kinds.kv_copy, kinds.multi_sequence) == ("none", "full", True)
    states = 2 * (64 * 4 + 64 * 8) * 4  # bytes of both layers' convolution and sum, in float32
    assert model.plan_memory(n_seq_max=3).kv_bytes_by_kind == {"recurrent": 3 * states}
    for field, value in (
        ("attention_type", "non-causal"),
        ("backend_options", {"form": "paged"}),
        ("backend_options", {"form": "stateful"}),
        ("rope_freq_base", 5000.0),
    ):
        with pytest.raises(ic.UnsupportedFeatureError):
            model.new_context(n_ctx=64, **{field: value})


def test_sequences_have_states_of_their_own(open_context: Any, cold: Any, story: list[int]) -> None:
    context = open_context(n_seq_max=3, kv_unified=True)
    context.decode_spans([(0, story[:9], "none"), (2, story[20:25], "last")])
    assert np.abs(context.logits() - cold(story[20:25])).max() < context.tolerance
    context.decode_batch([(story[9], (0,), True), (story[25], (2,), True)])
    for i, tokens in enumerate((story[:10], story[20:26])):
        assert np.abs(context.logits(i) - cold(tokens)).max() < context.tolerance
    context.seq_copy(0, 1)
    context.decode_batch([(7, (0, 1), True), (8, (2,), False), (9, (0, 1), True)])
    assert context.n_outputs == 2
    for i, tokens in enumerate(([*story[:10], 7], [*story[:10], 7, 9])):
        assert np.abs(context.logits(i) - cold(tokens)).max() < context.tolerance
    context.seq_remove(0)
    context.decode_one(5, seq_id=1)
    assert np.abs(context.logits() - cold([*story[:10], 7, 9, 5])).max() < context.tolerance


def test_only_whole_sequences_are_removed(open_context: Any, cold: Any, story: list[int]) -> None:
    context = open_context()
    context.decode(story[:20])
    assert not context.seq_remove(0, 10)
    assert not context.seq_remove(0, 0, 10)
    with pytest.raises(ic.UnsupportedFeatureError):
        context.eval([5], 3)
    context.decode_one(5)
    assert np.abs(context.logits() - cold([*story[:20], 5])).max() < context.tolerance
    assert context.seq_remove(0)
    context.decode(story[:6])
    assert np.array_equal(context.logits(), cold(story[:6]))


def test_state_is_saved_and_restored(open_context: Any, story: list[int]) -> None:
    context, other = open_context(n_seq_max=2), open_context(n_seq_max=2)
    context.decode(story[:20])
    context.decode(story[30:34], seq_id=1)
    other.decode([5, 6, 7])
    other.load_state(context.save_state())
    assert (other.tokens(0), other.tokens(1)) == (story[:20], story[30:34])
    other.load_sequence(1, context.save_sequence(0))
    rows = []
    for one, seq_id in ((context, 0), (other, 0), (other, 1)):
        one.decode_one(9, seq_id=seq_id)
        rows.append(one.logits().copy())
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


def test_any_sequence_goes_into_a_context_of_one(
    open_context: Any, cold: Any, story: list[int]
) -> None:
    context, other = open_context(n_seq_max=3), open_context()
    context.decode(story[:20], seq_id=2)
    other.decode([5, 6, 7])
    other.load_sequence(0, context.save_sequence(2))
    other.decode_one(9)
    assert np.allclose(other.logits(), cold([*story[:20], 9]), atol=other.tolerance)
    with pytest.raises(ic.SnapshotError):
        other.load_state(context.save_state())


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": -1},
        {"n": 2.5},
        {"n": []},
        {"n": 0},
        {"shapes": []},
        {"shapes": 3},
        "two",
        "twice",
        "nan",
    ],
)
def test_a_state_that_cannot_be_is_refused(open_context: Any, wrong: Any, story: list[int]) -> None:
    from infercore.engine import blob
    from infercore_openvino import state

    context = open_context()
    context.decode(story[:4])
    about, payload, row = blob.unpack(context.save_sequence(0))
    header, view = state.unpack(payload, {})
    data, (entry,) = np.frombuffer(view, np.float32).copy(), header["sequences"]
    if wrong == "nan":
        data[0] = np.nan
    elif wrong == "two":
        header["sequences"] = [entry, {**entry, "n": 0, "shapes": []}]
    elif wrong == "twice":
        header["sequences"], data = [entry, entry], np.concatenate([data, data])
    else:
        header["sequences"] = [{**entry, **wrong}]
    packed = blob.pack(dict(about), state.pack(header, [data.tobytes()]), bytes(row))
    with pytest.raises(ic.SnapshotError):
        context.load_sequence(0, packed)
    assert context.n_past() == 0


@pytest.mark.parametrize("value", [[1], {"a": 1}, "many", -1])
def test_an_odd_number_of_layers_is_that_of_the_graph(
    path: Path, tmp_path: Path, model: Any, value: Any
) -> None:
    folder = shutil.copytree(path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": value}))
    with ic.load_model(folder, backend="openvino", check_in_child=False) as odd:
        assert odd.info.n_embd == model.info.n_embd


def test_embeddings_threads_vectors_and_warmup(
    open_context: Any, cold: Any, story: list[int]
) -> None:
    context = open_context(embeddings=True, n_seq_max=2)
    context.decode(story[:8], logits="all")
    found = context.embeddings().copy()
    context.clear()
    context.decode_batch([(t, (i % 2,), True) for i, t in enumerate(story[:8])])
    assert context.embeddings().shape == found.shape
    context.clear()
    context.decode(story[:8])
    context.set_threads(1)
    context.warmup()
    context.decode(story[8:12])
    assert np.abs(context.logits() - cold(story[:12])).max() < context.tolerance
    context.decode_spans([(0, np.zeros((2, context._layers[1])), "last")])
    assert context.n_past() == 14


def test_rows_of_numbers_go_to_their_own_sequence(
    open_context: Any, cold: Any, path: Path, story: list[int]
) -> None:
    table = embedding_table(path)
    context = open_context(n_seq_max=3, n_ubatch=4)
    context.decode(story[:5], seq_id=1)
    context.decode_spans([(1, table[story[5:12]], "last"), (2, table[story[20:23]], "last")])
    for i, tokens in enumerate((story[:12], story[20:23])):
        assert np.abs(context.logits(i) - cold(tokens)).max() < context.tolerance
    for seq_id, tokens in ((1, story[:14]), (2, [*story[20:23], *story[12:14]])):
        context.decode(story[12:14], seq_id=seq_id)
        assert np.abs(context.logits() - cold(tokens)).max() < context.tolerance


def embedding_table(path: Path) -> Any:
    """Return the table that the graph looks tokens up in."""
    import openvino as ov

    for node in ov.Core().read_model(path / "openvino_model.xml").get_ordered_ops():
        if node.get_type_name() == "Gather":
            source = node.input_value(0).get_node()
            while source.get_type_name() == "Convert":
                source = source.input_value(0).get_node()
            if source.get_type_name() == "Constant" and len(source.get_output_shape(0)) == 2:
                return np.array(source.data, dtype=np.float32)
    raise AssertionError("no table")


def test_sessions_stay_right_where_nothing_can_be_taken_back(model: Any) -> None:
    with model.new_session(**EXACT, n_ctx=256) as session, model.new_session(**EXACT) as fresh:
        text = "Once upon a time there was a baker"
        session.ensure_prefix(text)
        session.prefill_suffix(" named Mira")
        first = "".join(c.text for c in session.decode(max_tokens=8, temperature=0))
        session.prefill_suffix(" and a fox")
        other = "".join(c.text for c in session.decode(max_tokens=8, temperature=0))
        twin = session.fork()
        twin.close()
        assert fresh.generate(text + " named Mira", max_tokens=8, temperature=0) == first
        assert fresh.generate(text + " and a fox", max_tokens=8, temperature=0) == other


def test_a_pool_of_them(model: Any) -> None:
    texts = ["Once upon a time", "The miller", "A short tale"]
    with model.new_session(**EXACT, n_ctx=128) as session:
        alone = [session.generate(text, max_tokens=6, temperature=0) for text in texts]
    with model.new_pool(**EXACT, n_ctx=128, n_parallel=2) as pool:
        sessions = [pool.open_session() for _ in texts]
        found = [
            session.generate(text, max_tokens=6, temperature=0)
            for session, text in zip(sessions, texts, strict=True)
        ]
    assert found == alone


def test_a_graph_that_does_not_go_on_is_refused(path: Path, tmp_path: Path) -> None:
    """Without its variables' part in the convolution a text in pieces is another text."""
    import openvino as ov
    from openvino import opset13 as op

    model = ov.Core().read_model(path / "openvino_model.xml")
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ReadValue":
            users = list(node.output(0).get_target_inputs())
            nothing = op.multiply(node, op.constant(np.float32(0))).output(0)
            for user in users:
                user.replace_source_output(nothing)
    folder = shutil.copytree(path, tmp_path / "model")
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    with (
        ic.load_model(folder, backend="openvino") as broken,
        pytest.raises(ic.UnsupportedFeatureError, match="in pieces"),
    ):
        broken.new_context(**EXACT, n_ctx=64)


def test_other_names_of_states_do_as_well(path: Path, tmp_path: Path, cold: Any) -> None:
    folder = shutil.copytree(path, tmp_path / "model")
    xml = folder / "openvino_model.xml"
    xml.write_text(re.sub(r"cache_params\.past\.ssm", "whatever", xml.read_text()))
    with ic.load_model(folder, backend="openvino") as model:
        assert model.info.is_recurrent
        with model.new_context(**EXACT, n_ctx=64) as context:
            context.decode([5, 6, 7])
            assert np.array_equal(context.logits(), cold([5, 6, 7]))


def test_a_plan_has_no_keys_where_there_are_none(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    found = json.loads(config.read_text())
    config.write_text(json.dumps({**found, "num_attention_heads": 4}))
    pack.need_backend("openvino")
    plan = ic.plan_memory(tmp_path / "model", backend="openvino", n_ctx=64)
    assert set(plan.kv_bytes_by_kind) == {"recurrent"}
    with ic.load_model(tmp_path / "model", backend="openvino") as model:
        assert (model.info.is_recurrent, model.info.is_hybrid) == (True, False)
