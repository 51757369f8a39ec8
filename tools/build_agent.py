"""Builds the agent of the model pack anew: corpus, tokenizer, training, formats, golden outputs.

    python tools/build_agent.py --work DIR

Needs what ``tools/requirements-model-pack.txt`` lists. A step whose result is in DIR already is not
done again. The package's data of the agent are replaced as a whole at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from model_pack import agent, agent_corpus, export, golden

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "models" / "src" / "infercore_models" / "data" / "agent"
N_CHATS, CORPUS_SEED = 20_000, 11
N_HELD_OUT, HELD_OUT_SEED = 100, 12
N_TOKENS = 6_500_000


def build_hf(work: Path, n_tokens: int) -> Path:
    """Tokenizer and trained weights, as transformers reads them."""
    folder, partial = work / "hf", work / "hf.partial"
    if folder.is_dir():
        return folder
    shutil.rmtree(partial, ignore_errors=True)
    texts = list(agent.rendered(agent_corpus.chats(N_CHATS, CORPUS_SEED)))
    bpe = agent.train_bpe(texts)
    agent.wrap(bpe).save_pretrained(partial)
    model = agent.new_model(bpe)
    loss = agent.train(model, [agent.as_row(bpe, text) for text in texts], n_tokens)
    model.eval().save_pretrained(partial, safe_serialization=True)
    others = agent.rendered(agent_corpus.chats(N_HELD_OUT, HELD_OUT_SEED))
    report = {
        "n_parameters": sum(p.numel() for p in model.parameters()),
        "n_training_tokens": n_tokens,
        "training_loss": loss,
        "held_out_loss": agent.held_out_loss(model, [agent.as_row(bpe, text) for text in others]),
    }
    (work / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    return partial.rename(folder)


def build_formats(work: Path, hf: Path) -> None:
    """Both GGUF files and the OpenVINO folder."""
    sources = export.fetch_llama_cpp(work)
    for kind in ("f32", "q8_0"):
        target = work / f"agent-{kind}.gguf"
        if not target.is_file():
            export.to_gguf(sources, hf, target, kind, name="agent")
    if not (work / "openvino").is_dir():
        partial = work / "openvino.partial"
        shutil.rmtree(partial, ignore_errors=True)
        export.to_openvino(hf, partial)
        partial.rename(work / "openvino")


def build_golden(work: Path, hf: Path) -> None:
    """Golden outputs, and how clear the choice was at each greedy step."""
    if (work / "golden.npz").is_file():
        return
    gaps = golden.write(hf, work / "golden.npz", agent.golden_prompts)
    (work / "gaps.json").write_text(json.dumps(golden.gap_statistics(gaps), indent=1) + "\n")


def install(work: Path) -> None:
    """Replace the package's data of this model."""
    new = TARGET.with_name(".agent.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name in ("hf", "openvino"):
        shutil.copytree(work / name, new / name)
    for name in ("agent-f32.gguf", "agent-q8_0.gguf", "golden.npz"):
        shutil.copy(work / name, new / name)
    for file in new.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    shutil.rmtree(TARGET, ignore_errors=True)
    new.rename(TARGET)


def build(work: Path, n_tokens: int = N_TOKENS) -> None:
    """Do all of it; the threads are the caller's to choose."""
    work.mkdir(parents=True, exist_ok=True)
    hf = build_hf(work, n_tokens)
    build_formats(work, hf)
    build_golden(work, hf)
    install(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--work", type=Path, required=True, help="folder for results of each step")
    parser.add_argument("--tokens", type=int, default=N_TOKENS, help="how many tokens to train on")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # more would sum in another order
    build(arguments.work, arguments.tokens)


if __name__ == "__main__":
    main()
