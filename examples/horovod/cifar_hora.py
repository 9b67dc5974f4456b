"""The script cifar.py with Hora's own words: the same losses.

hora run -np 2 examples/horovod/cifar_hora.py --epochs 3
"""

import time

import torch
import torch.nn.functional as F
from cifar_parts import ResNet, augment, loaders, read_arguments, tell

import hora


def main(words: list[str] | None = None) -> None:
    args = read_arguments(words)
    hora.init()
    device = hora.device()
    torch.manual_seed(args.manual_seed)
    train_loader, test_loader, sampler = loaders(args, hora.world_size(), hora.rank())
    model = ResNet(args.depth, args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.wd)
    optimizer = hora.DistributedOptimizer(optimizer, model)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, args.schedule, args.gamma)
    generator = torch.Generator().manual_seed(args.manual_seed + hora.rank())

    begin, rows = time.time(), []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        trained = torch.zeros(3)
        for batch in train_loader:
            for images, targets in optimizer.micro_batches([batch]):
                images, targets = augment(images, generator).to(device), targets.to(device)
                output = model(images)
                loss = F.cross_entropy(output, targets, reduction="sum")
                optimizer.backward(loss, weight=len(targets))
                trained += torch.tensor([loss.item(), (output.argmax(1) == targets).sum().item(), len(targets)])
            optimizer.step()
        hora.broadcast_parameters(model)  # as cifar.py: optimizer.sync_buffers() would take the statistics of all ranks
        model.eval()
        tested = torch.zeros(3)
        with torch.no_grad():
            for images, targets in test_loader:
                images, targets = images.to(device), targets.to(device)
                output = model(images)
                loss = F.cross_entropy(output, targets, reduction="sum")
                tested += torch.tensor([loss.item(), (output.argmax(1) == targets).sum().item(), len(targets)])
        trained, tested = hora.all_reduce(torch.stack([trained, tested]).to(device)).cpu()
        rows.append([schedule.get_last_lr()[0], *(trained[:2] / trained[2]).tolist(), *(tested[:2] / tested[2]).tolist()])
        tell(args, hora.rank(), rows)
        schedule.step()
    if hora.rank() == 0:
        print(f"Time elapsed: {time.time() - begin:.1f} s")
    hora.shutdown()


if __name__ == "__main__":
    main()
