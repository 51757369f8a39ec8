"""What the process that renders and the one that asks agree on.

A request is plain data (`marshal`), an answer a letter and UTF-8: nothing that the process which
renders sends back is ever executed.
"""

from __future__ import annotations

import struct

MAX_SECONDS = 2.0  # of one render, the template's compilation included
MAX_MEMORY_BYTES = 256 << 20  # of all that a render keeps at once
MAX_TEXT_BYTES = 16 << 20  # of the text that it makes, as UTF-8

TEXT, UNREADABLE, STOPPED, REFUSED = b"t", b"u", b"s", b"r"
TOO_MUCH_MEMORY = f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"

LENGTH = struct.Struct("<Q")  # of a request
HEADER = struct.Struct("<cQ")  # of an answer: what it is, and its length
