"""Models whose layers look over a window only, or by distance, in both forms of their graph."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
import pack
from infercore.conformance.oracle import Oracle
from infercore_openvino import conformance, sight
from infercore_openvino.sight import Sight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def _weigh_distance(model: Any) -> None:
    """Add to each head's mask its slope times the distance, as ALiBi does, counted in slots."""
    from openvino import opset13 as op

    mask, causal = (
        conformance._named(model, name) for name in ("aten::where/Select", "aten::le/LessEqual")
    )
    users = mask.output(0).get_target_inputs()
    distance = op.convert(op.subtract(causal.input_value(0), causal.input_value(1)), "f32")
    slopes = op.constant(np.array([0.5, 0.25, 0.1, 0.02], dtype=np.float32).reshape(1, 4, 1, 1))
    biased = op.add(mask, op.multiply(distance, slopes))
    for user in users:
        user.replace_source_output(biased.output(0))


@conformance._changed(conformance.MODEL)
def _a_decoder_that_weighs_distance(model: Any) -> None:
    _weigh_distance(model)


@conformance._changed(conformance.MODEL)
def _a_decoder_whose_attention_is_spelt_out(model: Any) -> None:
    """Compute attention by products and a softmax, with a bias in its mask."""
    from openvino import opset13 as op

    _weigh_distance(model)
    layers = [n for n in model.get_ordered_ops() if n.get_type_name() == sight.ATTENTION]
    for layer in layers:
        queries, keys, values, mask, scale = layer.input_values()[:5]
        scores = op.add(op.matmul(op.multiply(queries, scale), keys, False, True), mask)
        read = op.matmul(op.softmax(scores, 3), values, False, False).output(0)
        for user in layer.output(0).get_target_inputs():
            user.replace_source_output(read)


WRITERS = {
    "known": conformance.a_decoder_that_slides,
    "unknown": conformance.a_decoder_whose_mask_the_engine_does_not_know,
    "biased": _a_decoder_that_weighs_distance,
    "spelt out": _a_decoder_whose_attention_is_spelt_out,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return where models lie whose mask the engine's paged attention knows, and does not know."""
    pack.need_backend("openvino")
    return {name: write(str(tmp_path_factory.mktemp(name))) for name, write in WRITERS.items()}


@pytest.fixture
def load() -> Iterator[Callable[..., Any]]:
    models = []

    def load_one(path: str) -> Any:
        models.append(ic.load_model(path, backend="openvino"))
        return models[-1]

    yield load_one
    for model in models:
        model.close()


def _edit(folder: str, tmp_path: Path, **fields: Any) -> str:
    import shutil

    path = shutil.copytree(folder, tmp_path / "edited")
    config = json.loads((path / "config.json").read_text())
    found = {name: value for name, value in {**config, **fields}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(found))
    return str(path)


def _mask(*rows: list[float], dtype: Any = np.float32) -> Any:
    return np.array(rows, dtype=dtype)[None, None]


_NONE = -3.4e38
_PLAIN = _mask([0.0] * 7 + [_NONE], [0.0] * 8)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (_PLAIN, Sight()),
        (np.where(_PLAIN < 0, -np.inf, _PLAIN), Sight()),
        (np.where(_PLAIN < 0, -9984.0, _PLAIN), Sight()),  # -10,000 in bfloat16
        (_PLAIN == 0, Sight()),
        (_PLAIN + 1e-8 * np.arange(8), Sight()),  # noise
        (_mask([_NONE] * 4 + [0.0] * 3 + [_NONE], [_NONE] * 5 + [0.0] * 3), Sight(is_limited=True)),
        (_PLAIN + np.arange(8), Sight(is_biased=True)),
        (_PLAIN + 4000.0 * np.arange(8), Sight(is_biased=True)),  # far behind, by small steps
        (np.zeros((1, 1, 2, 8), np.float32), Sight(is_ordered=False)),
        (np.zeros((), np.float32), Sight(is_ordered=False)),
    ],
)
def test_what_a_mask_says(mask: Any, expected: Sight) -> None:
    assert sight._sight(mask) == expected


