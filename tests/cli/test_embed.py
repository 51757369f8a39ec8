"""``infercore embed`` prints the vectors that the library gives."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

import infercore
import pack
from infercore.cli.app import main

TEXTS = ["Mira is a baker.", "Tom lives near the old mill."]


@pytest.fixture(params=[("llamacpp", "gguf-f32"), ("openvino", "openvino")])
def encoder(request) -> str:
    backend, kind = request.param
    pack.need_backend(backend)
    pack.need_pack()
    import infercore_models

    return str(infercore_models.path("encoder", kind))


def test_lines_of_json(run, encoder) -> None:
    result = run("embed", encoder, *TEXTS)
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["number"], row["text"]) for row in rows] == list(enumerate(TEXTS))
    wanted = infercore.embed(encoder, TEXTS)
    np.testing.assert_allclose([row["embedding"] for row in rows], wanted, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm([row["embedding"] for row in rows], axis=1), 1, 1e-5)


def test_lines_of_a_pipe_and_of_a_file(encoder, tmp_path) -> None:
    file = tmp_path / "texts.txt"
    file.write_bytes("\r\n".join(TEXTS).encode())
    piped = CliRunner().invoke(main, ["embed", encoder], input="\n".join(TEXTS) + "\n")
    filed = CliRunner().invoke(main, ["embed", encoder, "--file", str(file)])
    assert piped.exit_code == 0
    assert piped.stdout == filed.stdout
    assert piped.stdout.count("\n") == 2


def test_array_in_a_file(run, encoder, tmp_path) -> None:
    file = tmp_path / "vectors.npy"
    result = run("embed", encoder, *TEXTS, "--output", str(file), "--no-normalize")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "wrote float32 [2, " in result.stderr
    vectors = np.load(file)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, infercore.embed(encoder, TEXTS, normalize=False), atol=1e-6)
    told = json.loads(run("embed", encoder, *TEXTS, "--output", str(file), "--json").stdout)
    assert (told["shape"], told["output"]) == (list(vectors.shape), str(file))


def test_array_that_cannot_be_written_keeps_the_older_one(run, engine, tmp_path) -> None:
    file = tmp_path / "no" / "v.npy"
    start = ("embed", engine.path, "--backend", engine.name, "--pooling", "mean", "a")
    result = run(*start, "--output", str(file))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")


def test_fields_of_the_context_reach_it(run, encoder) -> None:
    told = run("embed", encoder, *TEXTS, "--threads", "1", "--json")
    assert told.exit_code == 0, told.stderr
    assert json.loads(told.stdout)["shape"][0] == 2
    refused = run("embed", encoder, *TEXTS, "--threads", "0")
    assert (refused.exit_code, "--n-threads" in refused.stderr) == (2, True)
    refused = run("embed", encoder, *TEXTS, "--lora", "none.gguf")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert run("embed", encoder, *TEXTS, "--n-ctx", "64").exit_code == 2  # the texts decide
    ranked = run("embed", encoder, *TEXTS, "--pooling", "rank")
    assert (ranked.exit_code, "no head that ranks" in ranked.stderr) == (1, True)


def test_pooling(run, engine) -> None:
    start = ("embed", engine.path, "--backend", engine.name, *TEXTS, "--json")
    refused = run(*start)
    assert (refused.exit_code, "pooling" in refused.stderr) == (1, True)
    mean, last = (json.loads(run(*start, "--pooling", kind).stdout) for kind in ("mean", "last"))
    assert mean["shape"] == last["shape"] == [2, 128]
    assert mean["embeddings"] != last["embeddings"]
    assert run(*start, "--pooling", "odd").exit_code == 2
