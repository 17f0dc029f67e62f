"""`python -m partitioner`: the shell command, where the folder of scripts is not on the path."""

import sys

from partitioner.cli import main

if __name__ == "__main__":
    sys.exit(main())
