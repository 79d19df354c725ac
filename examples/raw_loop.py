"""A trainer and two workers in a plain multiprocessing loop, with the scheme API.

send() returns when every worker uses the new weights, or raises and names who does not. receive() puts the newest
weights into the worker's policy, and answers the trainer.
"""

from multiprocessing import Pipe, get_context

import torch

from shmsync.schemes import SharedMemWeightSyncScheme


def work(scheme, pipe, rank):
    policy = torch.nn.Linear(4, 1, bias=False).requires_grad_(False)
    scheme.init_on_worker("policy", pipe=pipe, model=policy, worker_idx=rank, wait=60)  # for the first weights
    # Each call of the policy uses the newest version, so leave the loop by what receive() has answered for.
    while not scheme.get_receiver().receive(timeout=0.001) or scheme.get_receiver().version < 200:
        policy(torch.ones(1, 4))  # act
    print(f"worker {rank}: {policy(torch.ones(1, 4)).item():.2f} at version {scheme.get_receiver().version}")


if __name__ == "__main__":
    policy, scheme = torch.nn.Linear(4, 1, bias=False), SharedMemWeightSyncScheme(timeout=60)  # workers start slowly
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    pipes = [Pipe() for _ in range(2)]
    workers = [get_context("spawn").Process(target=work, args=(scheme, pipes[i][1], i), daemon=True) for i in range(2)]
    for worker in workers:
        worker.start()
    scheme.init_on_sender("policy", model=policy, pipes=[ours for ours, _ in pipes], procs=workers)
    for _ in range(200):
        optimizer.zero_grad()
        (policy(torch.eye(4)) - 1).square().mean().backward()  # learn to add the inputs up
        optimizer.step()
        version = scheme.get_sender().send()
    for worker in workers:
        worker.join()
    print(f"trainer: {policy(torch.ones(1, 4)).item():.2f} at version {version}")
