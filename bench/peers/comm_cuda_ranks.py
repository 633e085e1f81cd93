"""Peer of comm_cuda_bench --ranks: the collectives of torch.distributed, over NCCL, captured in CUDA
graphs of eight operations. torchrun starts it; rank 0 talks.
"""

import torch
import torch.distributed as dist
from ranks import run_on_gpus

BYTES = [512, 16 << 10, 1 << 20, 8 << 20, 32 << 20, 64 << 20]
BATCH, REPEAT = 8, 21


class Operands:
    """`whole` and `other` have a part of `n` floats for each rank."""

    def __init__(self, n):
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self.whole = torch.randn(ranks * n, device="cuda")
        self.other = torch.zeros(ranks * n, device="cuda")
        self.part = torch.empty(n, device="cuda")
        self.own = self.other[rank * n:(rank + 1) * n]

    def all_gather(self):
        dist.all_gather_into_tensor(self.other, self.own)

    def reduce_scatter(self):
        dist.reduce_scatter_tensor(self.part, self.whole)

    def all_reduce(self):
        dist.all_reduce(self.other, dist.ReduceOp.MAX)

    def all_to_all(self):
        dist.all_to_all_single(self.other, self.whole)


def milliseconds(run):
    """Of one operation: the median over rounds of the slowest rank's time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(BATCH):
            run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    word, times = torch.zeros(1, device="cuda"), []
    for _ in range(REPEAT + 3):
        dist.all_reduce(word)
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / BATCH)
    ms = torch.tensor(times[3:], device="cuda")
    dist.all_reduce(ms, dist.ReduceOp.MAX)
    return ms.median().item()


def round_of_rows():
    rows = []
    ranks = dist.get_world_size()
    for size in BYTES:
        operands = Operands(size // 4)
        for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            ms = milliseconds(getattr(operands, name))
            rows.append({"name": f"comm.{name}", "peer": "torch.distributed, NCCL",
                         "case": f"R={ranks} on {ranks} GPUs, {size} B a part, captured",
                         "device": "cuda", "value": size * (ranks - 1) / ms * 1e-6, "unit": "GB/s",
                         "ms": ms})
    return rows


if __name__ == "__main__":
    run_on_gpus(round_of_rows)
