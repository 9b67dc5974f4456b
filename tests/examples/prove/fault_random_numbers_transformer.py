# expect: random-numbers-per-rank
"""Transformer of the PyTorch tutorial (dropout in layers and positions), under bfloat16 autocast; the same seed on all ranks."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Reversal(Dataset):
    """Say the sequence backwards."""

    def __init__(self, size, length=10, vocabulary=16):
        self.rows = torch.randint(vocabulary, (size, length), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], self.rows[i].flip(0)


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout=0.1, max_len=32):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(1, max_len, d_model)
        pe[0, :, 0::2] = torch.sin(position * div_term)
        pe[0, :, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return self.dropout(x + self.pe[:, : x.size(1)])


class TransformerModel(nn.Module):
    def __init__(self, ntoken=16, d_model=24, nhead=2, d_hid=48, nlayers=1, dropout=0.2):
        super().__init__()
        self.embedding = nn.Embedding(ntoken, d_model)
        self.pos_encoder = PositionalEncoding(d_model, dropout)
        layer = nn.TransformerEncoderLayer(d_model, nhead, d_hid, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, nlayers)
        self.linear = nn.Linear(d_model, ntoken)

    def forward(self, src):
        return self.linear(self.encoder(self.pos_encoder(self.embedding(src))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bs", type=int, default=32)
    opt = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Reversal(256)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=opt.bs, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(TransformerModel())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler.set_epoch(0)
    for src, tgt in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(src)
            loss = criterion(output.view(-1, 16), tgt.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    dist.destroy_process_group()
