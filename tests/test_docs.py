"""The pages made from the tests say what the tests show, no more and no less."""

import pytest

from tests.features import PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_is_what_the_tests_show(page):
    assert page.read_text() == PAGES[page](), "run: python -m tests.features"
