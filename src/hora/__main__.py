"""`python -m hora` is the command `hora`, where it is not on the path."""

import sys

from hora.cli.main import main

sys.exit(main())
