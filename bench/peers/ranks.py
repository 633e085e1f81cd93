"""What peers of several ranks share. torchrun starts them; rank 0 talks."""

import os

import torch
import torch.distributed as dist
from common import parser, serve


def serve_ranks(round_of_rows):
    """Serves rounds, in which all ranks take part; the rows are rank 0's."""
    if dist.get_rank() == 0:
        serve(lambda: round_of_rows() if go_on() else [])
        go_on(False)
    else:
        while go_on():
            list(round_of_rows())


def go_on(yes=True):
    """Rank 0 says whether there is another round, the others are told."""
    word = torch.tensor(int(yes), device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(word, 0)
    return word.item() == 1


def run_on_gpus(round_of_rows):
    """The program of a peer whose ranks have a GPU each, without options of its own."""
    p = parser()
    p.add_argument("--device", default="cuda")
    p.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    serve_ranks(round_of_rows)
    dist.destroy_process_group()
