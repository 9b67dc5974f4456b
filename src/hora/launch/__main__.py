"""`python -m hora.launch`: the launcher without the other commands."""

import sys

from hora.launch.command import command
from hora.launch.console import run_command

if __name__ == "__main__":
    sys.exit(run_command(command, name="python -m hora.launch"))
