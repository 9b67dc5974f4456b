"""The numbers that every vocabulary of the recipe begins with. Imports nothing."""

from typing import Final

PAD: Final = 0
"""Fills rows up to the length of their batch, on the right."""
EOS: Final = 1
"""Ends a sentence."""
BOS: Final = 2
"""What the decoder reads before the first symbol."""
UNK: Final = 3
"""What the vocabulary does not know."""

SYMBOLS: Final = ("<PAD>", "<EOS>", "<BOS>", "<UNK>")
"""How they are written, by number."""
