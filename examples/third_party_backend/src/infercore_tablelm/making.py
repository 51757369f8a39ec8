"""How tables are made of a text. The backend reads them, and needs none of this."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from infercore_tablelm.tables import BOS, EOS, FORMAT, ORDER


def count(text: str) -> dict[str, Any]:
    """Return the table of ``text``, as it is written to JSON."""
    data = [BOS, *text.encode(), EOS]
    tables: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for i in range(1, len(data)):
        for n in range(min(ORDER, i) + 1):
            tables[" ".join(map(str, data[i - n : i]))][str(data[i])] += 1
    return {"format": FORMAT, "n_ctx_train": 4096, "tables": tables}
