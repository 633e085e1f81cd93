"""What torch.compile keeps on disk serves another process: handles and numbers are inputs, not constants."""

import json
import os
import subprocess
import sys

PROCESS = """
import json, torch, torch._dynamo
from moiety import nn
torch.manual_seed(1)
blocks = [nn.GroupedMLP(4, 16, 8) for _ in range(2)]
splits, x = torch.tensor([2, 0, 4, 1]), torch.randn(7, 16, requires_grad=True)
eager = sum(block(x, splits).square().sum() for block in blocks)
eager.backward()
want = [x.grad.clone(), blocks[1].fc1.weight.grad.clone()]
x.grad = blocks[1].fc1.weight.grad = None
for block in blocks:
    block.compile(fullgraph=True)
sum(block(x, splits).square().sum() for block in blocks).backward()
assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip((x.grad, blocks[1].fc1.weight.grad), want))
counters = torch._dynamo.utils.counters
print(json.dumps([counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_hit"],
                  counters["inductor"]["fxgraph_cache_miss"], counters["aot_autograd"]["autograd_cache_hit"]]))
"""


def test_a_second_process_takes_graphs_from_the_disk(tmp_path):
    found = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=600,
                              env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    (graphs, hits, misses, _), (again, second_hits, second_misses, of_autograd) = found
    assert graphs == again == 1 and hits == 0 and misses > 0
    assert second_hits == misses and second_misses == 0 and of_autograd == 1
