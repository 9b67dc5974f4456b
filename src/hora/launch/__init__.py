"""Starts the ranks of a job on this node, watches them, and ends them together.

`job.launch(options)` does it; `command` is its command line. `plan` and `supervisor` decide and touch nothing; the other modules act and
decide nothing. No module here imports torch: starting is instant.
"""
