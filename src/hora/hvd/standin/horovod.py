"""Answers `import horovod` in ranks that `hora run --horovod` starts: this directory comes first on their path, in their children too."""

from hora.hvd import hook
from hora.hvd.running import run as run

hook.install()
__path__: list[str] = []  # what is below `horovod` comes from the hook
__version__ = hook.VERSION
