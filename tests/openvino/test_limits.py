"""A limit of address space: the engine may compute wrong values without an error."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import pack

pytest.importorskip("resource", reason="address space can be limited on Unix only")

CHILD = """
    import random, resource, sys
    import numpy as np, psutil, infercore as ic

    rng = random.Random(int(sys.argv[2]))
    model, other = (ic.load_model(sys.argv[1], backend="openvino") for _ in range(2))
    context, oracle = (each.new_context(n_ctx=640, n_threads=1) for each in (model, other))
    given = [[rng.randrange(10, 900) for _ in range(rng.choice([1, 2, 5, 17, 40, 90]))]
             for _ in range(5)]
    expected = []
    for tokens in given:
        oracle.decode(tokens)
        expected.append(np.array(oracle.logits()))
    context.decode([5, 6, 7])
    context.clear()
    n_right = n_refused = 0
    for tokens, row in zip(given, expected):
        limit = psutil.Process().memory_info().vms + 2**17
        resource.setrlimit(resource.RLIMIT_AS, (limit, -1))
        try:
            context.decode(tokens)
        except ic.SessionFatalError:
            n_refused += 1
        else:
            assert np.abs(row - context.logits()).max() < 0.05, "wrong, and nobody said so"
            n_right += 1
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    assert n_refused, n_right
    for _ in range(2):
        try:
            oracle.decode([5])
        except ic.SessionFatalError as error:
            assert "wrong values" in str(error), error
        else:
            raise AssertionError("what failed may be kept by all of this process")
    print("well")
"""


@pytest.mark.parametrize("seed", [4, 5])
def test_no_value_is_given_that_may_be_wrong(seed: int) -> None:
    path = pack.model_path("openvino")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(path), str(seed)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "well"), done.stderr[-2000:]
