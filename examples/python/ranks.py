"""Four ranks, as threads, with their own experts and their own tokens; and a rank that stops."""

import threading

import torch

import switchyard

E, I, H, K = 8, 64, 128, 2
torch.manual_seed(0)
w13, w2 = torch.randn(E, 2 * I, H) / H**0.5, torch.randn(E, H, I) / I**0.5


def rank(world):
    own = world.own_experts(E)
    experts = switchyard.Experts(
        w13[own.start : own.stop],
        w2[own.start : own.stop],
        top_k=K,
        max_tokens=64,
        placement=switchyard.Placement(world=world, num_experts=E, num_threads=1),
    )
    x = torch.randn(10 + world.rank, H)
    weights, ids = torch.randn(x.shape[0], E).softmax(-1).topk(K)
    y = experts(x, ids, weights)
    alone = switchyard.Experts(w13, w2, top_k=K)(x, ids, weights)
    assert torch.allclose(y, alone, atol=1e-5)
    world.barrier()
    if world.rank == 3:
        return
    try:
        experts(x, ids, weights)
    except TimeoutError as error:  # switchyard.Timeout, or Aborted where another rank noticed first
        print(f"rank {world.rank}: rank {error.peer} did not come ({error.code}, pass {error.epoch})")


threads = [threading.Thread(target=rank, args=(w,)) for w in switchyard.World.threads(4, deadline=2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
