"""``python -m mooncake_v0`` is the command ``mooncake-v0``."""

from mooncake_v0.cli import main

if __name__ == "__main__":
    main()
