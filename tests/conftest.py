from pathlib import Path

import pytest

pytest.register_assert_rewrite("seeded_faults")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow first, so that none is left for the end when files are spread over processes."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint's banks, made by the command; a file whose banks are others has a fixture of its own."""
    from test_cli import TINY, succeeds

    where = tmp_path_factory.mktemp("banks")
    succeeds("import", TINY, "out", "--unverified", cwd=where)
    return where / "out"
