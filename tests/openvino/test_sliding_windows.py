"""Models in which some layers look back over a window only, in both forms of their graph."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
import pack
from infercore.conformance.oracle import Oracle
from infercore_openvino import conformance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WRITERS = {
    "known": conformance.a_decoder_that_slides,
    "unknown": conformance.a_decoder_whose_mask_the_engine_does_not_know,
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


def test_a_mask_that_paged_attention_does_not_know_keeps_its_window(
    folders: dict[str, str], load: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = load(folders["unknown"])
    assert "of 2 layers with a sliding window the engine keeps 0" in caplog.text
    assert not model.capabilities.multi_sequence
    with pytest.raises(ic.UnsupportedFeatureError) as caught:
        model.new_context(backend_options={"form": "paged"})
    assert caught.value.feature == "form"


@pytest.mark.parametrize(
    ("mask", "fields", "expected"),
    [
        ("unknown", {"layer_types": None}, (24, False)),  # the masks tell
        ("known", {"layer_types": None}, (24, True)),
        ("known", {"layer_types": None, "sliding_window": 100}, (100, True)),  # no mask has that
        ("known", {"use_sliding_window": False}, (None, True)),
        (
            "unknown",
            {"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": 16},
            (16, False),
        ),
        ("known", {"layer_types": ["sliding_attention"] * 3}, (24, False)),
    ],
)
def test_what_the_config_states(
    folders: dict[str, str],
    load: Callable[..., Any],
    tmp_path: Path,
    mask: str,
    fields: dict[str, Any],
    expected: tuple[int | None, bool],
) -> None:
    window, is_paged = expected
    model = load(_edit(folders[mask], tmp_path, **fields))
    assert model.info.sliding_window == window
    assert model.capabilities.multi_sequence is is_paged
    assert model.capabilities.kv_remove == ("any" if window is None else "suffix")


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
