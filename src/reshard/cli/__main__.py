"""`python -m reshard.cli`, if the script `reshard` is not on the path."""

from __future__ import annotations

import sys

from reshard.cli import main

sys.exit(main())
