"""The experts of a layer divided among ranks by PyTorch, for train_step_ranks.py --parallel ep: rows are
copied for every choice and sorted by expert, all_to_all_single brings them to the experts' ranks,
where they are sorted once more for torch._grouped_mm; and back, with weights. Routing and the
activation are compiled; what lies between depends on sizes that the host must know.
"""

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from train_step import choose, swiglu


def route(h, router, topk, balanced, ranks):
    probability = (h.float() @ router.float().T).softmax(-1)
    weight, index = choose(probability, topk, balanced)
    if balanced:  # neighbours lie on different ranks, so that tokens have experts on all of them
        index = index % ranks * (router.shape[0] // ranks) + index // ranks
    chosen = index.flatten()
    counts = torch.zeros(router.shape[0], dtype=torch.int64, device=h.device)
    counts = counts.scatter_add(0, chosen, torch.ones_like(chosen))
    balance = router.shape[0] * (counts / chosen.numel() * probability.mean(0)).sum()
    return weight, chosen, counts, balance


class Experts:
    """Of one rank; call it with all tokens of the rank."""

    def __init__(self, topk, balanced=False, compiled=True):
        self.topk, self.balanced = topk, balanced
        self.route = torch.compile(route) if compiled else route
        self.swiglu = torch.compile(swiglu, dynamic=True) if compiled else swiglu

    def products(self, x, ends, w1, w2):
        def grouped(a, w):
            return torch._grouped_mm(a, w.transpose(1, 2), offs=ends)
        return grouped(self.swiglu(grouped(x, w1)), w2)

    def __call__(self, h, router, w1, w2):
        ranks, local, group = dist.get_world_size(), w1.shape[0], dist.group.WORLD
        weight, chosen, counts, balance = self.route(h, router, self.topk, self.balanced,
                                                      ranks)
        received = torch.empty_like(counts)  # [rank, local expert]
        dist.all_to_all_single(received, counts)
        sent, got = torch.stack([counts.view(ranks, local).sum(1),
                                 received.view(ranks, local).sum(1)]).tolist()
        order = chosen.argsort(stable=True)
        token = order // self.topk
        came = all_to_all_single_autograd(h[token], got, sent, group)
        expert = torch.arange(local, device=h.device).repeat(ranks).repeat_interleave(
            received, output_size=sum(got))
        by_expert = expert.argsort(stable=True)
        ends = received.view(ranks, local).sum(0).cumsum(0).int()
        y = self.products(came[by_expert], ends, w1, w2)
        home = all_to_all_single_autograd(y[by_expert.argsort()], sent, got, group)
        out = home * weight.flatten()[order, None].to(home.dtype)
        return torch.zeros_like(h).index_add_(0, token, out), balance
