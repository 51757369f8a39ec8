"""Each example does what it is there to show, on each engine that is here."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import infercore
import pack

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., str]

EXAMPLES = Path(__file__).parents[2] / "examples"
ROAD = (
    "stone bridge", "pine forest", "old mill", "market town", "glass lake", "Café Lumière",
    "grey harbour", "whale cave", "salt desert", "mountain gate", "snow pass", "dragon tower",
)  # fmt: skip
TURN = re.compile(r"^ *(\d+) +(\d+) +(\d+) +(\d+) +[\d.]+ ms  the (.+)$", re.MULTILINE)
BRANCH = re.compile(r"^  held (\d+), evaluated (\d+), (-[\d.]+): (.+)$", re.MULTILINE)
PLAN = re.compile(r"^plan: [1-9]\d+ B weights, [1-9]\d+ B KV, [1-9]\d+ B peak$", re.MULTILINE)


def test_agent_loop_reuses_its_prefix_at_every_warm_turn(run: Run, engine: str) -> None:
    printed = run(engine, "agent_loop.py")
    turns = TURN.findall(printed)
    assert [int(turn) for turn, *_ in turns] == list(range(1, 21))
    for number, prefix, reused, evaluated, place in turns:
        assert place == ROAD[int(number) % len(ROAD)]
        if number == "1":
            assert int(reused) == 0
        else:
            assert int(reused) > 0.9 * int(prefix)
            assert int(evaluated) < 20
    (times,) = re.findall(r": ([\d.]+) times less$", printed, re.MULTILINE)
    assert float(times) > 10


def test_structured_extraction_fits_the_schema(run: Run, engine: str) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance: pip install '.[constraints]'")
    rows = [re.split("  +", line) for line in run(engine, "structured_extraction.py").splitlines()]
    assert rows[1:5] == [
        ["Mira", "baker", "21", "eos"],
        ["Anton", "clockmaker", "28", "eos"],
        ["Nadia", "sailor", "35", "eos"],
        ["Felix", "shepherd", "70", "eos"],
    ]
    assert rows[5][0].startswith("refused: ")
    assert "#/properties/age" in rows[5][0]


def test_embeddings_search_finds_the_passage_of_the_same_hero(run: Run, engine: str) -> None:
    lines = run(engine, "embeddings_search.py").splitlines()
    assert len(lines) == 4 * 4
    for number, hero in enumerate(("Mira", "Anton", "Felix", "Nadia")):
        found = [line.split() for line in lines[4 * number + 1 : 4 * number + 4]]
        assert found[0][1] == f"{hero},"
        cosines = [float(words[0]) for words in found]
        assert cosines == sorted(cosines, reverse=True)
        assert 1 >= cosines[0] > cosines[1] + 0.1


def test_agent_calls_functions_until_it_answers(run: Run, engine: str) -> None:
    printed = run(engine, "agent.py")
    assert '    add(a=17, b=25)\n    -> {"sum": 42}\n' in printed
    assert printed.count("    road(place=") >= 2
    assert printed.count("?\n    (") == 4  # it thinks before it calls
    for answer in ("The sum is 42.", "The sum is 433.", "It leads to red bridge, 5 miles."):
        assert f"\n  {answer}\n" in printed
    assert re.search(r"\n[1-9]\d* tokens are held\n\Z", printed)


def test_rag_answers_from_the_right_document(run: Run, engine: str) -> None:
    lines = run(engine, "rag.py").splitlines()
    assert len(lines) == 3 * 4
    wanted = (("harbour", "Nadia"), ("sheep", "Felix"), ("bakers", "Mira"))
    homes = ("the grey harbour", "the snow pass", "the stone bridge")
    for number, ((name, hero), home) in enumerate(zip(wanted, homes, strict=True)):
        _, answer, best, other = lines[4 * number : 4 * number + 4]
        assert hero in answer
        assert home in answer
        assert best.startswith(f"  source: {name}.txt (0.")
        assert float(best[-5:-1]) > float(other[-5:-1])


def test_branching_pays_once_for_the_trunk(run: Run, engine: str) -> None:
    printed = run(engine, "branching.py")
    (trunk,) = re.findall(r"^trunk: (\d+) tokens evaluated once$", printed, re.MULTILINE)
    branches = BRANCH.findall(printed)
    assert len(branches) == 3
    assert {held for held, *_ in branches} == {trunk}
    assert all(int(evaluated) < 10 for _, evaluated, *_ in branches)
    texts = [text for *_, text in branches]
    assert len(set(texts)) == 3
    best = max(float(branch[2]) for branch in branches)  # as printed: some may be equal
    assert any(f"best: {text}" in printed for *_, mean, text in branches if float(mean) == best)
    assert printed.endswith("trunk goes on undisturbed: True\n")


@pytest.mark.parametrize("other", ["reference", "openvino"])
def test_switch_backends_gives_the_same_text(run: Run, engine: str, other: str) -> None:
    if other != "reference":
        pack.need_backend(other)
    printed = run(f"{engine},{other}", "switch_backends.py")
    names = re.findall(r"^(\w+) \(.+\)$", printed, re.MULTILINE)
    assert names == sorted({engine, other})
    if len(names) == 1:
        assert "only one engine is here" in printed
    else:
        assert printed.endswith("same text on all: True\n")
        greedy, drawn = (re.findall(rf"  {way}  (.+)", printed) for way in ("greedy", "seed 7"))
        assert len(set(greedy)) == len(set(drawn)) == 1
        assert greedy[0] != drawn[0]


def test_custom_sampler_forbids_a_letter_and_draws_by_hand(run: Run, engine: str) -> None:
    plain, without, by_hand, agree = run(engine, "custom_sampler.py").splitlines()
    assert "p" in plain.removeprefix("plain")
    assert "p" not in without.removeprefix("without p")
    assert "Nadia was very brave" in without
    assert by_hand.split("'", 1)[1] != plain.split("'", 1)[1]
    assert agree == "greedy by hand is the session's text: True"


def test_speculative_decoding_guesses_and_keeps_the_text(run: Run, engine: str) -> None:
    printed = run(engine, "speculative_decoding.py")
    rows = re.findall(r"^(\w+ ?\w+) +(\d+) +(\d+) +(\d+) +[\d.]+$", printed, re.MULTILINE)
    counts = {name.strip(): [int(count) for count in found] for name, *found in rows}
    assert counts["plain"] == [64, 0, 0]
    tokens, guessed, right = counts["prompt lookup"]
    assert tokens == 64
    assert 10 < right < guessed
    tokens, guessed, right = counts["draft model"]
    assert tokens == 64
    assert right == guessed > 40  # the draft is the model itself
    assert printed.endswith("same text in all ways: True\n")


def test_speculative_decoding_takes_a_draft(run: Run) -> None:
    pack.need_backend("llamacpp")
    import infercore_models

    paths = [str(infercore_models.path("storyteller", form)) for form in ("gguf-f32", "gguf-q8_0")]
    assert run("llamacpp", "speculative_decoding.py", *paths).endswith("in all ways: True\n")


def test_snapshot_to_disk_is_warm_in_another_process(run: Run, engine: str) -> None:
    saved, loaded, text, same = run(engine, "snapshot_to_disk.py").splitlines()
    (n_saved,) = re.findall(r"saved: (\d+) tokens", saved)
    assert loaded == f"loaded: {n_saved} reused, 0 evaluated"
    assert "🐑" in text
    assert same == "same text in both processes: True"


def test_gpu_offload_uses_what_is_there(run: Run, engine: str) -> None:
    if engine == "reference":
        pytest.skip("the reference backend plans nothing from a path and knows no devices")
    devices = infercore.get_backend(engine).info.devices
    printed = run(engine, "gpu_offload.py")
    for device in devices:
        assert f"{engine}: {device.name} ({device.kind}, " in printed
    assert PLAN.search(printed)
    has_gpu = any(device.kind in {"gpu", "igpu"} for device in devices)
    assert ("running on the CPU" in printed) is not has_gpu
    assert re.search(rf"^{engine} with .+: [1-9]\d* tokens/s\n\Z", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("free_mib", "layers"),
    [
        (0, 0),
        (512 + 64, 0),
        (512 + 64 + 10, 1),
        (512 + 64 + 59, 5),
        (512 + 64 + 330, 33),
        (9999, 33),
    ],
)
def test_gpu_offload_counts_the_layers_that_fit(free_mib: int, layers: int) -> None:
    plan = infercore.MemoryPlan(
        weights_bytes=297 * 2**20,
        kv_bytes=33 * 2**20,
        compute_bytes=64 * 2**20,
        peak_bytes=394 * 2**20,
        n_ctx=1024,
    )
    assert loaded("gpu_offload").layers_that_fit(plan, 32, free_mib * 2**20) == layers


@pytest.mark.parametrize(
    ("free_mib", "placements"),
    [
        (1024, {"llamacpp": [5, 3, 2, 1, 0], "openvino": ["GPU", "CPU"]}),
        (100, {"llamacpp": [0], "openvino": ["CPU"]}),
    ],
)
def test_gpu_offload_tries_the_gpu_first_and_the_cpu_last(
    backend_name: str, free_mib: int, placements: dict[str, list[Any]], monkeypatch: Any
) -> None:
    device = infercore.DeviceInfo(name="GPU", kind="gpu", memory_free_bytes=free_mib * 2**20)
    backend = types.SimpleNamespace(info=types.SimpleNamespace(devices=[device]))
    path = str(pack.model_path(backend_name))
    plan = infercore.plan_memory(path, n_ctx=1024, backend=backend_name)
    monkeypatch.setitem(vars(infercore), "get_backend", lambda name: backend)
    found = loaded("gpu_offload").placements(backend_name, path, plan)
    assert [value for placement in found for value in placement.values()] == placements[
        backend_name
    ]


def loaded(name: str) -> Any:
    """Return an example as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


def test_without_an_engine_an_example_says_what_to_install(run: Run) -> None:
    said = run("none", "agent_loop.py", fails=True)
    assert said == "no engine is installed; run: pip install ./plugins/openvino\n"


def test_an_example_takes_a_model(run: Run, engine: str, tmp_path: Path) -> None:
    import infercore_models

    form = {**pack.FORMATS, "reference": "hf"}[engine]
    path = str(infercore_models.path("storyteller", form))
    assert f"{engine} ({Path(path).name})" in run(engine, "switch_backends.py", path)
    assert "ModelNotFoundError" in run(engine, "agent_loop.py", str(tmp_path / "no"), fails=True)
