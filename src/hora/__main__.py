"""`python -m hora` is the command `hora`."""

import sys

from hora.cli.main import main

sys.exit(main())
