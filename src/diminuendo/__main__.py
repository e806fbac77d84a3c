"""python -m diminuendo"""

import sys

from diminuendo.cli import main
from diminuendo.cli.stdout import forgiving


def run() -> None:
    """Run the command line and leave with its exit code."""
    with forgiving():
        code = main()
    sys.exit(code)


if __name__ == "__main__":
    run()
