"""Text of an answer, with which of its characters control tokens wrote."""

from __future__ import annotations

import attrs


@attrs.frozen
class RawText:
    """``flags`` holds "1" for each character of ``text`` that a control token wrote, else "0"."""

    text: str
    flags: str

    @classmethod
    def of(cls, text: str | RawText) -> RawText:
        """Return ``text`` as it is, or a str as text that no control token wrote."""
        return text if isinstance(text, RawText) else cls(text, "0" * len(text))

    @property
    def shown(self) -> str:
        """The text without what control tokens wrote."""
        if "1" not in self.flags:
            return self.text
        return "".join(c for c, f in zip(self.text, self.flags, strict=True) if f == "0")

    def __add__(self, other: RawText) -> RawText:
        return RawText(self.text + other.text, self.flags + other.flags)

    def __len__(self) -> int:
        return len(self.text)

    def first(self, n: int) -> RawText:
        """Return the first ``n`` characters."""
        return RawText(self.text[:n], self.flags[:n])

    def after(self, n: int) -> RawText:
        """Return what follows the first ``n`` characters."""
        return RawText(self.text[n:], self.flags[n:])
