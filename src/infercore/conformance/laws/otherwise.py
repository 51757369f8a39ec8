"""Other models than the rig's own, in the backend's format: what they are said to do, they do."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from infercore.conformance import registry, runner
from infercore.conformance.expect import LawError, that
from infercore.conformance.law import law
from infercore.conformance.laws.headers import compare_with_config
from infercore.conformance.report import FAIL

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig

HELD = (
    "CANCEL-1", "CANCEL-12", "CANCEL-14", "CANCEL-15", "CAP-1", "CAP-2", "DEC-1", "DEC-4", "DEC-11",
    "DEC-22", "DEC-24", "EMB-7", "KV-1", "KV-7", "KV-14", "KV-24", "KV-27", "KV-33", "KV-34",
    "MEM-2", "STATE-1", "STATE-4", "STATE-7",
)  # fmt: skip
"""What takes little time; some of it is for those with an oracle alone."""


@law("CAP-47", since="1.2")
def check_models_built_otherwise(rig: Rig) -> None:
    """Models that are built otherwise than the rig's own (`Rig.others`) keep the basic laws, too.

    In pieces and in batches, copied, moved, cut, saved and restored as far as they say they can;
    with the logits that an oracle computes, where one is written with them. Those in
    folders tell what their config says.
    """
    if not rig.others:
        rig.leave("the rig brings no other models")
    chosen = [each for each in registry.laws() if each.id in HELD and each.id not in rig.known]
    for write in rig.others:
        with tempfile.TemporaryDirectory() as folder:
            path = write(folder)
            other = with_model(rig, path, oracle=_oracle(folder, path))
            try:
                if "CAP-35" not in rig.known and (Path(path) / "config.json").is_file():
                    _compare_with_config(other.model, path, write.__name__)
                for each in chosen:
                    seed = rig.random.randrange(1000)
                    found = runner.run_law(each, other, seed=seed)
                    what = f"{write.__name__}: {each.id} with seed {seed}, {found.reason}"
                    that(found.outcome != FAIL, what)
            finally:
                other.close()


def _compare_with_config(model: Any, path: str, name: str) -> None:
    try:
        compare_with_config(model, Path(path))
    except LawError as error:
        message = f"{name}: {error}"
        raise LawError(message) from error


def with_model(rig: Rig, path: str, oracle: str | None = None) -> Rig:
    """Return the rig with another model, and nothing that belongs to its own."""
    return attrs.evolve(
        rig, open_model=partial(rig.open_at, path), path=path, model_name=None, oracle=oracle,
        golden=(), adapter=None, adapter_name=None, encoder=None, encoder_name=None, observe=None,
        narrow=None, known={}, others=(), child=None, n_ctx=128,
    )  # fmt: skip


def _oracle(folder: str, path: str) -> str:
    """Return where the oracle's weights lie: beside the model, or they are the model's own.

    Of a model in another format it makes nothing.
    """
    beside = Path(folder) / "oracle"
    return str(beside) if beside.is_dir() else path
