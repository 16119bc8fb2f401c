"""`python -m stretto` is the same as `stretto`."""

import sys

from stretto.cli import main

sys.exit(main())
