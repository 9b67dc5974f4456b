"""`hora bench step`: what a training step takes under Hora's strategies and under DistributedDataParallel, in turns in one run.

`command` is what the user calls, `request` what was asked for, `workloads` the models, `variants` the ways to train them; the ranks run
`__main__`.
"""
