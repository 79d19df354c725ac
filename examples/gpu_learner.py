"""A learner on a GPU, actors on CPUs: each batch is labelled with the version of the weights that acted.

The actors see eight numbers, and are rewarded for naming the largest. The learner does not stand still for a publish:
the GPU copies the weights to the host's memory behind the optimizer's step, and commits the version itself. On a
machine without a GPU it learns on the CPU.
"""

import argparse

import torch
from torch import nn

import shmsync


def make_policy():
    return nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 8))  # logits of the eight actions


@torch.no_grad()
def act(sub, queue):
    policy = sub.bind(make_policy())  # on the CPU, a view of the shared weights
    for _ in sub.versions():  # once for each new version; ends when the learner leaves its `with`
        seen = torch.randn(256, 8)
        with sub.read() as section:
            action = torch.distributions.Categorical(logits=policy(seen)).sample()
        reward = (action == seen.argmax(1)).float()
        queue.put((section.version, seen, action, reward))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--updates", type=int, default=300)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"learning on {torch.cuda.get_device_name() if device == 'cuda' else 'the CPU: this machine has no GPU'}")
    policy = make_policy().to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    # slots=2: the actors go on with the version before while the GPU copies the next one.
    with shmsync.Publisher(policy, slots=2) as pub:
        workers = shmsync.Workers(pub, act, options.actors)
        batches = workers.queue()
        with workers:
            for update in range(1, options.updates + 1):
                versions, *parts = zip(*(batches.get() for _ in range(options.actors)), strict=True)
                seen, action, reward = (torch.cat(part).to(device) for part in parts)
                optimizer.zero_grad()
                chosen = torch.distributions.Categorical(logits=policy(seen)).log_prob(action)
                (-((reward - reward.mean()) * chosen).mean()).backward()
                optimizer.step()
                version = pub.publish()  # returns at once; the current stream copies, after the step
                if update % 50 == 0:
                    print(f"version {version}: reward {reward.mean().item():.2f} of versions {sorted(versions)}")


if __name__ == "__main__":
    main()
