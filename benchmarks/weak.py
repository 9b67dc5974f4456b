"""Trains a model of `hora bench step` for some steps, each rank with a batch of its own: what `hora scale` runs for the weak scaling of real models.

hora scale --weak --ranks 1,2,4 --to 8 --json scale.json benchmarks/weak.py --workload gpt2_8
"""

import argparse

import torch

import hora
from hora.diag.steps.request import WORKLOADS
from hora.diag.steps.workloads import make

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--workload", choices=WORKLOADS, default="gpt2_8")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--tiny", action="store_true", help="Tiny models and batches, to try it out.")
parser.add_argument("--compile", action="store_true")
options = parser.parse_args()

hora.init()
job = make(options.workload, tiny=options.tiny)
torch.manual_seed(0)
model = job.model().to(hora.device())
batch = job.batch_of(hora.rank(), hora.device())
weight = job.weight(batch)
train_step = hora.TrainStep(
    model,
    lambda model, batch, state: (job.loss_sum(model, batch), weight, {}, state),
    job.optimizer(model.parameters()),
    compile=options.compile,
)
for _ in range(options.steps):
    result = train_step([batch])
loss = float(result.loss)
if hora.rank() == 0:
    print(f"loss {loss:.4f} after {options.steps} steps, {train_step.num_replayed} of them replayed")
hora.shutdown()
