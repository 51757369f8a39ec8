"""Files that are no models, and model configs that cannot be honoured."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys

import pytest

import infercore as ic
from llamacpp import random_gguf


def load(plugin_model, path, **fields):
    plugin_model.LlamaModel.load(str(path), ic.ModelConfig(**fields)).close()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "starts with b''"),
        (b"GG", "starts with b'GG'"),
        (b"GGUF\x03\0\0\0", "cannot load"),
        (b"hello, this is a text and no model", "starts with b'hello, t'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html>", "web page"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 64, "tensors"),
        (b"GGUF\x03\0\0\0" + b"\0" * 64, "holds no weights"),
    ],
)
def test_what_is_no_model_is_refused_with_the_reason(plugin_model, tmp_path, content, said):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ic.ModelFormatError) as caught:
        load(plugin_model, path)
    assert said in str(caught.value)
    assert caught.value.path == str(path)


def test_a_missing_file_and_a_directory(plugin_model, tmp_path):
    with pytest.raises(ic.ModelNotFoundError):
        load(plugin_model, tmp_path / "none.gguf")
    with pytest.raises(ic.ModelFormatError, match="directory"):
        load(plugin_model, tmp_path)


def test_a_truncated_file_says_so_with_the_engines_words(plugin_model, story_path, tmp_path):
    path = tmp_path / "short.gguf"
    path.write_bytes(story_path.read_bytes()[:300_000])
    with pytest.raises(ic.ModelFormatError, match="corrupted or incomplete") as caught:
        load(plugin_model, path)
    assert "llama.cpp said" in caught.value.__notes__[0]


def test_a_model_of_no_layers_is_refused_before_the_engine_sees_it(plugin_model, tmp_path):
    metadata, tensors = random_gguf._llama(random_gguf.np.random.default_rng(0))
    path = random_gguf.write_file(
        tmp_path / "zero.gguf", {**metadata, "llama.block_count": 0}, tensors
    )
    with pytest.raises(ic.ModelFormatError, match="block_count is 0"):
        load(plugin_model, path)


@pytest.fixture
def twice(story_path, tmp_path):
    """A file with two tokens of one text, which is an assertion in llama.cpp."""
    path = tmp_path / "twice.gguf"
    data = story_path.read_bytes()
    one, other = b"\x01\0\0\0\0\0\0\0A", b"\x01\0\0\0\0\0\0\0B"
    assert one in data
    path.write_bytes(data.replace(one, other, 1))
    return path


def test_a_file_that_ends_the_process_is_refused_by_its_header(plugin_model, twice):
    with pytest.raises(ic.ModelFormatError, match="the token b'B' 2 times"):
        load(plugin_model, twice)


def test_an_adapter_is_no_model(plugin_model, tmp_path):
    with pytest.raises(ic.ModelFormatError, match="it is an adapter"):
        load(plugin_model, random_gguf.write(tmp_path / "lora.gguf", "adapter"))


def test_progress_is_told_and_can_cancel(plugin_model, story_path):
    told = []
    load(plugin_model, story_path, progress=told.append)
    assert told[-1] == 1.0
    assert told == sorted(told)
    with pytest.raises(ic.ModelLoadError, match="cancelled"):
        load(plugin_model, story_path, progress=lambda _: False)


def test_what_progress_raises_is_raised(plugin_model, story_path):
    def fail(fraction):
        raise KeyError(fraction)

    with pytest.raises(KeyError):
        load(plugin_model, story_path, progress=fail)


@pytest.mark.parametrize(
    "fields",
    [
        {"n_gpu_layers": 4},
        {"split_mode": "layer"},
        {"main_gpu": 1},
        {"tensor_split": (1.0, 1.0)},
    ],
)
def test_gpu_fields_are_refused_without_a_gpu(plugin_model, story, story_path, fields):
    if story.traits.has_gpu:
        pytest.skip("there is a GPU here")
    with pytest.raises(ic.UnsupportedFeatureError):
        load(plugin_model, story_path, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"device": "CPU", "n_gpu_layers": 0, "split_mode": "none", "main_gpu": 0},
        {"use_mmap": False},
        {"use_mmap": True, "check_tensors": True},
        {"backend_options": {"use_extra_bufts": False, "no_host": True}},
    ],
)
def test_fields_that_can_be_honoured(plugin_model, story_path, fields):
    load(plugin_model, story_path, **fields)


def test_an_unknown_device_is_refused_with_the_known_ones(plugin_model, story_path):
    with pytest.raises(ic.InvalidInputError, match="CPU") as caught:
        load(plugin_model, story_path, device="TPU7")
    assert caught.value.field == "device"


def test_overrides_change_the_metadata_in_force(plugin_model, story_path):
    config = ic.ModelConfig(
        backend_options={"kv_overrides": {"tokenizer.ggml.add_bos_token": False}}
    )
    model = plugin_model.LlamaModel.load(str(story_path), config)
    assert not model.tokenizer.add_bos
    model.close()


@pytest.mark.parametrize(
    "overrides",
    [
        {"llama.block_count": 0},
        {"no.such.key": 1},
        {"llama.rope.freq_base": [1]},
        {"k" * 200: 1},
        {"general.name": "x" * 200},
        [("a", 1)],
    ],
)
def test_overrides_that_cannot_be_honoured(plugin_model, story_path, overrides):
    with pytest.raises(ic.InvalidInputError) as caught:
        load(plugin_model, story_path, backend_options={"kv_overrides": overrides})
    assert caught.value.field == "kv_overrides"


def test_info_and_files(story, story_path):
    info = story.info
    assert (info.architecture, info.n_layer, info.n_head, info.n_head_kv) == ("llama", 4, 4, 2)
    assert (info.n_ctx_train, info.n_embd, info.n_vocab) == (1024, 128, 1024)
    assert info.metadata["general.name"] == "storyteller"
    assert info.metadata["tokenizer.chat_template"] == story.tokenizer.chat_template
    assert info.sliding_window is None
    assert not info.has_encoder
    assert story.files == (str(story_path),)


def test_a_split_model_names_all_its_parts():
    from infercore_llamacpp import gguf

    assert gguf.parts("a/m-00002-of-00003.gguf") == (
        "a/m-00001-of-00003.gguf",
        "a/m-00002-of-00003.gguf",
        "a/m-00003-of-00003.gguf",
    )


def test_a_part_that_is_missing_is_named(plugin_model, story_path, tmp_path):
    first, second = (tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2))
    first.write_bytes(story_path.read_bytes())
    with pytest.raises(ic.ModelNotFoundError) as caught:
        load(plugin_model, first)
    assert caught.value.path == str(second)


def test_matching_scores(story_path, tmp_path):
    from infercore_llamacpp import gguf

    text = tmp_path / "text.gguf"
    text.write_text("no model")
    assert gguf.match(story_path) > gguf.match(text) > 0
    assert gguf.match(tmp_path / "missing.gguf") == gguf.match(text)
    assert gguf.match(tmp_path) == 0
    assert gguf.match(tmp_path / "missing.bin") == 0


def test_the_descriptor_imports_no_engine():
    code = (
        "import sys, infercore_llamacpp.plugin as p; d = p.infercore_backend(); "
        "assert d.name == 'llamacpp'; assert not {'llama_cpp', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_versions_and_layouts_that_do_not_fit_are_refused():
    from infercore_llamacpp import library, release

    release.check_version("0.3.36")
    release.check_version("0.3.99")
    for version in ("0.3.35", "0.2.90", "0.4.0", "1.0"):
        with pytest.raises(ic.BackendUnavailableError, match="is needed"):
            release.check_version(version)

    class Foreign:
        def llama_context_default_params(self):
            params = library.api.llama_context_default_params()
            params.n_seq_max = 77
            return params

    with pytest.raises(ic.BackendUnavailableError, match="n_seq_max reads 77"):
        library.check_layout(Foreign())


@pytest.mark.parametrize("kind", ["story", "sliding", "recurrent"])
def test_a_huge_window_is_planned_as_smaller_ones_are(story, tiny, kind, monkeypatch):
    model = story if kind == "story" else tiny(kind)
    config = ic.ContextConfig(
        n_ctx=9000, n_seq_max=2, swa_full=False if kind == "sliding" else None
    )
    laid_out = model.plan_memory(config)
    monkeypatch.setattr("infercore_llamacpp.plan._CELLS_TRIED", 2048)
    found = model.plan_memory(config)
    assert found.n_ctx == laid_out.n_ctx
    assert found.weights_bytes == laid_out.weights_bytes
    assert found.kv_bytes_by_kind.keys() == laid_out.kv_bytes_by_kind.keys()
    for name in ("kv_bytes", "compute_bytes", "peak_bytes"):
        ours, theirs = getattr(found, name), getattr(laid_out, name)
        assert theirs * 0.97 < ours < theirs * 1.05


def test_the_largest_window_is_planned_by_arithmetic(story):
    plan = story.plan_memory(ic.ContextConfig(n_ctx=2**31 - 1))
    assert plan.n_ctx == 2**31 - 1
    assert plan.kv_bytes == pytest.approx(2**31 * 4 * 2 * 2 * 32 * 2, rel=0.01)


def test_planned_memory_is_what_the_engine_lays_out(story, tiny):
    one = story.plan_memory(ic.ContextConfig(n_ctx=256))
    four = story.plan_memory(ic.ContextConfig(n_ctx=1024))
    assert one.weights_bytes == story.info.size_bytes
    assert one.kv_bytes == 256 * 4 * 2 * 2 * 32 * 2  # tokens, layers, K and V, heads, size, f16
    assert four.kv_bytes == 4 * one.kv_bytes
    assert one.compute_bytes > 0
    sliding = tiny("sliding").plan_memory(ic.ContextConfig(n_ctx=4096, swa_full=False))
    assert set(sliding.kv_bytes_by_kind) == {"full", "sliding"}
    recurrent = tiny("recurrent").plan_memory(ic.ContextConfig(n_ctx=4096))
    assert set(recurrent.kv_bytes_by_kind) == {"recurrent"}


def test_a_file_of_a_vocabulary_alone_says_so(tmp_path):
    metadata = {**random_gguf._metadata("llama"), "tokenizer.ggml.tokens": ["a", "b"]}
    path = random_gguf.write_file(tmp_path / "vocabulary.gguf", metadata, {})
    for look in (ic.load_model, ic.plan_memory):
        with pytest.raises(ic.ModelFormatError, match="holds a vocabulary and no weights"):
            look(path)


class Interrupted(logging.Handler):
    """Ctrl-C in the midst of a line of the engine's log."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def emit(self, _record):
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("at", [1, 5, 40])
def test_an_interruption_in_the_log_is_not_lost(plugin_model, story_path, monkeypatch, at):
    log = plugin_model.log
    freed, free = [], plugin_model.api.llama_model_free
    monkeypatch.setattr(
        plugin_model.api, "llama_model_free", lambda handle: (freed.append(handle), free(handle))
    )
    handler, hook, level = Interrupted(at), sys.unraisablehook, log.LOGGER.level
    log.LOGGER.addHandler(handler)
    log.LOGGER.setLevel(logging.DEBUG)
    # A shell's background jobs ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            load(plugin_model, story_path)
    finally:
        signal.signal(signal.SIGINT, before)
        log.LOGGER.removeHandler(handler)
        log.LOGGER.setLevel(level)
    assert len(freed) == 1
    assert sys.unraisablehook is hook
    load(plugin_model, story_path)  # nothing of it comes later


