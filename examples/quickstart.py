import torch

import shmsync


def work(sub):
    policy = sub.bind(torch.nn.Linear(4, 1))  # its parameters become views of the shared weights
    with torch.no_grad():
        for _ in sub.versions():  # once for each new version; ends when the trainer leaves the `with` below
            out = policy(torch.ones(1, 4))  # one call, one version: the newest
            result = f"worker {sub.worker}: {out.item():.2f} at version {sub.version}"
    print(result)


if __name__ == "__main__":
    policy = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with shmsync.Publisher(policy) as pub, shmsync.Workers(pub, work, 2):  # publishes version 1
        for _ in range(100):
            x = torch.randn(64, 4)
            optimizer.zero_grad()
            (policy(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            pub.publish(wait=True)  # returns the version when both workers have applied it
