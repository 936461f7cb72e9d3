"""`python -m examples.paper.privacy`."""

import sys

from examples.paper.privacy.experiment import main

if __name__ == "__main__":
    sys.exit(main())
