"""The script cifar.py with DistributedDataParallel in place of Horovod: the same losses.

hora run -np 2 examples/horovod/cifar_ddp.py --epochs 3
"""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cifar_parts import ResNet, augment, loaders, read_arguments, tell
from torch.nn.parallel import DistributedDataParallel


def main(words: list[str] | None = None) -> None:
    args = read_arguments(words)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.manual_seed)
    train_loader, test_loader, sampler = loaders(args, size, rank)
    network = ResNet(args.depth, args.width).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.wd)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, args.schedule, args.gamma)
    generator = torch.Generator().manual_seed(args.manual_seed + rank)

    begin, rows = time.time(), []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        trained = torch.zeros(3, device=device)
        for images, targets in train_loader:
            images, targets = augment(images, generator).to(device), targets.to(device)
            optimizer.zero_grad()
            output = model(images)
            loss = F.cross_entropy(output, targets)
            loss.backward()
            optimizer.step()
            trained += torch.tensor([loss.item() * len(targets), (output.argmax(1) == targets).sum().item(), len(targets)], device=device)
        for buffer in network.buffers():
            dist.broadcast(buffer, 0)
        network.eval()
        tested = torch.zeros(3, device=device)
        with torch.no_grad():
            for images, targets in test_loader:
                images, targets = images.to(device), targets.to(device)
                output = network(images)
                loss = F.cross_entropy(output, targets, reduction="sum")
                tested += torch.tensor([loss.item(), (output.argmax(1) == targets).sum().item(), len(targets)], device=device)
        dist.all_reduce(trained)
        dist.all_reduce(tested)
        rows.append([schedule.get_last_lr()[0], *(trained[:2] / trained[2]).tolist(), *(tested[:2] / tested[2]).tolist()])
        tell(args, rank, rows)
        schedule.step()
    if rank == 0:
        print(f"Time elapsed: {time.time() - begin:.1f} s")
    # First the model: its reducer would end the threads of the group while it holds Python's lock, which one of them may want.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
