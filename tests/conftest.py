"""Options of the test run."""

import gc

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=6, help="seeds that the tests of random delays try on each model")
    parser.addoption("--soak-steps", type=int, default=100, help="training steps of the long run")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported stays: collections by tests need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--seeds")


@pytest.fixture
def soak_steps(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--soak-steps")
