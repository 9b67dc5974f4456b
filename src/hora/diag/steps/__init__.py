"""`hora bench step`: what a training step takes under Hora's strategies and under DistributedDataParallel, in turns in one run.

`command` is what the user calls, `request` what was asked for, `workloads` what is trained, `variants` the ways to train it; the ranks run
`__main__`.
"""
