"""Bad input is a typed error that says what to do; the process lives, and nothing is lost."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def one_line(error: BaseException) -> str:
    text = str(error)
    assert len(text) > 20
    return text


def test_a_missing_file(backend_name: str, tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", str(tmp_path / "none"), ""):
        with pytest.raises(ic.ModelNotFoundError) as caught:
            ic.load_model(path, backend=backend_name)
        assert caught.value.path == str(path)
        assert "check the path" in one_line(caught.value)


def test_an_unknown_backend(pack_path: Path) -> None:
    with pytest.raises(ic.BackendNotFoundError) as caught:
        ic.load_model(pack_path, backend="lamacpp")
    assert caught.value.name == "lamacpp"
    assert "llamacpp" in caught.value.candidates
    assert "did you mean 'llamacpp'" in one_line(caught.value)


def test_an_unknown_field_names_the_nearest(model: Any, backend_name: str, pack_path: Path) -> None:
    with pytest.raises(ic.InvalidInputError, match="did you mean 'n_gpu_layers'"):
        ic.load_model(pack_path, backend=backend_name, n_gpu_layer=0)
    with pytest.raises(ic.InvalidInputError, match="did you mean 'n_ctx'"):
        model.new_context(n_ctxx=5)
    with model.new_session(n_ctx=64) as session:
        session.ensure_prefix("a")
        with pytest.raises(ic.InvalidInputError, match="did you mean 'max_tokens'"):
            session.decode(max_token=5)


def test_an_unknown_option_of_the_engine(model: Any, backend_name: str, pack_path: Path) -> None:
    with pytest.raises(ic.InvalidInputError, match="unknown option 'warp'"):
        ic.load_model(pack_path, backend=backend_name, backend_options={"warp": 1})
    with pytest.raises(ic.InvalidInputError, match="unknown option 'warp'"):
        model.new_context(backend_options={"warp": 1})


@pytest.mark.parametrize("n_ctx", [-1, 2**40, 1.5, "8", True])
def test_a_window_that_cannot_be(model: Any, n_ctx: object) -> None:
    with pytest.raises(ic.InvalidInputError) as caught:
        model.new_context(n_ctx=n_ctx)
    assert caught.value.field == "n_ctx"


def test_a_prompt_longer_than_the_window(session: Any, story: str) -> None:
    session.ensure_prefix("Once upon a time")
    before = session.explain_context()
    with pytest.raises(ic.ContextOverflowError) as caught:
        session.ensure_prefix(story * 3)
    assert (caught.value.stage, caught.value.n_ctx) == ("prefix", 1024)
    assert caught.value.resident_tokens + caught.value.additional_tokens > 1024
    with pytest.raises(ic.ContextOverflowError) as caught:
        session.prefill_suffix(story * 3)
    assert caught.value.stage == "suffix"
    assert session.explain_context() == before
    assert session.generate("!", max_tokens=3, temperature=0)


def test_a_window_that_the_engine_pads_is_the_one_asked_for(new_session: Any) -> None:
    session = new_session(n_ctx=100)
    assert session.explain_context().n_ctx == 100
    with pytest.raises(ic.ContextOverflowError) as caught:
        session.context.decode([5] * 101)
    assert caught.value.n_ctx == 100
    session.context.decode([5] * 100)
    with pytest.raises(ic.ContextOverflowError):
        session.context.decode_one(5)


@pytest.mark.parametrize("text", ["\ud800", 5, None, b"bytes", ["list"]])
def test_text_that_is_none(session: Any, text: Any) -> None:
    with pytest.raises(ic.InvalidInputError):
        session.ensure_prefix(text)
    assert session.state == "EMPTY"


@pytest.mark.parametrize(
    "text", ["", "\0", "a\0b", "🙂" * 50, "\u202eאבג", "e\u0301", "<|im_end|>", " " * 200, "\ufeff"]
)
def test_odd_text_goes_in_and_comes_back(model: Any, session: Any, text: str) -> None:
    tokens = model.tokenizer.encode(text, add_special=False, parse_special=False)
    assert model.tokenizer.decode(tokens) == text
    session.ensure_prefix(text)
    session.prefill_suffix(text)
    assert isinstance(session.generate(text, max_tokens=3), str)


BAD_TOKENS = [-1, 10**6, 2**31, 2**70, 1.5, "a", None, True]


@pytest.mark.parametrize("token", BAD_TOKENS)
def test_a_token_that_is_none(model: Any, new_context: Any, token: Any) -> None:
    context = new_context(n_ctx=64)
    context.decode([5, 6, 7])
    for call in (
        lambda: context.decode([5, token]),
        lambda: context.decode_one(token),
        lambda: context.eval([token], 2),
        lambda: model.tokenizer.decode([token]),
        lambda: model.tokenizer.token_bytes(token),
        lambda: model.tokenizer.is_eog(token),
    ):
        with pytest.raises(ic.InvalidTokenError):
            call()
    assert context.tokens() == [5, 6, 7]
    assert context.logits() is not None


def test_calls_out_of_order(session: Any) -> None:
    for call in (lambda: session.prefill_suffix("x"), lambda: session.decode()):
        with pytest.raises(ic.InvalidStateError) as caught:
            call()
        assert caught.value.state == "EMPTY"
    with pytest.raises(ic.OutputNotAvailableError):
        session.context.logits()


def test_use_after_close(backend_name: str, pack_path: Path) -> None:
    model = ic.load_model(pack_path, backend=backend_name)
    session = model.new_session(n_ctx=64)
    sampler = model.new_sampler()
    context = session.context
    session.ensure_prefix("Once")
    model.close()
    assert session.generate(" upon", max_tokens=2, temperature=0)
    session.close()
    session.close()
    model.close()
    sampler.close()
    for call in (
        lambda: session.ensure_prefix("x"),
        lambda: context.decode([5]),
        lambda: context.logits(),
        lambda: model.new_context(),
        lambda: model.tokenizer.encode("x"),
        lambda: sampler.sample(context),
    ):
        with pytest.raises(ic.SessionClosedError):
            call()
    assert session.explain_context().closed


# -- files --------------------------------------------------------------------------------------


def damaged(backend_name: str, pack_path: Path, folder: Path, kind: str) -> Path:
    """Return the path of a model that was damaged in the way ``kind`` names."""
    if backend_name == "llamacpp":
        return damaged_gguf(pack_path, folder, kind)
    return damaged_ir(pack_path, folder, kind)


def damaged_gguf(pack_path: Path, folder: Path, kind: str) -> Path:
    target = folder / "model.gguf"
    data = pack_path.read_bytes()
    target.write_bytes(
        {
            "empty": b"",
            "text": b"this is a text file, not a model\n" * 100,
            "truncated weights": data[: len(data) // 2],
            "truncated header": data[:200],
            "corrupt header": data[:8] + b"\xff" * 64 + data[72:],
        }[kind]
    )
    return target


def damaged_ir(pack_path: Path, folder: Path, kind: str) -> Path:
    target = folder / "model"
    shutil.copytree(pack_path, target)
    weights, graph = target / "openvino_model.bin", target / "openvino_model.xml"
    if kind == "empty":
        graph.write_bytes(b"")
    elif kind == "text":
        graph.write_text("this is a text file, not a model\n")
    elif kind == "truncated weights":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif kind == "truncated header":
        graph.write_bytes(graph.read_bytes()[:5000])
    else:
        weights.unlink()
    return target


@pytest.mark.parametrize(
    "kind", ["empty", "text", "truncated weights", "truncated header", "corrupt header"]
)
def test_a_damaged_model(backend_name: str, pack_path: Path, tmp_path: Path, kind: str) -> None:
    path = damaged(backend_name, pack_path, tmp_path, kind)
    with pytest.raises(ic.ModelFormatError) as caught:
        ic.load_model(path, backend=backend_name)
    assert caught.value.path == str(path)
    assert str(tmp_path) in one_line(caught.value)


def test_a_file_of_another_kind_has_no_backend(backend_name: str, tmp_path: Path) -> None:
    del backend_name  # any engine being there is enough
    path = tmp_path / "notes.txt"
    path.write_text("no model")
    with pytest.raises(ic.BackendNotFoundError):
        ic.load_model(path)


@pytest.mark.parametrize("odd", [np.zeros(3), np.array(["a", "b"]), [np.zeros(2)]], ids=repr)
def test_arrays_whose_truth_is_none(model: Any, odd: Any) -> None:
    """An array answers `==`, `in` and `if` with an array, or not at all."""
    tokenizer, user = model.tokenizer, [{"role": "user", "content": "Hi"}]
    with model.new_session(n_ctx=64) as session, model.new_context(n_ctx=64) as context:
        session.ensure_prefix("a")
        context.decode([5])
        sampler = model.new_sampler(seed=1)
        calls: tuple[Callable[[], object], ...] = (
            lambda: ic.free_bytes(address_space=odd),
            lambda: tokenizer.encode_many(["a"], truncation=odd),
            lambda: tokenizer.apply_chat_template(user, tools=odd),
            lambda: tokenizer.apply_chat_template(user, add_generation_prompt=odd),
            lambda: context.save_sequence(0, note={"a": odd}),
            lambda: context.save_sequence(0, note=odd),
            lambda: sampler.observe([5], constrained=odd),
            lambda: list(session.chat(user, template_variables=odd)),
            lambda: list(session.decode(response_format={"type": odd})),
            lambda: list(session.decode(response_format={"type": odd, "pattern": "a"})),
        )
        for call in calls:
            with pytest.raises(ic.InferCoreError):
                call()
        assert list(session.decode(max_tokens=2))


def test_a_timeout_may_be_a_number_of_numpys(session: Any) -> None:
    session.ensure_prefix("Once upon a time", timeout=np.float32(100))  # a thread would complain
    assert list(session.decode(max_tokens=2, timeout=np.float32(100)))
