"""`python -m rose.scheduler`."""

import sys

from rose.scheduler.main import main

sys.exit(main(sys.argv[1:]))
