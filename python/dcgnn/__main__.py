"""``python -m dcgnn`` is the same as the ``dcgnn`` command."""

import sys

from dcgnn.cli import main

if __name__ == "__main__":
    sys.exit(main())
