"""Builds the storyteller's draft model: trained on the same corpus, with the same tokenizer.

    python tools/build_draft.py --work DIR

Needs what ``tools/requirements-model-pack.txt`` lists. A step whose result is in DIR already is not
done again. The package's data of the draft are replaced as a whole at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from model_pack import corpus, export, tokenizer, train
from model_pack.corpus import CORPUS_SEED, HELD_OUT_SEED, N_DOCUMENTS, N_HELD_OUT
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "models" / "src" / "infercore_models" / "data"
NAME = "storyteller-draft"
N_TOKENS = 2_000_000


def build_hf(work: Path, n_tokens: int) -> Path:
    """The storyteller's tokenizer and trained weights, as transformers reads them."""
    folder, partial = work / "hf", work / "hf.partial"
    if folder.is_dir():
        return folder
    shutil.rmtree(partial, ignore_errors=True)
    bpe = Tokenizer.from_file(str(DATA / "storyteller" / "hf" / "tokenizer.json"))
    tokenizer.save_tokenizer(bpe, partial, train.N_CTX)
    ids = train.pack(corpus.documents(N_DOCUMENTS, CORPUS_SEED), bpe)
    model = train.new_model(bpe, train.DRAFT)
    loss = train.train(model, ids, train.Schedule(n_tokens))
    train.save(model, partial)
    held_out = train.pack(corpus.documents(N_HELD_OUT, HELD_OUT_SEED), bpe)
    report = {
        "n_parameters": sum(p.numel() for p in model.parameters()),
        "n_training_tokens": n_tokens,
        "training_loss": loss,
        "held_out_loss": train.held_out_loss(model, held_out),
    }
    (work / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    return partial.rename(folder)


def build_formats(work: Path, hf: Path) -> None:
    """The GGUF file and the OpenVINO folder."""
    target = work / f"{NAME}-f32.gguf"
    if not target.is_file():
        export.to_gguf(export.fetch_llama_cpp(work), hf, target, "f32", name=NAME)
    if not (work / "openvino").is_dir():
        partial = work / "openvino.partial"
        shutil.rmtree(partial, ignore_errors=True)
        export.to_openvino(hf, partial)
        partial.rename(work / "openvino")


def install(work: Path) -> None:
    """Replace the package's data of the draft."""
    target = DATA / NAME
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(work / "openvino", target / "openvino")
    shutil.copy(work / f"{NAME}-f32.gguf", target)
    for file in target.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)


def build(work: Path, n_tokens: int = N_TOKENS) -> None:
    """All steps that are not done yet."""
    work.mkdir(parents=True, exist_ok=True)
    build_formats(work, build_hf(work, n_tokens))
    install(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--work", type=Path, required=True, help="folder for results of each step")
    parser.add_argument("--tokens", type=int, default=N_TOKENS, help="how many tokens to train on")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    build(arguments.work, arguments.tokens)


if __name__ == "__main__":
    main()
