"""A trainer that serves its figures to Prometheus at http://localhost:9400/metrics, and prints some as a log would.

Needs `pip install 'shmsync[metrics]'`. docs/grafana.json is a dashboard for these figures.
"""

import argparse
import multiprocessing
import time

import torch
from prometheus_client import start_http_server

import shmsync
from shmsync import metrics


def work(handle, rank):
    with shmsync.Subscriber(handle, worker=rank) as sub, torch.no_grad():
        policy = sub.bind(torch.nn.Linear(64, 4))
        while sub.publisher_alive:
            policy(torch.ones(16, 64))
            time.sleep(0.01 * (rank + 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--port", type=int, default=9400)
    options = parser.parse_args()
    policy = torch.nn.Linear(64, 4)
    with shmsync.Publisher(policy, name="metrics-example", slots=3) as pub:
        processes = [
            multiprocessing.get_context("spawn").Process(target=work, args=(pub.handle, rank)) for rank in range(2)
        ]
        for process in processes:
            process.start()
        pub.wait_readers(range(2), procs=processes, timeout=120)
        metrics.prometheus(pub)
        start_http_server(options.port)
        print(f"serving at http://localhost:{options.port}/metrics", flush=True)
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            with torch.no_grad():
                policy.weight.add_(1e-3)
            pub.publish()
            time.sleep(0.05)
        for name, value in metrics.values(pub).items():  # what a writer of TensorBoard or W&B would be given
            print(f"{name} {value:g}")
    for process in processes:
        process.join()
