"""The session: a stable prefix kept hot, a volatile suffix, and decoding from there."""
