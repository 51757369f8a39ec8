"""Texts that memory has no room to tokenize: the engines end the process over them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("resource", reason="address space can be limited on Unix only")

CHILD = """
    import resource, sys
    import infercore as ic
    import psutil

    backend, path = sys.argv[1:]
    model = ic.load_model(path, backend=backend, check_in_child=False)
    tokenizer = model.tokenizer
    session = model.new_session(n_ctx=64, n_threads=1, n_threads_batch=1)
    tokenizer.encode("warm")
    session.ensure_prefix("Once upon a time")
    whole = 9 * 2**20
    units = ("ab ", "a", "\\u00e9", "\\U0001f600 x")
    texts = [unit * (whole // len(unit.encode())) for unit in units]
    now = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (now + 250 * 2**20, resource.RLIM_INFINITY))
    for text in texts:
        for call in (
            lambda: tokenizer.encode(text),
            lambda: tokenizer.encode(text, add_special=False, parse_special=False),
            lambda: session.generate(text),
            lambda: session.ensure_prefix(text),
            lambda: list(session.chat([{"role": "user", "content": text}])),
        ):
            try:
                call()
            except (ic.OutOfMemoryError, ic.UnsupportedFeatureError, ic.InvalidInputError) as error:
                print(type(error).__name__)
    session.ensure_prefix("Once upon a time")
    print(session.explain_context().resident_tokens, len(tokenizer.encode("ab " * 20_000)))
"""


def test_a_text_beyond_the_memory_is_refused(backend_name, pack_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), backend_name, str(pack_path)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    *names, last = done.stdout.splitlines()
    assert len(names) == 20
    assert names.count("OutOfMemoryError") >= 16
    assert int(last.split()[1]) >= 20_000
