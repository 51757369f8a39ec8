"""``python -m infercore`` is the command ``infercore``."""

from infercore.cli import main

if __name__ == "__main__":
    main(prog_name="infercore")