def test_weights_that_are_laid_out_anew_need_room_for_the_copies(
    plugin_model, story_path, monkeypatch
):
    asked = []
    loading = plugin_model.loading
    monkeypatch.setattr(loading, "check_addresses", lambda *room: asked.append(room))
    monkeypatch.setattr(loading.layout, "choose", lambda *_, **__: None)  # the engine does
    monkeypatch.setattr(loading, "_REPACKED", re.compile("model buffer size"))
    load(plugin_model, story_path)
    files, matrices = (str(story_path),), loading.matrix_bytes(str(story_path))
    assert asked == [(files,)]  # there is plenty
    monkeypatch.setattr(loading, "free_bytes", lambda: 2 * story_path.stat().st_size)
    load(plugin_model, story_path)
    assert asked[1:] == [(files,), ((),), (files, matrices)]  # the second: for the shape alone
    assert 0.5 * story_path.stat().st_size < matrices < story_path.stat().st_size


def test_stacks_of_threads_are_addresses_that_a_context_needs(story, monkeypatch):
    fields = {"n_ctx": 64, "n_batch": 32, "n_ubatch": 32, "n_threads": 1}
    plan = story.plan_memory(ic.ContextConfig(**fields, n_threads_batch=1))
    room, plenty = plan.kv_bytes + plan.compute_bytes, 2**34
    free = {True: room, False: plenty}
    module = sys.modules[type(story).__module__]
    monkeypatch.setattr(module, "free_bytes", lambda *, address_space=True: free[address_space])
    story.new_context(ic.ContextConfig(**fields, n_threads_batch=1)).close()
    with pytest.raises(ic.OutOfMemoryError, match="n_threads"):
        story.new_context(ic.ContextConfig(**fields, n_threads_batch=2))
    free[True] = room - 1
    with pytest.raises(ic.OutOfMemoryError, match="smaller n_ctx"):
        story.new_context(ic.ContextConfig(**fields, n_threads_batch=1))
    free[True] = free[False] = room  # of a container: stacks take no memory until they are used
    story.new_context(ic.ContextConfig(**fields, n_threads_batch=64)).close()
