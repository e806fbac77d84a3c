"""python -m diminuendo"""

import sys

from diminuendo.cli import main


def run() -> None:
    sys.exit(main())


if __name__ == "__main__":
    run()
