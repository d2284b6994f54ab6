"""Options of the test run."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=20, help="seeds that the tests of random delays try on each model")
    parser.addoption("--soak-steps", type=int, default=200, help="training steps of the long run")


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--seeds")


@pytest.fixture
def soak_steps(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--soak-steps")
