"""Calls of a function on several ranks from a program that is none: a notebook, a test, a script. `hora.run` is all that users see."""
