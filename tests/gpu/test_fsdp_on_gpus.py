"""FSDP2 beside Hora, on GPUs."""

import gpu_ranks
import test_fsdp
import torch
from again import collect
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import hora
from hora.testing import run_ranks
from hora.testing.reference import assert_same
from hora.train.checkpoint.checkpointer import Checkpointer

WORLD_SIZES = [n for n in (1, 2, 3) if n in gpu_ranks.WORLD_SIZES]

globals().update(collect(test_fsdp, "nccl", WORLD_SIZES, timeout_s=120))


@run_ranks(*WORLD_SIZES, backend="nccl", timeout_s=120)
def test_parts_that_wait_on_the_host_are_put_together(tmp_path):
    model = fully_shard(test_fsdp.perceptron(), mesh=init_device_mesh("cuda", (hora.world_size(),)), offload_policy=CPUOffloadPolicy())
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    Checkpointer(tmp_path).save({"model": model.state_dict()}, step=1, epoch=0)
    plain = test_fsdp.perceptron().cpu()
    torch.nn.utils.vector_to_parameters(torch.zeros(11 * 8 + 5 * 12 + 3 * 6), plain.parameters())
    set_model_state_dict(plain, Checkpointer(tmp_path).load().state["model"])
    assert_same(test_fsdp.values(plain), test_fsdp.values(test_fsdp.perceptron()), 0.0)
