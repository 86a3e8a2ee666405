"""`python -m rose.cli`."""

import sys

from rose.cli.main import main

sys.exit(main())
