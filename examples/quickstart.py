import multiprocessing

import torch

import shmsync


def work(handle, rank):
    with shmsync.Subscriber(handle, worker=rank) as sub, torch.no_grad():
        policy = sub.bind(torch.nn.Linear(4, 1))  # its parameters become views of the shared weights
        for version in range(2, 102):
            sub.wait_version(version, timeout=60)
            out = policy(torch.ones(1, 4))  # one call, one version: the newest
        print(f"worker {rank}: {out.item():.2f} at version {sub.version}")


if __name__ == "__main__":
    policy = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with shmsync.Publisher(policy) as pub:
        for rank in range(2):
            multiprocessing.get_context("spawn").Process(target=work, args=(pub.handle, rank)).start()
        for _ in range(100):
            x = torch.randn(64, 4)
            optimizer.zero_grad()
            (policy(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            pub.publish(wait=[0, 1], timeout=60)  # returns when both workers have applied it