def test_attention_that_is_spelt_out_is_not_known(ov_path: Path, folders: dict[str, str]) -> None:
    from openvino import Core

    found = [
        sight.of_layers(Core(), Core().read_model(f"{folder}/openvino_model.xml"), 100)
        for folder in (ov_path, folders["spelt out"])
    ]
    assert found == [[Sight()] * 4, None]


@pytest.mark.parametrize(
    ("mask", "form"), [("known", "paged"), ("known", "stateful"), ("unknown", "stateful")]
)
def test_rows_are_those_of_the_window(
    folders: dict[str, str], load: Callable[..., Any], story: list[int], mask: str, form: str
) -> None:
    model, oracle = load(folders[mask]), Oracle.of_folder(f"{folders[mask]}/oracle")
    assert oracle is not None
    tokens = story[:200]
    with model.new_context(n_ctx=512, backend_options={"form": form}, **pack.EXACT) as context:
        context.decode(tokens, logits="all")
        assert np.abs(context.logits_all() - oracle.rows(tokens)).max() < conformance.TOLERANCE


@pytest.mark.parametrize(
    ("mask", "what"),
    [("unknown", "2 layers with a limited sight"), ("biased", "4 layers with a bias by distance")],
)
def test_a_mask_that_paged_attention_does_not_know_is_kept(
    folders: dict[str, str],
    load: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    mask: str,
    what: str,
) -> None:
    model = load(folders[mask])
    assert f"of {what} the engine keeps 0" in caplog.text
    assert not model.capabilities.multi_sequence
    for fields, feature in (
        ({"backend_options": {"form": "paged"}}, "form"),
        ({"attention_type": "non-causal"}, "attention_type"),
    ):
        with pytest.raises(ic.UnsupportedFeatureError) as caught:
            model.new_context(**fields)
        assert caught.value.feature == feature


@pytest.mark.parametrize(("mask", "form"), [("known", "paged"), ("unknown", "stateful")])
def test_where_no_mask_can_be_looked_at_a_stated_window_has_to_be_kept(
    folders: dict[str, str],
    load: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mask: str,
    form: str,
) -> None:
    monkeypatch.setattr(sight, "_rows_or_none", lambda *_: None)
    assert load(folders[mask]).capabilities.multi_sequence is (form == "paged")
    assert "cannot be looked at" in caplog.text


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": None},
        {"layer_types": None, "sliding_window": None},  # and some call it otherwise
        {"layer_types": None, "sliding_window": 100},
        {"use_sliding_window": False},
    ],
)
@pytest.mark.parametrize("mask", ["known", "unknown"])
def test_the_graph_says_what_its_layers_see(
    folders: dict[str, str],
    load: Callable[..., Any],
    tmp_path: Path,
    mask: str,
    fields: dict[str, Any],
) -> None:
    found = load(_edit(folders[mask], tmp_path, **fields)).capabilities
    assert found.multi_sequence is (mask == "known")
    assert found.kv_remove == "suffix"


@pytest.mark.parametrize("mask", WRITERS)
def test_turns_of_a_session_are_those_of_a_cold_one(
    folders: dict[str, str], load: Callable[..., Any], mask: str
) -> None:
    model = load(folders[mask])

    def turn(session: Any, text: str) -> str:
        session.prefill_suffix(text)
        return "".join(c.text for c in session.decode(max_tokens=12, temperature=0))

    prefix = "Once upon a time there was a girl who lived in a house by the sea with her old dog."
    texts = [" She liked to bake bread for the whole village", " One day", " Her dog said that"]
    with model.new_session(n_ctx=256, **pack.EXACT) as warm:
        warm.ensure_prefix(prefix)
        found = [turn(warm, text) for text in texts]
    for text, ours in zip(texts, found, strict=True):
        with model.new_session(n_ctx=256, **pack.EXACT) as cold:
            cold.ensure_prefix(prefix)
            assert ours == turn(cold, text)
