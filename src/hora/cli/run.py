"""`hora run`: the launcher's command."""

from hora.launch.command import command as command
