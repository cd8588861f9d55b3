"""`python -m services.whatif`: the command `kvmesh simulate`."""

import sys

from services.whatif.command import main

if __name__ == "__main__":
    sys.exit(main())
