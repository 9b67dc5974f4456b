"""`hora prove`: runs a script with several numbers of ranks, compares the runs step by step, and tells why they differ.

`request` is what was asked; `site`, `importing` and `recorder` (with `forwards`, `losses`, `samplers`, `naming`, `ablation`) act inside the script's
processes and leave `records`; `compare` and `causes` are pure functions over those; `run` starts the script, `inquiry` decides which runs are needed,
`show` prints.
"""
