"""What the process with limits and the one that asks it agree on.

A request is plain data (`marshal`), an answer a letter and UTF-8: nothing that comes back is ever
executed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

Work = Callable[..., tuple[bytes, str]]
"""A function that the process calls: its answer is one of the letters below, and a text."""

MAX_SECONDS = 2.0  # of processor time of one request, where it says nothing else
PATIENCE = 5  # times as long may it take by the clock, on a machine that does much else
MAX_MEMORY_BYTES = 256 << 20  # of all that is kept at once
MAX_TEXT_BYTES = 16 << 20  # of the text that is made, as UTF-8

TEXT, UNREADABLE, STOPPED, REFUSED = b"t", b"u", b"s", b"r"
TOO_MUCH_MEMORY = f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"

LENGTH = struct.Struct("<Q")  # of a request
HEADER = struct.Struct("<cQ")  # of an answer: what it is, and its length
