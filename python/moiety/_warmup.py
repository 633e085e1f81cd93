"""moiety.nn.warmup: the step before a CUDA graph is captured."""

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree


def warmup(model: torch.nn.Module, *example: Any, **named: Any) -> Any:
    """Runs model(*example, **named) forward, and backward where gradients are enabled, on a stream of its
    own: a capture of the same shapes then meets nothing that still has to be made or compiled.

    Gradients, main_grad, pending weight gradients, buffers and torch's random state are afterwards what
    they were; on_grad_ready's hooks do not run.
    """
    cuda = any(t.is_cuda for t in (*model.parameters(), *pytree.tree_leaves((example, named)))
               if isinstance(t, torch.Tensor))
    example, named = pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), (example, named))
    with _kept(model), torch.random.fork_rng(devices=[torch.cuda.current_device()] if cuda else []):
        if not cuda:
            return _step(model, example, named)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _step(model, example, named)
        torch.cuda.current_stream().wait_stream(side)


def _step(model: torch.nn.Module, example: Any, named: Any) -> None:
    results = [t for t in pytree.tree_leaves(model(*example, **named))
               if isinstance(t, torch.Tensor) and t.requires_grad]
    if results:
        torch.autograd.backward(results, [torch.ones_like(t) for t in results])


@contextlib.contextmanager
def _kept(model: torch.nn.Module) -> Iterator[Any]:
    """Everything that a step changes is restored at the end."""
    from .nn import GroupedLinear

    linears = [m for m in model.modules() if isinstance(m, GroupedLinear)]
    grads = [(p, p.grad) for p in model.parameters()]
    added = [(p, p.grad_added_to_main_grad) for p, _ in grads if hasattr(p, "grad_added_to_main_grad")]
    main_grads = [buffer for m in linears if m.grad_target == "main_grad"
                  and any(w.requires_grad for w in m.experts_of("weight")) for buffer in m.main_grads()]
    changed = [(t, t.detach().clone()) for t in (*model.buffers(), *main_grads)]
    hooks, jobs = [m._ready_hooks for m in linears], [m._jobs for m in linears]
    for p, _ in grads:
        p.grad = None
    for m in linears:
        m._ready_hooks, m._jobs = collections.OrderedDict(), collections.deque()
    try:
        yield
        for m in linears:
            while m._jobs:
                m._run_job(*m._jobs.popleft())
    finally:
        for m, its_hooks, its_jobs in zip(linears, hooks, jobs):
            m._ready_hooks, m._jobs = its_hooks, its_jobs
        for p, grad in grads:
            p.grad = grad
        for p, value in added:
            p.grad_added_to_main_grad = value
        with torch.no_grad():
            for t, value in changed:
                t.copy_(value)
