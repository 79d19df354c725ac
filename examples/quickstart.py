import multiprocessing

import torch
from torch import nn

import shmsync


def work(handle, rank):
    policy = nn.Linear(4, 1)
    with shmsync.Subscriber(handle, worker=rank) as sub, torch.no_grad():
        sub.bind(policy)  # its parameters become views of the shared weights
        try:
            while sub.wait_version(sub.version + 1, timeout=60):
                out = policy(torch.ones(1, 4))  # one call, one version: the newest
        except shmsync.ClosedError:
            print(f"worker {rank}: {out.item():.2f} at version {sub.version}")


if __name__ == "__main__":
    policy = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    spawn = multiprocessing.get_context("spawn")
    with shmsync.Publisher(policy) as pub:
        for rank in range(2):
            spawn.Process(target=work, args=(pub.handle, rank)).start()
        pub.publish(wait=[0, 1], timeout=300)  # both workers are there
        for _ in range(100):
            x = torch.randn(64, 4)
            loss = (policy(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pub.publish(wait="all")  # returns when both have applied it
