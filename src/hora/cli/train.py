"""`hora train RECIPE`: trains a recipe, on ranks that it starts itself or as one of the ranks that another launcher started."""

import click

from hora.cli.train_image import image
from hora.cli.train_lm import lm
from hora.cli.train_nmt import nmt

_SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda name: name.replace("_", "-")}

_HELP = """Trains a model with one of Hora's recipes.

\b
hora train lm --config small --data wikitext-2 --nproc 2
hora train nmt --config demo --nproc 2
hora train image --config digits --nproc 2
"""


@click.group("train", help=_HELP, context_settings=_SETTINGS)
def command() -> None:
    """The group itself does nothing."""


for _recipe in (lm, nmt, image):
    command.add_command(_recipe)
