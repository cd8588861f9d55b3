"""Starts one of several frontend processes on one HTTP port; `processes.py` runs it. Its flags are those of the frontend."""

import sys

from services.frontend.__main__ import main

if __name__ == "__main__":
    sys.exit(main(shares_port=True))
