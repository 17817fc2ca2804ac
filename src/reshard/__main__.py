"""`python -m reshard` is the `reshard` command."""

import sys

from reshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
