"""One Ray and its actors for all tests."""

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def one_ray():
    """Ray on this machine; one that is there already is used."""
    import ray

    from support.remote import ray_parts  # needs Ray

    if ray.is_initialized():
        yield
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # not in a runtime_env, which has its own agent, and no worker started ahead
    ray.init(
        "local", num_cpus=1, object_store_memory=256 << 20, include_dashboard=False,
        _system_config=ray_parts.SYSTEM, log_to_driver=False, logging_level="ERROR",
    )  # fmt: skip
    session = ray._private.worker.global_worker.node.get_session_dir_path()  # has Ray's logs
    yield
    ray.shutdown()
    shutil.rmtree(session, ignore_errors=True)


@pytest.fixture
def crew(one_ray):
    """Two actors on the test's node, for RayWeightSyncScheme. A test kills none of them."""
    from shmsync import RayWeightSyncScheme
    from support.remote import ray_parts

    return ray_parts.crew(RayWeightSyncScheme(), ["", ""])
