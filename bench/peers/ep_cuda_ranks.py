"""Peer of ep_cuda_bench --ranks: tokens to their experts and back by PyTorch, as programs without a
library for it write it: rows are copied for every choice and sorted by expert, all_to_all_single
brings them to the experts' ranks, where they are sorted once more; and back, with weights. Eager.
The result is checked before it is timed. torchrun starts it; rank 0 talks.
"""

import torch
import torch.distributed as dist
from ranks import run_on_gpus

SHAPES = [(4096, 7168, 8, 64), (4096, 2048, 8, 128), (8192, 2048, 8, 128), (128, 7168, 8, 256)]
REPEAT = 30


class Exchange:
    def __init__(self, tokens, model, topk, experts):
        self.topk, self.experts = topk, experts
        generator = torch.Generator("cuda").manual_seed(dist.get_rank())
        scores = torch.rand(tokens, experts, device="cuda", generator=generator)
        self.idx = scores.topk(topk).indices
        self.w = torch.full((tokens, topk), 0.125, device="cuda")
        self.x = torch.randint(-7, 8, (tokens, model), device="cuda", generator=generator).bfloat16()

    def dispatch(self):
        ranks, local = dist.get_world_size(), self.experts // dist.get_world_size()
        self.order = self.idx.flatten().argsort(stable=True)
        counts = torch.bincount(self.idx.flatten(), minlength=self.experts)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)  # [rank, local expert]
        self.sent = counts.view(ranks, local).sum(1).tolist()
        self.got = received.view(ranks, local).sum(1).tolist()
        rows = self.x[self.order // self.topk]
        came = rows.new_empty(sum(self.got), rows.shape[1])
        dist.all_to_all_single(came, rows, self.got, self.sent)
        expert = torch.arange(local, device="cuda").repeat(ranks).repeat_interleave(received)
        self.sorted = expert.argsort(stable=True)
        return came[self.sorted]

    def combine(self, y):
        back = torch.empty_like(y)
        back[self.sorted] = y
        home = y.new_empty(sum(self.sent), y.shape[1])
        dist.all_to_all_single(home, back, self.sent, self.got)
        pairs = torch.empty_like(home)
        pairs[self.order] = home
        pairs = pairs.view(*self.idx.shape, -1)
        return torch.einsum("tkd,tk->td", pairs, self.w.to(pairs.dtype))

    def run(self):
        return self.combine(self.dispatch())

    def check(self):
        if not torch.equal(self.run().float(), self.x.float() * self.topk * 0.125):
            raise SystemExit("ep_cuda_ranks: wrong result")


def milliseconds(run):
    """The median over rounds of the slowest rank's time."""
    word, times = torch.zeros(1, device="cuda"), []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPEAT + 3):
        dist.all_reduce(word)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    ms = torch.tensor(times[3:], device="cuda")
    dist.all_reduce(ms, dist.ReduceOp.MAX)
    return ms.median().item()


def round_of_rows():
    rows = []
    for shape in SHAPES:
        exchange = Exchange(*shape)
        exchange.check()
        ms = milliseconds(exchange.run)
        tokens, model, topk, experts = shape
        rows.append({"name": "ep.prepare_dispatch_combine", "peer": "torch all_to_all_single",
                     "case": f"R{dist.get_world_size()} T{tokens} D{model} K{topk} E{experts}, eager",
                     "device": "cuda", "value": ms * 1e3, "unit": "us", "ms": ms})
        del exchange
    return rows


if __name__ == "__main__":
    run_on_gpus(round_of_rows)
