"""`python -m rose.integrations.verl`: see `check`."""

import sys

from rose.integrations.verl.check import main

if __name__ == "__main__":
    sys.exit(main())
