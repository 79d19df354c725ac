"""Which test files `make test CHANGED=...` runs."""

from __future__ import annotations

import pytest

from support.changed import reaching

OF_ALL = {"tests/unit/test_layers.py", "tests/programs/test_docs.py"}


@pytest.mark.parametrize(
    ("changed", "reach", "do_not"),
    [
        ("shmsync/engine/publisher.py", {"unit/test_publish", "conformance/test_send", "collectors/test_end"}, set()),
        ("shmsync/collectors/worker/singles.py", {"collectors/test_end"}, {"unit/test_bind", "conformance/test_send"}),
        ("shmsync/cli/sweeping.py", {"engine/test_observed", "limits/test_identities"}, {"conformance/test_send"}),
        ("tests/support/ray_parts.py", {"remote/test_ray_modules"}, {"unit/test_publish", "conformance/test_send"}),
        ("tests/unit/test_bind.py", {"unit/test_bind"}, {"unit/test_bind_calls"}),
        ("tests/unit/conftest.py", {"unit/test_bind"}, {"conformance/test_send"}),
        ("docs/tutorial.md", {"programs/test_guides"}, {"unit/test_bind"}),
        ("native/src/copy.cpp", {"unit/test_publish", "engine/test_never_torn", "gpu/test_deaths"}, set()),
        ("CHANGELOG.md", set(), {"programs/test_docs"}),
    ],
)
def test_a_change_is_tested_by_what_reaches_it(changed, reach, do_not):
    found = set(reaching([changed]))
    assert {f"tests/{name}.py" for name in reach} <= found
    assert not {f"tests/{name}.py" for name in do_not} & found
    assert (found >= OF_ALL) == (not changed.startswith(("tests/", "CHANGELOG")))
