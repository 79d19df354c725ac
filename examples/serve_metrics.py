"""A trainer that serves its figures to Prometheus at http://localhost:9400/metrics.

Needs `pip install 'shmsync[metrics]'`. examples/grafana.json is a dashboard for these figures.
"""

import argparse
import time

import torch
from prometheus_client import start_http_server

import shmsync
from shmsync import metrics


def work(sub):
    policy = sub.bind(torch.nn.Linear(64, 4))
    with torch.no_grad():
        for _ in sub.versions():
            policy(torch.ones(16, 64))
            time.sleep(0.01 * (sub.worker + 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--port", type=int, default=9400)
    options = parser.parse_args()
    policy = torch.nn.Linear(64, 4)
    with (
        shmsync.Publisher(policy, name="metrics-example", slots=3) as pub,
        shmsync.Workers(pub, work, 2),
    ):
        metrics.prometheus(pub)
        start_http_server(options.port)
        print(f"serving at http://localhost:{options.port}/metrics", flush=True)
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            with torch.no_grad():
                policy.weight.add_(1e-3)
            pub.publish()
            time.sleep(0.05)
