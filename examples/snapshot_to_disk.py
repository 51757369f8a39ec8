"""Save a warm session in one process, and go on in another.

Shows: `Session.save` writes tokens, KV cache and the last logits to a file, whole or not at all;
`Session.load` takes them up where model and options are the same, and evaluates nothing. The
program starts itself again for the second half.

Prints what was saved; then, from the other process, what was reused and the text; then whether
that is the text that the first process would have generated.

    python examples/snapshot_to_disk.py [MODEL]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import infercore as ic
from default_model import default_model

BEGINNING = """Once upon a time there was a shepherd named Felix, who lived near the snow pass. \
Felix was very careful, and even the birds knew it. His best friend was Greta, who never went \
anywhere without a black dog."""


def first(path: str, saved: Path) -> str:
    """Save a warm session, and return how it goes on."""
    with ic.load_model(path) as model, model.new_session(n_ctx=512) as session:
        status = session.ensure_prefix(BEGINNING)
        snapshot = session.save(saved)
        print(
            f"saved: {snapshot.resident_tokens} tokens, {snapshot.size_bytes / 1e6:.1f} MB, after "
            f"evaluating {status.prefilled_tokens}",
            flush=True,
        )
        return "".join(chunk.text for chunk in session.decode(max_tokens=32, temperature=0))


def second(path: str, saved: Path) -> str:
    """Go on from the file."""
    with ic.load_model(path) as model, model.new_session(n_ctx=512) as session:
        session.load(saved)
        status = session.ensure_prefix(BEGINNING)
        print(f"loaded: {status.reused_tokens} reused, {status.prefilled_tokens} evaluated")
        return "".join(chunk.text for chunk in session.decode(max_tokens=32, temperature=0))


def main() -> None:
    """Be the first process, or with a second argument the second one."""
    path = sys.argv[1] if len(sys.argv) > 1 else default_model()
    if len(sys.argv) > 2:  # noqa: PLR2004  (the second argument)
        print(f"text: {second(path, Path(sys.argv[2]))!r}")
        return
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "felix.session")
        text = first(path, saved)
        again = [sys.executable, __file__, path, str(saved)]
        done = subprocess.run(again, check=True, capture_output=True, text=True)  # noqa: S603
    print(done.stdout, end="")
    print("same text in both processes:", f"text: {text!r}" in done.stdout.splitlines())


if __name__ == "__main__":
    main()
