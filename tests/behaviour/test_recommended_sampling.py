"""What a model's files recommend for sampling: read on both engines, used in chats."""

from __future__ import annotations

import json
import shutil
import struct
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from click.testing import CliRunner

import infercore as ic
import pack
from infercore.cli.app import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MESSAGES = [{"role": "user", "content": "Where does Nadia live?"}]
STATED = {"temperature": 0.3, "top_k": 7, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.05}
ALIGNMENT = 32


def with_keys(source: Path, target: Path, keys: dict[str, float]) -> Path:
    """Write a copy of a GGUF file that has float ``keys`` more, tensors aligned as before."""
    data = source.read_bytes()
    magic, version, n_tensors, n_keys = struct.unpack_from("<4sIQQ", data)
    assert (magic, version) == (b"GGUF", 3)

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    block = b"".join(text(k.encode()) + struct.pack("<If", 6, v) for k, v in keys.items())
    filler = text(b"test.filler") + struct.pack("<I", 8)
    n_fill = -(len(block) + len(filler) + 8) % ALIGNMENT
    block += filler + text(b"x" * n_fill)
    head = struct.pack("<4sIQQ", magic, version, n_tensors, n_keys + len(keys) + 1)
    target.write_bytes(head + block + data[24:])
    return target


def with_json(source: Path, target: Path, more: dict[str, Any]) -> Path:
    """Copy the folder of an IR whose generation_config.json says ``more``."""
    shutil.copytree(source, target)
    file = target / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    return target


def stating(backend: str, folder: Path, **values: Any) -> Path:
    """Return a copy of the storyteller whose files recommend ``values``."""
    source = pack.model_path(backend)
    if backend == "llamacpp":
        names = {"temperature": "temp", "repeat_penalty": "penalty_repeat"}
        keys = {f"general.sampling.{names.get(k, k)}": float(v) for k, v in values.items()}
        return with_keys(source, folder / "stated.gguf", keys)
    names = {"repeat_penalty": "repetition_penalty"}
    return with_json(source, folder / "ir", {names.get(k, k): v for k, v in values.items()})


@pytest.fixture(scope="module")
def stated(
    backend_name: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Any]]:
    path = stating(backend_name, tmp_path_factory.mktemp("stated"), **STATED)
    with ic.load_model(path, backend=backend_name) as model:
        yield path, model


def last(chunks: Any) -> Any:
    return list(chunks)[-1].usage


def test_the_files_are_read(stated: Any, model: Any) -> None:
    found = dict(stated[1].info.sampling)
    found.pop("penalty_last_n", None)  # transformers' penalty looks back over the whole text
    assert found == pytest.approx(STATED)
    assert model.info.sampling == {}


def test_a_chat_follows_them_and_keywords_go_first(stated: Any) -> None:
    with stated[1].new_session(n_ctx=256) as session:
        used = last(session.chat(MESSAGES, max_tokens=2, top_k=3, seed=5)).sampling
        assert used.temperature == pytest.approx(0.3)
        assert (used.top_k, used.seed, used.typical_p) == (3, 5, 1.0)
        whole = ic.SamplingConfig(top_k=9)
        used = last(session.chat(MESSAGES, max_tokens=2, sampling=whole)).sampling
        assert attrs.evolve(used, seed=None) == whole  # an object is taken whole


def test_decode_and_generate_follow_them_only_where_that_is_asked(stated: Any) -> None:
    with stated[1].new_session(n_ctx=256) as session:
        session.ensure_prefix("Once upon a time")
        used = last(session.decode(max_tokens=2)).sampling
        assert attrs.evolve(used, seed=None) == ic.SamplingConfig()
        used = last(session.decode(ic.DecodeConfig(sampling="model", max_tokens=2))).sampling
        assert used.temperature == pytest.approx(0.3)
        used = last(session.decode(sampling="model", temperature=0.5, max_tokens=2)).sampling
        assert (used.temperature, used.top_k) == (0.5, 7)
        plain = session.generate(" there", max_tokens=8, seed=3, sampling="model")
        named = session.generate(" there", max_tokens=8, seed=3, **stated[1].info.sampling)
        assert plain == named


def test_what_was_in_force_draws_the_same_again(stated: Any) -> None:
    with stated[1].new_session(n_ctx=256) as session:
        chunks = list(session.chat(MESSAGES, max_tokens=12))
        again = list(session.chat(MESSAGES, max_tokens=12, sampling=chunks[-1].usage.sampling))
        assert "".join(c.text for c in again) == "".join(c.text for c in chunks)


def test_a_pool_and_the_command_line_follow_them(stated: Any) -> None:
    path, model = stated
    with model.new_pool(n_ctx=128, n_parallel=1) as pool, pool.open_session() as session:
        assert last(session.chat(MESSAGES, max_tokens=2)).sampling.top_k == 7
    for command in (("chat",), ("generate",), ("generate", "--chat")):
        arguments = [command[0], str(path), *command[1:], "--json", "-n", "2", "--n-ctx", "128"]
        done = CliRunner().invoke(main, [*arguments, "--min-p", "0.2"], input="Hello\n")
        assert done.exit_code == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])["usage"]["sampling"]
        assert (result["top_k"], result["min_p"]) == (7, 0.2)


def test_values_that_cannot_be_are_left_out_and_told(
    backend_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = stating(backend_name, tmp_path, temperature=-1.0, top_p=7.0, top_k=-1)
    with ic.load_model(path, backend=backend_name) as model:
        assert dict(model.info.sampling) == {"top_k": 0}
    assert sum("left out" in record.message for record in caplog.records) == 2


def test_the_packs_agent_recommends_greedy_text_in_each_format(backend_name: str) -> None:
    import infercore_models

    path = infercore_models.path("agent", pack.FORMATS[backend_name])
    with ic.load_model(path, backend=backend_name) as model:
        assert model.info.sampling["temperature"] == 0
