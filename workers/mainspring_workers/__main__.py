"""`python -m mainspring_workers`: one worker process, settings from the environment."""

import sys

from mainspring_workers.main import run_worker

sys.exit(run_worker())
