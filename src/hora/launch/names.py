"""Names of files, directories and configurations, as options of commands."""

from typing import Any

import click


class Name(click.Path):
    """A name of a file, directory or configuration, which is not empty: that is what a variable of a shell leaves that is not set.

    Python takes it for the current directory, in which a run would be spread out, and options for not given, so that other data were trained on.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuses the empty name."""
        if isinstance(value, str) and not value.strip():
            self.fail("it must not be empty; leave the option out, or see that the variable it is made from is set", param, ctx)
        return super().convert(value, param, ctx)
