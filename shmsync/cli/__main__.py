"""`python -m shmsync.cli`: the same as `shmsync`."""

import sys

from .program import main

if __name__ == "__main__":
    sys.exit(main())
