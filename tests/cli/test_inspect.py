"""``infercore inspect`` tells what a real load found."""

from __future__ import annotations

import json

import infercore


def test_facts_are_those_of_the_model(run, engine) -> None:
    result = run("inspect", engine.path, "--backend", engine.name, "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    with infercore.load_model(engine.path, backend=engine.name) as model:
        assert (facts["backend"], facts["digest"]) == (engine.name, model.digest)
        assert facts["info"]["n_params"] == model.info.n_params
        assert facts["metadata"] == dict(model.info.metadata)
        assert facts["tokenizer"]["digest"] == model.tokenizer.digest
        assert facts["tokenizer"]["eot"] == {"id": model.tokenizer.eot, "text": "<|im_end|>"}
        assert facts["tokenizer"]["chat_template"] == model.tokenizer.chat_template
        assert facts["capabilities"]["kv_types"] == list(model.capabilities.kv_types)
    reads = {row["backend"]: row["reads"] for row in facts["readers"]}
    assert reads.pop(engine.name) == "yes"
    assert set(reads.values()) <= {"no"}


def test_tables(run, reference) -> None:
    result = run("inspect", reference.path)
    assert result.exit_code == 0, result.stderr
    for part in ("storyteller", "820352", "<|startoftext|>", "chat template", "kv_remove"):
        assert part in result.stdout
    assert "yes, " in result.stdout


def test_metadata_is_filtered_and_cut(run, engine) -> None:
    start = ("inspect", engine.path, "--backend", engine.name)
    found = json.loads(run(*start, "--json").stdout)["metadata"]
    key = min(found, default=None)
    none = run(*start, "--no-metadata", "--json")
    assert json.loads(none.stdout)["metadata"] == {}
    if key is not None:
        one = json.loads(run(*start, "--metadata", key, "--json").stdout)["metadata"]
        assert one == {key: found[key]}
    assert run(*start, "--metadata", "a", "--no-metadata").exit_code == 2


def test_file_that_nobody_here_reads_is_one_line(run, reference, monkeypatch, tmp_path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("INFERCORE_PLUGINS", "reference")
    from infercore.registry import default_registry

    default_registry().refresh()
    unnamed = run("inspect", str(file))
    named = run("inspect", str(file), "--backend", "nothing")
    for result in (unnamed, named):
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)


def test_no_backend_installed_names_the_commands(run, tmp_path, monkeypatch) -> None:
    from infercore.registry import Registry

    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr("infercore.api.default_registry", lambda: Registry(()))
    for arguments in (("inspect", str(file)), ("inspect", str(file), "--backend", "llamacpp")):
        result = run(*arguments)
        assert result.exit_code == 1
        assert "pip install ./plugins/llamacpp" in result.stderr
        assert result.stderr.count("\n") == 1


def test_missing_and_damaged_files(run, engine, tmp_path) -> None:
    missing = run("inspect", str(tmp_path / "none.gguf"))
    assert (missing.exit_code, missing.stderr.count("\n")) == (1, 1)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(20))
    refused = run("inspect", str(damaged), "--backend", engine.name)
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
