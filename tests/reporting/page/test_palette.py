"""Whatever is drawn has a colour of its own."""

from mobius_ds.reporting.page.palette import FILLS
from mobius_ds.reporting.page.timeline_chart import KINDS_OF_COMPUTE
from mobius_ds.schedule.tasks import CATEGORIES


def test_every_category_and_every_kind_of_compute_has_a_fill_of_its_own():
    drawn = [*CATEGORIES, *KINDS_OF_COMPUTE]
    assert set(drawn) <= set(FILLS) and len({FILLS[what] for what in drawn}) == len(drawn)
