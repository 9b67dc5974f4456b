"""A classifier of 8x8 digits made of noise and strokes, trained on any number of ranks: `hora run -np 2 examples/digits.py`."""

import torch
import torch.nn.functional as F

import hora

hora.init()
torch.manual_seed(0)
inputs = torch.randn(2000, 64)
targets = (inputs[:, :10] + 0.5 * inputs[:, 10:20]).argmax(1)  # a rule that a small network can learn
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(hora.device())
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.5), model)
loader = hora.DataLoader(torch.utils.data.TensorDataset(inputs, targets), global_batch_size=100)

for epoch in range(5):
    for step in loader:
        for x, y in optimizer.micro_batches(step):
            loss_sum = F.cross_entropy(model(x.to(hora.device())), y.to(hora.device()), reduction="sum")
            optimizer.backward(loss_sum, weight=len(y))
        optimizer.step()
    with torch.no_grad():
        loss = F.cross_entropy(model(inputs.to(hora.device())), targets.to(hora.device()))
    if hora.rank() == 0:
        print(f"epoch {epoch}: loss {loss:.4f}")
hora.shutdown()
