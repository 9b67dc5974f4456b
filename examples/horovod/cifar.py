"""A ResNet on CIFAR-10, as a script for Horovod: nothing in it knows of Hora.

horarun -np 2 python examples/horovod/cifar.py --epochs 3
"""

import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from cifar_parts import ResNet, augment, loaders, read_arguments, tell


def main(words: list[str] | None = None) -> None:
    args = read_arguments(words)
    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.manual_seed)
    train_loader, test_loader, sampler = loaders(args, hvd.size(), hvd.rank())
    model = ResNet(args.depth, args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.wd)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, args.schedule, args.gamma)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    generator = torch.Generator().manual_seed(args.manual_seed + hvd.rank())

    begin, rows = time.time(), []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        trained = torch.zeros(3)
        for images, targets in train_loader:
            images, targets = augment(images, generator).to(device), targets.to(device)
            optimizer.zero_grad()
            output = model(images)
            loss = F.cross_entropy(output, targets)
            loss.backward()
            optimizer.step()
            trained += torch.tensor([loss.item() * len(targets), (output.argmax(1) == targets).sum().item(), len(targets)])
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # the running statistics of the first worker, for everybody's test
        model.eval()
        tested = torch.zeros(3)
        with torch.no_grad():
            for images, targets in test_loader:
                images, targets = images.to(device), targets.to(device)
                output = model(images)
                loss = F.cross_entropy(output, targets, reduction="sum")
                tested += torch.tensor([loss.item(), (output.argmax(1) == targets).sum().item(), len(targets)])
        trained, tested = hvd.grouped_allreduce([trained, tested], op=hvd.Sum, name="numbers")
        rows.append([schedule.get_last_lr()[0], *(trained[:2] / trained[2]).tolist(), *(tested[:2] / tested[2]).tolist()])
        tell(args, hvd.rank(), rows)
        schedule.step()
    if hvd.rank() == 0:
        print(f"Time elapsed: {time.time() - begin:.1f} s")
    hvd.shutdown()


if __name__ == "__main__":
    main()
