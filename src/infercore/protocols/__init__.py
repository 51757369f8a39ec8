"""What users program against, and (in `spi`) what a plugin implements."""
