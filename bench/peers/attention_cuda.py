"""Peer of attention_cuda_bench: causal attention in PyTorch by flash attention, as it is and under
deterministic algorithms (ours always is), and by cuDNN.

Cases come from `attention_cuda_bench --list`; operations are counted as there.
"""

import re
import subprocess
import sys

import torch
import torch.nn.functional as F
from common import parser, serve
from torch.nn.attention import SDPBackend, sdpa_kernel

PEERS = {"flash": (SDPBackend.FLASH_ATTENTION, False),
         "flash deterministic": (SDPBackend.FLASH_ATTENTION, True),
         "cudnn": (SDPBackend.CUDNN_ATTENTION, False)}


def random_heads(B, S, heads, C):
    return torch.randn(B, S, heads, C, dtype=torch.bfloat16).transpose(1, 2)


def milliseconds(function, times=20):
    """The mean of calls that are not waited for one by one."""
    for _ in range(3):
        function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


def rows_of(case, peer):
    B, S, H, G, C = map(int, re.fullmatch(r"B(\d+) S(\d+) H(\d+) G(\d+) C(\d+)", case).groups())
    backend, deterministic = PEERS[peer]
    q, k, v = (random_heads(B, S, heads, C).requires_grad_() for heads in (H, G, G))
    d_out = random_heads(B, S, H, C)
    flop = 2 * B * H * S * S * C
    torch.use_deterministic_algorithms(deterministic)

    def forward():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with sdpa_kernel(backend):
        out = forward()
        forward_ms = milliseconds(forward)
        backward_ms = milliseconds(
            lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True))
    torch.use_deterministic_algorithms(False)
    for name, ms, share in (("fwd", forward_ms, 1), ("bwd", backward_ms, 2.5)):
        yield {"name": f"attention.{name}", "case": case, "device": "cuda", "peer": peer,
               "value": round(share * flop / ms / 1e9, 4), "unit": "TFLOP/s", "ms": round(ms, 4)}


def main():
    p = parser()
    p.add_argument("--device", choices=["cuda"], default="cuda")
    a = p.parse_args()
    torch.set_default_device(a.device)
    torch.manual_seed(1)
    listing = subprocess.run([a.bench, "--list"], check=True, capture_output=True, text=True)
    cases = listing.stdout.splitlines()

    def round_of_rows():
        for case in cases:
            for peer in PEERS:
                try:
                    yield from rows_of(case, peer)
                except RuntimeError as error:
                    print(f"{case}: no {peer}: {error}", file=sys.stderr)
        torch.cuda.empty_cache()

    serve(round_of_rows)


if __name__ == "__main__":
    main()
