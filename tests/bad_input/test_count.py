"""How much of this there is."""

from typing import List

from tests.bad_input import test_checkpoints, test_configs, test_environment, test_models, test_plans_and_topologies
from tests.bad_input.cases import Case

MODULES = (test_checkpoints, test_configs, test_environment, test_models, test_plans_and_topologies)


def test_there_are_at_least_sixty_wrong_inputs_and_each_has_words():
    tables: List[List[Case]] = [value for module in MODULES for value in vars(module).values()
                                if isinstance(value, list) and value and isinstance(value[0], Case)]
    cases = [case for table in tables for case in table]
    assert len(cases) >= 60 and all(len(case.words) > 10 for case in cases), len(cases)
