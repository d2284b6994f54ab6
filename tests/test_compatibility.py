"""docs/compatibility.md says what the tests show, no more and no less."""

from tests.features import PAGE, page


def test_the_page_is_what_the_tests_show():
    assert PAGE.read_text() == page(), "run: python -m tests.features > docs/compatibility.md"
