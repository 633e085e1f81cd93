"""Peer of ep_cuda_bench --ranks: tokens to their experts and back by PyTorch, as programs without a
library for it write it: rows are copied for every choice and sorted by expert, all_to_all_single
brings them to the experts' ranks, where they are sorted once more; and back, with weights. Eager, and
with what lies between the collectives, whose sizes the host must know, under torch.compile. The result
is checked before it is timed. torchrun starts it; rank 0 talks.
"""

import torch
import torch.distributed as dist
from ranks import run_on_gpus

SHAPES = [(4096, 7168, 8, 64), (4096, 2048, 8, 128), (8192, 2048, 8, 128), (128, 7168, 8, 256)]
REPEAT = 30


def sort_pairs(idx, experts, ranks):
    chosen = idx.flatten()
    counts = torch.zeros(experts, dtype=torch.int64, device=idx.device)
    counts = counts.scatter_add(0, chosen, torch.ones_like(chosen))
    return chosen.argsort(stable=True), counts, counts.view(ranks, -1).sum(1)


def rows_of_pairs(x, order, topk):
    return x[order // topk]


def by_expert(came, order):
    return came[order]


def by_rank(y, order):
    back = torch.empty_like(y)
    back[order] = y
    return back


def sum_pairs(home, order, w):
    pairs = by_rank(home, order).view(*w.shape, -1)
    return torch.einsum("tkd,tk->td", pairs, w.to(pairs.dtype))


PARTS = (sort_pairs, rows_of_pairs, by_expert, by_rank, sum_pairs)
# Routing stays as it is from call to call, so sizes are constants of what is compiled.
COMPILED = [torch.compile(part, dynamic=False) for part in PARTS]


class Exchange:
    def __init__(self, tokens, model, topk, experts, parts):
        self.topk, self.experts, self.parts = topk, experts, parts
        generator = torch.Generator("cuda").manual_seed(dist.get_rank())
        scores = torch.rand(tokens, experts, device="cuda", generator=generator)
        self.idx = scores.topk(topk).indices
        self.w = torch.full((tokens, topk), 0.125, device="cuda")
        self.x = torch.randint(-7, 8, (tokens, model), device="cuda", generator=generator).bfloat16()

    def dispatch(self):
        sort, rows_of, by_expert = self.parts[:3]
        ranks, local = dist.get_world_size(), self.experts // dist.get_world_size()
        self.order, counts, sent = sort(self.idx, self.experts, ranks)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)  # [rank, local expert]
        self.sent = sent.tolist()
        self.got = received.view(ranks, local).sum(1).tolist()
        rows = rows_of(self.x, self.order, self.topk)
        came = rows.new_empty(sum(self.got), rows.shape[1])
        dist.all_to_all_single(came, rows, self.got, self.sent)
        expert = torch.arange(local, device="cuda").repeat(ranks).repeat_interleave(received)
        self.sorted = expert.argsort(stable=True)
        return by_expert(came, self.sorted)

    def combine(self, y):
        by_rank, sum_home = self.parts[3:]
        home = y.new_empty(sum(self.sent), y.shape[1])
        dist.all_to_all_single(home, by_rank(y, self.sorted), self.sent, self.got)
        return sum_home(home, self.order, self.w)

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
    for tokens, model, topk, experts in SHAPES:
        for how, parts in ("", PARTS), (", torch.compile", COMPILED):
            exchange = Exchange(tokens, model, topk, experts, parts)
            exchange.check()
            ms = milliseconds(exchange.run)
            case = f"R{dist.get_world_size()} T{tokens} D{model} K{topk} E{experts}, eager"
            yield {"name": "ep.prepare_dispatch_combine", "peer": f"torch all_to_all_single{how}",
                   "case": case, "device": "cuda", "value": ms * 1e3, "unit": "us", "ms": ms}
            del exchange


if __name__ == "__main__":
    run_on_gpus(round_of_rows)
