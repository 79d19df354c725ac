"""`python -m shmsync`: the same as `shmsync`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
