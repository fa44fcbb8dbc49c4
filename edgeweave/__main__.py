"""`python -m edgeweave`, the same as the `edgeweave` command."""

import sys

from edgeweave.cli import main

if __name__ == "__main__":
    sys.exit(main())
