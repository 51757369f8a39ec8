"""Builds the storyteller, its draft and the agent anew: training, formats, golden outputs.

    python tools/build_model_pack.py --work DIR

Needs what ``tools/requirements-model-pack.txt`` lists. A step whose result is in DIR already is not
done again; delete the result to repeat it. The package's data is replaced as a whole at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import build_agent
import build_draft
import torch
from model_pack import corpus, export, golden, tokenizer, train
from model_pack.corpus import CORPUS_SEED, HELD_OUT_SEED, N_DOCUMENTS, N_HELD_OUT
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
PACKAGE_DATA = ROOT / "models" / "src" / "infercore_models" / "data"
N_TOKENS = 5_500_000


def build_hf(work: Path, n_tokens: int) -> Path:
    """Tokenizer and trained weights, as transformers reads them."""
    folder = work / "hf"
    if folder.is_dir():
        return folder
    partial = work / "hf.partial"
    shutil.rmtree(partial, ignore_errors=True)
    documents = list(corpus.documents(N_DOCUMENTS, CORPUS_SEED))
    bpe = tokenizer.train_bpe(documents)
    tokenizer.save_tokenizer(bpe, partial, train.N_CTX)
    report = _train(bpe, documents, partial, n_tokens)
    (work / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    return partial.rename(folder)


def _train(
    bpe: Tokenizer, documents: list[corpus.Document], folder: Path, n_tokens: int
) -> dict[str, float]:
    ids = train.pack(documents, bpe)
    model = train.new_model(bpe)
    loss = train.train(model, ids, train.Schedule(n_tokens))
    train.save(model, folder)
    held_out = train.pack(corpus.documents(N_HELD_OUT, HELD_OUT_SEED), bpe)
    return {
        "n_parameters": sum(p.numel() for p in model.parameters()),
        "n_corpus_tokens": len(ids),
        "n_training_tokens": n_tokens,
        "training_loss": loss,
        "held_out_loss": train.held_out_loss(model, held_out),
    }


def build_formats(work: Path, hf: Path) -> None:
    """Both GGUF files and the OpenVINO folder."""
    sources = export.fetch_llama_cpp(work)
    for kind in ("f32", "q8_0"):
        target = work / f"storyteller-{kind}.gguf"
        if not target.is_file():
            export.to_gguf(sources, hf, target, kind)
    if not (work / "openvino").is_dir():
        partial = work / "openvino.partial"
        shutil.rmtree(partial, ignore_errors=True)
        export.to_openvino(hf, partial)
        partial.rename(work / "openvino")


def build_golden(work: Path, hf: Path) -> None:
    """Golden outputs, and how clear the choice was at each greedy step."""
    if (work / "golden.npz").is_file():
        return
    gaps = golden.write(hf, work / "golden.npz")
    (work / "gaps.json").write_text(json.dumps(golden.gap_statistics(gaps), indent=1) + "\n")


def install(work: Path) -> None:
    """Replace the package's data of this model."""
    target, new, old = (PACKAGE_DATA / n for n in ("storyteller", ".new", ".old"))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name in ("hf", "openvino"):
        shutil.copytree(work / name, new / name)
    for name in ("storyteller-f32.gguf", "storyteller-q8_0.gguf", "golden.npz"):
        shutil.copy(work / name, new / name)
    for file in new.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--work", type=Path, required=True, help="folder for results of each step")
    parser.add_argument("--tokens", type=int, default=N_TOKENS, help="how many tokens to train on")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    hf = build_hf(work, arguments.tokens)
    build_formats(work, hf)
    build_golden(work, hf)
    install(work)
    torch.set_num_threads(1)
    build_draft.build(work / "draft")
    build_agent.build(work / "agent")


if __name__ == "__main__":
    main()
