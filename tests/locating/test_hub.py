"""Models of the hub, from a server that speaks its protocol."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

import infercore as ic
import pack
from infercore.locating import hub as fetching
from infercore.locating import locate

REPO = "someone/story-GGUF"
Q4, Q8 = "story-Q4_K_M.gguf", "story-Q8_0.gguf"


@pytest.fixture
def repo(hub):
    hub.repos[REPO] = {
        Q4: b"GGUF four" * 50_000, Q8: b"GGUF eight" * 50_000, "README.md": b"# story",
        "mmproj-story-F16.gguf": b"eyes",
    }  # fmt: skip
    return hub.repos[REPO]


def held(path: str) -> bytes:
    return Path(path).read_bytes()


def test_a_quantization_is_fetched_once(hub, repo) -> None:
    path = locate(f"hf:{REPO}:Q8_0")
    assert held(path) == repo[Q8]
    n_requests = len(hub.requests)
    assert locate(f"hf:{REPO}:q8_0") == path
    assert len(hub.requests) == n_requests


def test_a_file_by_its_name(hub, repo) -> None:
    assert held(locate(f"hf:{REPO}:{Q8}")) == repo[Q8]


def test_without_a_name_the_usual_one(hub, repo) -> None:
    assert held(locate(f"hf:{REPO}")) == repo[Q4]


def test_without_a_name_what_is_here(hub, repo) -> None:
    path = locate(f"hf:{REPO}:Q8_0")
    assert locate(f"hf:{REPO}") == path
    assert hub.bodies(Q4) == []


def test_a_wrong_quantization_lists_what_is_there(hub, repo) -> None:
    with pytest.raises(ic.ModelNotFoundError, match=r"no model 'Q2_K'.*: Q4_K_M, Q8_0$") as caught:
        locate(f"hf:{REPO}:Q2_K")
    assert caught.value.path == f"hf:{REPO}:Q2_K"
    assert not any(hub.bodies(file) for file in repo)


def test_two_files_of_one_quantization_are_not_guessed(hub) -> None:
    hub.repos[REPO] = {"a-Q4_0.gguf": b"a", "b-Q4_0.gguf": b"b"}
    with pytest.raises(ic.ModelNotFoundError, match=r"several models.*a-Q4_0.gguf, b-Q4_0.gguf"):
        locate(f"hf:{REPO}:Q4_0")
    assert held(locate(f"hf:{REPO}:b-Q4_0.gguf")) == b"b"


def test_a_split_file_comes_whole(hub) -> None:
    parts = {f"big-Q8_0-0000{i}-of-00003.gguf": bytes([i]) * 1000 for i in (1, 2, 3)}
    hub.repos[REPO] = {f"Q8_0/{name}": data for name, data in parts.items()}
    path = locate(f"hf:{REPO}:Q8_0")
    assert os.path.basename(path) == "big-Q8_0-00001-of-00003.gguf"
    folder = Path(path).parent
    assert {name: (folder / name).read_bytes() for name in parts} == parts


def test_a_split_file_that_lacks_a_part_is_none(hub) -> None:
    hub.repos[REPO] = {"big-Q8_0-00001-of-00002.gguf": b"1"}
    with pytest.raises(ic.ModelNotFoundError, match="no GGUF file"):
        locate(f"hf:{REPO}")


def test_what_broke_off_between_parts_goes_on_there(hub) -> None:
    names = [f"big-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    hub.repos[REPO] = {name: b"GGUF" + name.encode() for name in names}
    hub.served[names[0]] = b"damaged"
    with pytest.raises(ic.ModelLoadError):
        locate(f"hf:{REPO}")
    hub.served.clear()
    assert held(locate(f"hf:{REPO}")) == hub.repos[REPO][names[0]]
    assert len(hub.bodies(names[1])) == 1


def test_a_connection_that_is_cut_resumes(hub, repo, monkeypatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.cuts[Q4] = [100_000, 50_000]
    assert held(locate(f"hf:{REPO}")) == repo[Q4]
    assert hub.bodies(Q4) == [None, "bytes=100000-", "bytes=150000-"]


@pytest.mark.parametrize("cut", [ConnectionResetError, "requests", "httpx"])
def test_a_cut_that_the_library_does_not_mend_resumes(hub, repo, monkeypatch, cut) -> None:
    if isinstance(cut, str):
        cut = type("Cut", (Exception,), {"__module__": f"{cut}.exceptions"})
    get, starts = fetching.transfer._get, []

    def cut_twice(library, url, file, most_bytes, bar, **fields) -> None:
        if url.endswith(Q4):
            starts.append(fields["resume_size"])
            if len(starts) < 3:
                file.write(repo[Q4][starts[-1] :][:1000])
                raise cut("peer closed connection")
        get(library, url, file, most_bytes, bar, **fields)

    monkeypatch.setattr(fetching.transfer, "_get", cut_twice)
    assert held(locate(f"hf:{REPO}")) == repo[Q4]
    assert starts == [0, 1000, 2000]


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(hub, repo) -> None:
    hub.served[Q4] = repo[Q4][::-1]
    with pytest.raises(ic.ModelLoadError, match="checksum is not the hub's"):
        locate(f"hf:{REPO}")
    assert not any(path.is_file() and path.stat().st_size > 1000 for path in cache().rglob("*"))
    hub.served.clear()
    assert held(locate(f"hf:{REPO}")) == repo[Q4]


def test_a_small_file_has_a_checksum_too(hub) -> None:
    hub.repos[REPO] = {"openvino_model.xml": b"<net/>", "openvino_model.bin": b"1"}
    hub.served["openvino_model.xml"] = b"<nit/>"
    with pytest.raises(ic.ModelLoadError, match=r"openvino_model.xml .*checksum"):
        locate(f"hf:{REPO}")


def cache() -> Path:
    import huggingface_hub

    return Path(huggingface_hub.constants.HF_HUB_CACHE)


def test_an_openvino_model_comes_with_its_tokenizer_alone(hub) -> None:
    wanted = {
        "openvino_model.xml": b"<net/>", "openvino_model.bin": b"weights", "config.json": b"{}",
        "openvino_tokenizer.xml": b"<t/>", "openvino_tokenizer.bin": b"t", "tokenizer.json": b"{}",
    }  # fmt: skip
    hub.repos[REPO] = {**wanted, "model.safetensors": b"x" * 999, "images/a.png": b"png"}
    folder = Path(locate(f"hf:{REPO}"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == wanted


def test_an_openvino_model_in_a_folder(hub) -> None:
    hub.repos[REPO] = {
        "int4/openvino_model.xml": b"<4/>", "int4/openvino_model.bin": b"4",
        "int8/openvino_model.xml": b"<8/>", "int8/openvino_model.bin": b"8",
    }  # fmt: skip
    folder = Path(locate(f"hf:{REPO}:int4"))
    assert (folder / "openvino_model.xml").read_bytes() == b"<4/>"
    with pytest.raises(ic.ModelNotFoundError, match="int4, int8"):
        locate(f"hf:{REPO}:int2")


def test_half_an_openvino_model_is_not_taken_from_the_cache(hub) -> None:
    hub.repos[REPO] = {"openvino_model.xml": b"<net/>", "openvino_model.bin": b"weights"}
    hub.served["openvino_model.bin"] = b"weighty"
    with pytest.raises(ic.ModelLoadError):
        locate(f"hf:{REPO}")
    hub.served.clear()
    folder = Path(locate(f"hf:{REPO}"))
    assert (folder / "openvino_model.bin").read_bytes() == b"weights"


def test_a_graph_without_its_weights_is_no_model(hub) -> None:
    hub.repos[REPO] = {"openvino_model.xml": b"<net/>", "config.json": b"{}"}
    with pytest.raises(ic.ModelNotFoundError, match=r"no GGUF file and no openvino_model.xml with"):
        locate(f"hf:{REPO}")


def test_a_file_of_another_size_is_refused(hub, repo) -> None:
    hub.served[Q4] = b"short"
    with pytest.raises(ic.ModelLoadError, match="damaged on the way"):
        locate(f"hf:{REPO}")


def test_a_file_that_goes_on_and_on_fills_no_disk(hub, repo, tmp_path) -> None:
    hub.served[Q4] = b"x" * 8_000_000
    with pytest.raises(ic.ModelLoadError, match="more came than"):
        locate(f"hf:{REPO}")
    assert sum(part.stat().st_size for part in tmp_path.rglob("*.incomplete")) <= len(repo[Q4])


SOUND = {"sha256": "a" * 64, "size": 5, "pointerSize": 130}


@pytest.mark.parametrize(
    ("says", "says_of_files"),
    [
        ({"sha": "../../../evil"}, {}),
        ({"sha": None}, {}),
        ({"sha": 5}, {}),
        ({"siblings": None}, {}),
        ({"siblings": 5}, {}),
        ({"siblings": [[1]]}, {}),
        ({"siblings": [{}]}, {}),
        ({}, {"lfs": [1]}),
        ({}, {"lfs": "x"}),
        ({}, {"lfs": {**SOUND, "size": "large"}}),
        ({}, {"lfs": {**SOUND, "size": None}}),
        ({}, {"lfs": {**SOUND, "size": -1}}),
        ({}, {"lfs": {**SOUND, "size": 2**63}}),
        ({}, {"lfs": {**SOUND, "sha256": "../../../evil"}}),
        ({}, {"lfs": {**SOUND, "sha256": 5}}),
        ({}, {"blobId": [1]}),
        ({}, {"blobId": None, "lfs": None}),
        ({}, {"blobId": "../../../evil", "lfs": None}),
        ({}, {"size": 2**63, "lfs": None}),
        ({"siblings": {"a": 1}}, {}),
        ({"siblings": [None]}, {}),
    ],
)
def test_an_answer_that_is_none_of_a_hub_is_refused(hub, repo, tmp_path, says, says_of_files):
    hub.says, hub.says_of_files = says, says_of_files
    with pytest.raises(ic.ModelLoadError, match="what the hub says about"):
        locate(f"hf:{REPO}")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "file",
    ["../../evil-Q4_K_M.gguf", "/evil-Q4_K_M.gguf", "a\0b.gguf", "..\\evil.gguf", 5, None, "",
     "\n.gguf", "\ud800.gguf", "x" * 5000 + ".gguf", "a//b.gguf"],
)  # fmt: skip
def test_a_file_that_has_no_name_of_a_file_is_left_out(hub, repo, tmp_path, file) -> None:
    hub.says_of_files = {"rfilename": file}
    with pytest.raises(ic.ModelLoadError):
        locate(f"hf:{REPO}")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_many_folders_of_a_repository_are_no_work(hub, repo) -> None:
    names = ("openvino_model.xml", "openvino_model.bin")
    told = {"blobId": "a" * 40, "size": 5}
    files = [{"rfilename": f"{i}/{name}", **told} for i in range(4000) for name in names]
    hub.says = {"siblings": files}
    with pytest.raises(ic.ModelNotFoundError, match="may be one of several"):
        locate(f"hf:{REPO}")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system with named pipes")
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_no_part_of_a_download_is_not_written_into(hub, repo, tmp_path, kind) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    path = Path(locate(f"hf:{REPO}:Q4_K_M")).resolve()
    path.unlink()
    part = path.with_name(path.name + ".incomplete")
    os.mkfifo(part) if kind == "pipe" else part.symlink_to(mine)
    with pytest.raises(ic.ModelLoadError, match="failed"):
        locate(f"hf:{REPO}:Q4_K_M")
    assert mine.read_bytes() == b"mine"


def test_a_mistake_of_the_program_is_not_the_hub_s(hub, repo, monkeypatch) -> None:
    monkeypatch.setattr(fetching, "variants", lambda _: 1 + "")
    with pytest.raises(TypeError):
        locate(f"hf:{REPO}")


def test_a_repository_without_a_model_says_so(hub) -> None:
    hub.repos[REPO] = {"model.safetensors": b"x"}
    with pytest.raises(ic.ModelNotFoundError, match=r"converted first.*get-a-model"):
        locate(f"hf:{REPO}")


def test_no_such_repository(hub) -> None:
    with pytest.raises(ic.ModelNotFoundError, match=r"no model nobody/nothing, or it is private"):
        locate("hf:nobody/nothing")


def test_a_gated_repository(hub, repo, monkeypatch) -> None:
    hub.gated.add(REPO)
    with pytest.raises(ic.ModelLoadError, match="accept its terms") as caught:
        locate(f"hf:{REPO}")
    assert f"{hub.url}/{REPO}" in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert held(locate(f"hf:{REPO}")) == repo[Q4]


def test_a_hub_that_is_down(hub, repo) -> None:
    hub.stop()
    with pytest.raises(ic.ModelLoadError, match="cannot be reached"):
        locate(f"hf:{REPO}")


def test_offline(hub, repo, monkeypatch) -> None:
    import huggingface_hub

    path = locate(f"hf:{REPO}:Q8_0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    n_requests = len(hub.requests)
    assert locate(f"hf:{REPO}:Q8_0") == path
    with pytest.raises(ic.ModelNotFoundError, match=r"the cache has: Q8_0.*HF_HUB_OFFLINE"):
        locate(f"hf:{REPO}:Q4_K_M")
    assert len(hub.requests) == n_requests


@pytest.mark.parametrize("name", ["hf:", "hf:story", "hf:a/b/c", "hf:a/b:", "hf:/b", "hf:a /b"])
def test_what_names_nothing(hub, name) -> None:
    with pytest.raises(ic.InvalidInputError, match="is not the name of a model on the hub"):
        locate(name)
    assert hub.requests == []


def test_an_update_takes_the_newer_one(hub, repo) -> None:
    older = locate(f"hf:{REPO}")
    hub.repos[REPO] = {Q4: b"GGUF newer"}
    assert locate(f"hf:{REPO}") == older
    newer = fetching.fetch(REPO, kinds=["gguf"], update=True)
    assert held(newer) == b"GGUF newer"
    assert locate(f"hf:{REPO}") == newer


def test_pulls_at_the_same_time_share_one_download(hub, repo) -> None:
    paths: list[str] = []
    threads = [threading.Thread(target=lambda: paths.append(locate(f"hf:{REPO}"))) for _ in "1234"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert held(paths[0]) == repo[Q4]
    assert len(set(paths)) == 1
    assert len(hub.bodies(Q4)) == 1


def test_a_full_disk(hub, repo, monkeypatch) -> None:
    import huggingface_hub

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub.file_download, "http_get", full)
    with pytest.raises(ic.ModelLoadError, match="no room"):
        locate(f"hf:{REPO}")


def test_without_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ic.UnsupportedFeatureError, match=r"pip install '\.\[hub\]'"):
        locate("hf:a/b")
    assert fetching.held() == []


def test_a_model_of_the_hub_is_opened_by_name(hub) -> None:
    pack.need_backend("llamacpp")
    path = pytest.importorskip("infercore_models").path("storyteller", "gguf-q8_0")
    hub.repos[REPO] = {"story-Q8_0.gguf": path.read_bytes()}
    with ic.open_session(f"hf:{REPO}", n_ctx=64) as session:
        assert session.generate("Once", max_tokens=2, temperature=0)
    with ic.open_pool(f"hf:{REPO}:Q8_0", n_ctx=64, n_parallel=1) as pool:
        assert pool.info.n_vocab
    assert ic.plan_memory(f"hf:{REPO}").total_bytes
    (one,) = fetching.held()
    assert (one.repo, one.variant.label) == (REPO, "Q8_0")
