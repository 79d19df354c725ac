"""Which test files `make test CHANGED=...` runs."""

from __future__ import annotations

import pytest

from support.changed import reaching

OF_ALL = {"tests/unit/project/test_layers.py", "tests/programs/test_docs.py"}
PUBLISH, BIND, SEND = "unit/write/test_publish", "unit/bind/test_bind", "conformance/sends/test_send"


@pytest.mark.full  # the first one reads every import of the project
@pytest.mark.parametrize(
    ("changed", "reach", "do_not"),
    [
        ("shmsync/engine/publisher.py", {PUBLISH, SEND, "collectors/test_end"}, set()),
        ("shmsync/collectors/worker/singles.py", {"collectors/test_end"}, {BIND, SEND}),
        ("shmsync/cli/sweeping.py", {"engine/observe/test_observed", "limits/test_identities"}, {SEND}),
        ("tests/support/remote/ray_parts.py", {"remote/ray/test_ray_modules", SEND}, {PUBLISH}),
        ("tests/unit/bind/test_bind.py", {BIND}, {"unit/bind/test_bind_calls"}),
        ("tests/unit/conftest.py", {BIND}, {SEND}),
        ("docs/tutorial.md", {"programs/test_guides"}, {BIND}),
        ("native/src/copy.cpp", {PUBLISH, "engine/versions/test_never_torn", "gpu/test_deaths"}, set()),
        ("CHANGELOG.md", set(), {"programs/test_docs"}),
    ],
)
def test_a_change_is_tested_by_what_reaches_it(changed, reach, do_not):
    found = set(reaching([changed]))
    assert {f"tests/{name}.py" for name in reach} <= found
    assert not {f"tests/{name}.py" for name in do_not} & found
    assert (found >= OF_ALL) == (not changed.startswith(("tests/", "CHANGELOG")))
