import pytest

pytest.register_assert_rewrite("seeded_faults")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow first, so that none is left for the end when files are spread over processes."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
