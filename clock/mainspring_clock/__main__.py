"""`python -m mainspring_clock`: one clock process, settings from the environment."""

import sys

from mainspring_clock.main import run_clock

sys.exit(run_clock())
