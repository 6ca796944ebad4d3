"""``python -m kvarn``: see :mod:`kvarn.cli`."""

import sys

from kvarn.cli import main

sys.exit(main())
