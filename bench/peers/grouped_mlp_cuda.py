"""Peer of grouped_mlp_cuda_bench: the same experts in PyTorch on a GPU, in bf16.

Shapes and routing come from `grouped_mlp_cuda_bench --list`. Two torch._grouped_mm with SwiGLU and
the router's probability between them, eager and through torch.compile; forward alone and with the
backward pass, gradients of rows, weights and probabilities. Rows lie in the order of experts. Timed
as ours: 0.5 s of rest, 5 runs, the median of 20.
"""

import torch
from common import wanted
from grouped_gemm_cuda import figures_of, serve_shapes


def experts(x, p, w1, w2, ends):
    gate, up = torch._grouped_mm(x, w1.transpose(1, 2), offs=ends).chunk(2, dim=1)
    a = (torch.nn.functional.silu(gate.float()) * up.float() * p[:, None]).to(x.dtype)
    return torch._grouped_mm(a, w2.transpose(1, 2), offs=ends)


def rows_of(spec, options):
    T, D, F, E = spec["T"], spec["D"], spec["F"], spec["E"]
    R = sum(spec["counts"])
    ends = torch.tensor(spec["counts"]).cumsum(0).int()

    def leaf(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, dtype=dtype).requires_grad_()

    leaves = leaf(R, D), leaf(R, dtype=torch.float32), leaf(E, 2 * F, D), leaf(E, D, F)
    gradient = torch.randn(R, D, dtype=torch.bfloat16)

    def forward(run):
        with torch.no_grad():
            run(*leaves, ends)

    def both(run):
        torch.autograd.grad(run(*leaves, ends), leaves, gradient)

    for peer, run in (("eager", experts), ("torch.compile", torch.compile(experts))):
        for name, share, call in (("forward", 3, forward), ("forward + backward", 9, both)):
            rows = [row for path in ("sm90", "sm90_fused")
                    if wanted(row := f"{name} {path}", options.only)]
            if not rows:
                continue
            flop = share * 2 * R * D * F
            figures = figures_of(lambda: call(run), flop, f"{name} {spec['case']}: no {peer}", options)
            for row in rows if figures else ():
                yield {"name": "grouped_mlp." + row, "case": spec["case"], "device": "cuda",
                       "peer": peer, **figures}


if __name__ == "__main__":
    serve_shapes(rows_of)
