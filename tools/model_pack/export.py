"""Turns the transformers folder into GGUF and OpenVINO files, each with its official converter."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

LLAMA_CPP_PYTHON = "0.3.36"
CONVERTER = Path(__file__).with_name("convert_gguf.py")
NEEDED = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/")


def fetch_llama_cpp(work: Path) -> Path:
    """The converter's sources, out of a source distribution; nothing is compiled."""
    root = work / f"llama_cpp_python-{LLAMA_CPP_PYTHON}"
    vendor = root / "vendor" / "llama.cpp"
    if not vendor.is_dir():
        archive = _download(work, root.name)
        with tarfile.open(archive) as tar:
            prefix = f"{root.name}/vendor/llama.cpp/"
            wanted = tuple(prefix + name for name in NEEDED)
            members = [m for m in tar.getmembers() if m.name.startswith(wanted)]
            tar.extractall(work, members, filter="data")
    return vendor


def _download(work: Path, stem: str) -> Path:
    archive = work / f"{stem}.tar.gz"
    if not archive.is_file():
        requirement = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
        options = ["--no-binary", ":all:", "--no-deps", "--dest", str(work)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
    return archive


def to_gguf(
    llama_cpp: Path, source: Path, target: Path, kind: str, *, name: str = "storyteller"
) -> None:
    """Write one GGUF file; ``kind`` is the converter's name of the weight type."""
    options = ["--outtype", kind, "--outfile", str(target), "--model-name", name]
    subprocess.run(
        [sys.executable, str(CONVERTER), str(llama_cpp), str(source), *options], check=True
    )


def to_openvino(source: Path, target: Path) -> None:
    """Write a stateful float32 IR, its tokenizer and its detokenizer."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    main_export(
        str(source),
        target,
        task="text-generation-with-past",
        stateful=True,
        library_name="transformers",
        ov_config=OVConfig(dtype="fp32"),
        convert_tokenizer=True,
    )
