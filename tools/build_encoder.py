"""Builds the encoder of the model pack anew: tokenizer, training, three formats, golden outputs.

    python tools/build_encoder.py --work DIR

Needs what ``tools/requirements-model-pack.txt`` lists. A step whose result is in DIR already is not
done again. The package's data of the encoder are replaced as a whole at the end.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from model_pack import corpus, encoder, export, golden_encoder

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "models" / "src" / "infercore_models" / "data" / "encoder"
CONVERTER = Path(__file__).parent / "model_pack" / "convert_encoder.py"
N_DOCUMENTS, CORPUS_SEED = 6_000, 3
N_STEPS = 1_200


def build_hf(work: Path, n_steps: int) -> Path:
    """Tokenizer and trained weights, as transformers reads them."""
    folder, partial = work / "hf", work / "hf.partial"
    if folder.is_dir():
        return folder
    shutil.rmtree(partial, ignore_errors=True)
    documents = list(corpus.documents(N_DOCUMENTS, CORPUS_SEED))
    wordpiece = encoder.train_wordpiece(documents)
    encoder.save(encoder.train(wordpiece, documents, n_steps), wordpiece, partial)
    return partial.rename(folder)


def build_formats(work: Path, hf: Path) -> None:
    """The GGUF file and the OpenVINO folder."""
    sources, gguf = export.fetch_llama_cpp(work), work / "encoder-f32.gguf"
    if not gguf.is_file():
        options = ["--outtype", "f32", "--outfile", str(gguf), "--model-name", "encoder"]
        command = [sys.executable, str(CONVERTER), str(sources), str(hf), *options]
        subprocess.run(command, check=True)
    if not (work / "openvino").is_dir():
        partial = work / "openvino.partial"
        shutil.rmtree(partial, ignore_errors=True)
        to_openvino(hf, partial)
        partial.rename(work / "openvino")


def to_openvino(source: Path, target: Path) -> None:
    """Write a float32 IR that gives hidden states, and the files that say how to pool them."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    main_export(
        str(source),
        target,
        task="feature-extraction",
        library_name="transformers",
        ov_config=OVConfig(dtype="fp32"),
    )
    shutil.copy(source / "modules.json", target)
    shutil.copytree(source / "1_Pooling", target / "1_Pooling", dirs_exist_ok=True)


def install(work: Path) -> None:
    """Replace the package's data of this model."""
    new = TARGET.with_name(".encoder.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name in ("hf", "openvino"):
        shutil.copytree(work / name, new / name)
    for name in ("encoder-f32.gguf", "golden.npz"):
        shutil.copy(work / name, new / name)
    for file in new.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    shutil.rmtree(TARGET, ignore_errors=True)
    new.rename(TARGET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--work", type=Path, required=True, help="folder for results of each step")
    parser.add_argument("--steps", type=int, default=N_STEPS, help="how many batches to train on")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    hf = build_hf(work, arguments.steps)
    build_formats(work, hf)
    golden_encoder.write(hf, work / "golden.npz")
    install(work)


if __name__ == "__main__":
    main()
