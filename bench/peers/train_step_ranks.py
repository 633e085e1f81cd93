"""Peer of train_step_bench --ranks on GPUs: the model of train_step.py, whose data are divided among
ranks by PyTorch, --parallel fsdp2 (fully_shard of every block; fp32 shards, bf16 in use, gradients
reduced in fp32), ddp (fp32 parameters, cast to bf16 where they are used) or ep (ddp of all but the
experts, which are divided: torch_exchange.py). Blocks and the loss are compiled, in ep attention,
routing and the activation; AdamW is fused. As many tokens a GPU as one GPU has there. torchrun starts
it; rank 0 talks. --device cpu, over gloo, is to try it.
"""

import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import parser
from ranks import serve_ranks
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch_exchange import Experts
from train_step import (ATTENTION, AUX, CLIP, EPS, PEAK, SHAPES, Products, attention, experts_grouped,
                        make_parameters, moe, synchronize)

DIVIDED = ("fc1", "fc2")  # by experts


class Block(nn.Module):
    """A layer; attention and moe read its weights as those of layer 0. With `experts` it has those of
    its rank."""

    def __init__(self, shape, weights, products, experts=None):
        super().__init__()
        self.width, self.products, self.experts = shape.D, products, experts
        self.names = list(weights)
        self.attend = torch.compile(self.attention) if experts else self.attention
        for name in DIVIDED if experts else ():
            weights[name] = weights[name].chunk(dist.get_world_size())[dist.get_rank()].clone()
        for name, w in weights.items():
            self.register_parameter(name, nn.Parameter(w))

    def attention(self, x, p):
        x = x + attention(F.rms_norm(x, (self.width,), p["0.attn_norm"], EPS), p, 0, self.products)
        return x, F.rms_norm(x, (self.width,), p["0.mlp_norm"], EPS)

    def forward(self, x):
        p = {f"0.{name}": getattr(self, name).to(x.dtype) for name in self.names}
        x, h = self.attend(x, p)
        if self.experts:
            y, balance = self.experts(h.view(-1, self.width), p["0.router"], p["0.fc1"], p["0.fc2"])
            return x + y.view_as(x), balance
        y, balance = moe(h, p, 0, self.products)
        return x + y, balance


def loss_of(x, norm, head, targets):
    h = F.rms_norm(x, (x.shape[-1],), norm.to(x.dtype), EPS)
    logits = F.linear(h, head.to(x.dtype))
    return F.cross_entropy(logits.float().view(-1, head.shape[0]), targets.flatten())


class Model(nn.Module):
    def __init__(self, shape, divided, balanced):
        super().__init__()
        weights = make_parameters(shape)
        experts = Experts(shape.K, balanced) if divided else None
        products = Products(shape, experts_grouped, False, balanced)
        self.embed, self.final_norm, self.head = (nn.Parameter(weights.pop(n))
                                                  for n in ("embed", "final_norm", "head"))
        self.blocks = nn.ModuleList()
        for l in range(shape.L):
            own = {n.split(".")[1]: weights.pop(n) for n in list(weights) if n.startswith(f"{l}.")}
            self.blocks.append(Block(shape, own, products, experts))
        self.loss_of = torch.compile(loss_of)

    def forward(self, tokens, targets):
        x = F.embedding(tokens, self.embed).to(torch.bfloat16)
        aux = 0.0
        for block in self.blocks:
            x, balance = block(x)
            aux = aux + balance
        return self.loss_of(x, self.final_norm, self.head, targets) + AUX * aux


class Trainer:
    def __init__(self, shape, parallel, balanced):
        model = Model(shape, parallel == "ep", balanced)
        for block in model.blocks if parallel != "ep" else ():
            block.compile()
        self.divided = [getattr(b, n) for b in model.blocks for n in DIVIDED] if parallel == "ep" else []
        if parallel == "fsdp2":
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for block in model.blocks:
                fully_shard(block, mp_policy=policy, reshard_after_forward=False)
            fully_shard(model, mp_policy=policy, reshard_after_forward=False)
        else:
            if self.divided:
                nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                    model, [f"blocks.{l}.{n}" for l in range(shape.L) for n in DIVIDED])
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.model = model
        decayed = [w for n, w in model.named_parameters() if "norm" not in n]
        others = [w for n, w in model.named_parameters() if "norm" in n]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
        generator = torch.Generator("cpu").manual_seed(2 + dist.get_rank())
        self.batches = torch.randint(0, min(256, shape.V), (8, shape.B, shape.S + 1), device="cpu",
                                     generator=generator).to(torch.get_default_device())
        self.steps = 0

    def step(self):
        batch = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        loss = self.model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def clip(self):
        if not self.divided:
            return nn.utils.clip_grad_norm_(self.model.parameters(), CLIP, foreach=True)
        # The experts have the sum of what the ranks' losses give them, the others the mean.
        grads = [w.grad for w in self.divided]
        torch._foreach_mul_(grads, 1 / dist.get_world_size())
        kept = set(self.divided)
        others = [w for w in self.model.parameters() if w not in kept]
        square = nn.utils.get_total_norm(grads, foreach=True) ** 2
        dist.all_reduce(square)
        total = (square + nn.utils.get_total_norm([w.grad for w in others], foreach=True) ** 2).sqrt()
        nn.utils.clip_grads_with_norm_(list(self.model.parameters()), CLIP, total, foreach=True)

    def milliseconds(self, steps):
        """Of a step, the slowest rank's."""
        synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize()
        ms = torch.tensor((time.perf_counter() - start) * 1e3 / steps)
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        return ms.item()


def main():
    p = parser()
    p.add_argument("--dtype", choices=["bf16"], default="bf16")
    p.add_argument("--steps", type=int, default=10, help="a round")
    p.add_argument("--rounds", type=int, default=1, help="of as many steps, the median")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--model", choices=list(SHAPES), default="demo")
    p.add_argument("--parallel", choices=["fsdp2", "ddp", "ep"], default="fsdp2")
    p.add_argument("--balanced", action="store_true", help="uniform routing, whatever the scores are")
    p.add_argument("--attention", choices=list(ATTENTION), default="cudnn")
    a = p.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    cuda = a.device == "cuda"
    torch.set_default_device(a.device)
    if cuda:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    else:
        torch.set_num_threads(a.threads)
        dist.init_process_group("gloo")
    shape = SHAPES[a.model]
    axis = "ep" if a.parallel == "ep" else "dp"
    balanced = ".balanced" if a.balanced else ""
    with sdpa_kernel(ATTENTION[a.attention]) if cuda else contextlib.nullcontext():
        trainer = Trainer(shape, a.parallel, a.balanced)
        first = trainer.step().item()
        trainer.milliseconds(3)
        trainer.steps = 0
        if not trainer.step().item() < first:
            sys.exit("train_step_ranks: the loss does not fall")

        def round_of_rows():
            ms = sorted(trainer.milliseconds(a.steps) for _ in range(a.rounds))[a.rounds // 2]
            rate = shape.flops() / ms * 1e3
            yield {"name": "train_step", "case": f"{shape.case()}.{a.dtype}.{axis}{dist.get_world_size()}{balanced}",
                   "device": a.device, "peer": f"torch {a.parallel}, {a.attention}",
                   "value": round(shape.B * shape.S / ms * 1e3, 1), "unit": "tokens/s a GPU",
                   "ms": round(ms, 3), "tflops": round(rate * 1e-12, 1),
                   "mfu": round(100 * rate / PEAK, 1), "memory": torch.cuda.max_memory_allocated() if cuda else 0}

        serve_ranks(round_of_rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
