"""Names, order and defaults of the arguments are Horovod's, so that calls by position and by name stand as they are."""

import inspect
import operator

import pytest

from hora import hvd

# As Horovod 0.28.1 has them; behind them stands what Hora has besides.
REDUCED = "average=None name=None op=None prescale_factor=1.0 postscale_factor=1.0 process_set=world"
REDUCED_SMALL = REDUCED.replace(" op", " compression=none op")
SCATTERED = "name=None op=0 process_set=world prescale_factor=1.0 postscale_factor=1.0"
SCATTERED_SMALL = SCATTERED.replace(" op", " compression=none op")
NAMED = "name=None process_set=world"
SIGNATURES = {
    "allreduce": f"tensor {REDUCED_SMALL}",
    "allreduce_ allreduce_async allreduce_async_": f"tensor {REDUCED}",
    "grouped_allreduce": f"tensors {REDUCED_SMALL}",
    "grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_": f"tensors {REDUCED}",
    "sparse_allreduce_async": "tensor name op process_set=world",
    "allgather allgather_async": f"tensor {NAMED}",
    "grouped_allgather grouped_allgather_async": f"tensors {NAMED}",
    "broadcast broadcast_ broadcast_async broadcast_async_": f"tensor root_rank {NAMED}",
    "alltoall alltoall_async": f"tensor splits=None {NAMED}",
    "reducescatter": f"tensor {SCATTERED_SMALL}",
    "reducescatter_async": f"tensor {SCATTERED}",
    "grouped_reducescatter": f"tensors {SCATTERED_SMALL}",
    "grouped_reducescatter_async": f"tensors {SCATTERED}",
    "join": "device=-1",
    "barrier": "process_set=world",
    "poll synchronize": "handle",
    "init": "comm=None process_sets=None",
    "start_timeline": "file_path mark_cycles=False",
    "shutdown is_initialized stop_timeline size rank local_size local_rank cross_size cross_rank is_homogeneous": "",
    "DistributedOptimizer": "optimizer named_parameters=None compression=none backward_passes_per_step=1 op=0 gradient_predivide_factor=1.0 "
    "num_groups=0 groups=None sparse_as_dense=False process_set=world",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model=None",
    "broadcast_object": f"obj root_rank=0 {NAMED}",
    "allgather_object": "obj name=None",
    "SyncBatchNorm": "num_features eps=1e-05 momentum=0.1 affine=True track_running_stats=True",
    "ProcessSet": "ranks_or_comm",
    "add_process_set remove_process_set": "process_set",
    "elastic.run": "func",
    "elastic.TorchState": "model=None optimizer=None",
    "elastic.ElasticSampler": "dataset shuffle=True seed=0",
}


@pytest.mark.parametrize("names", SIGNATURES)
def test_arguments_are_horovods_in_its_order_with_its_defaults(names: str) -> None:
    said = {id(hvd.global_process_set): "world", id(hvd.Compression.none): "none"}
    for name in names.split():
        found = inspect.signature(operator.attrgetter(name)(hvd)).parameters.values()
        words = [each.name + ("" if each.default is each.empty else f"={said.get(id(each.default), each.default)}") for each in found]
        wanted = SIGNATURES[names].split()
        assert words[: len(wanted)] == wanted
        assert all("=" in word or word == "kwargs" for word in words[len(wanted) :])


def test_reductions_have_horovods_numbers() -> None:
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == list(range(6))
