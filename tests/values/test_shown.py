"""How values show themselves, in one line and as HTML."""

from __future__ import annotations

from html.parser import HTMLParser

import attrs
import pytest

import infercore as ic
from infercore.values import shown

PLAN = ic.MemoryPlan(
    weights_bytes=3 << 20, kv_bytes=1 << 20, compute_bytes=0, peak_bytes=5 << 20, n_ctx=1024
)
INFO = ic.ModelInfo(
    architecture="<script>",
    n_vocab=512,
    n_ctx_train=1024,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_head_kv=2,
    n_params=800_000,
    size_bytes=3_200_000,
    description="a & b",
    metadata={"key": "x" * 10_000},
)
USAGE = ic.Usage(
    prompt_tokens=5,
    cached_tokens=0,
    completion_tokens=3,
    time_to_first_token_ms=1.23456,
    tokens_per_second=None,
    seed=7,
)


@attrs.frozen(kw_only=True)
class Sample:
    """One field of each kind."""

    digest: str = ""
    long: str = ""
    many: tuple[int, ...] = ()
    number: float = 0.5
    missing: str | None = None

    __repr__ = shown.one_line


def test_hashes_are_short_and_what_says_nothing_is_left_out():
    assert repr(Sample()) == "Sample()"
    assert repr(Sample(digest="ab" * 32)) == "Sample(digest='abababab...')"
    assert repr(Sample(long="x" * 100)) == f"Sample(long='{'x' * 60}...')"
    assert repr(Sample(many=tuple(range(20)))) == "Sample(many=<20 items>)"
    assert repr(Sample(many=(1, 2), number=1.5)) == "Sample(many=(1, 2), number=1.5)"


def test_results_fit_a_line():
    assert repr(USAGE) == (
        "Usage(prompt_tokens=5, cached_tokens=0, completion_tokens=3, "
        "time_to_first_token_ms=1.235, seed=7)"
    )
    assert "metadata=<1 entries>" in repr(INFO)
    assert len(repr(INFO)) < 400


@pytest.mark.parametrize(
    ("n", "text"), [(5, "5 B"), (2048, "2.0 KiB"), (3 << 20, "3.0 MiB"), (7 << 40, "7168.0 GiB")]
)
def test_sizes(n, text):
    assert shown.size(n) == text


@pytest.mark.parametrize(
    ("n", "text"), [(12, "12"), (80_000, "80.0K"), (800_000, "0.8M"), (7.24e9, "7.2B")]
)
def test_counts(n, text):
    assert shown.count(n) == text


class Tags(HTMLParser):
    """Collects the tags, and checks that they are closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


REPORT = ic.PoolStats(n_cells=100, n_cells_used=40, n_cells_shared=10)


@pytest.mark.parametrize("value", [PLAN, INFO, USAGE, REPORT, ic.Capabilities()])
def test_notebooks_get_a_table(value):
    tags = Tags()
    tags.feed(value._repr_html_())
    assert tags.open == []
    assert "table" in tags.seen
    assert "script" not in tags.seen


def test_the_bar_adds_up():
    html = PLAN._repr_html_()
    assert "width:75.00%" in html
    assert "width:25.00%" in html
    assert "3.0 MiB" in html
    free = REPORT._repr_html_()
    assert "width:30.00%" in free
    assert "width:60.00%" in free
