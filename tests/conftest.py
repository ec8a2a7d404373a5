"""How the suite is spread over processes: a file's tests share its fixtures, so they stay together."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups each file's tests for `--dist loadgroup`, and puts the slow first, so that none is left for the end.

    A test that names its own `xdist_group` keeps it: parts of one file that share nothing run beside each other.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
