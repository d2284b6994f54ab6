"""What all ranks do together: if one fails, all raise the same error."""

from typing import Any, Callable, List, Tuple

from mobius_ds.runtime.ranks.errors import CheckpointError
from mobius_ds.runtime.sweeps.pipeline import Pipeline


def together(pipeline: Pipeline, call: str, part: Callable[[], Any],
             tell: Callable[[Any], Any] = lambda result: None) -> Tuple[Any, List[Any]]:
    """Does this rank's part of something. If one rank fails, all raise the same error, and may go on from there.

    Args:
        tell: what the other ranks are told of the part's result.

    Returns:
        The result, and what every rank told.
    """
    result = told = failure = cause = None
    with pipeline.mailbox.told():
        try:
            result = part()
            told = tell(result)
        except Exception as error:  # the script's own objects can raise anything when they are written or read
            cause = error
            failure = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    outcomes = pipeline.step(call, (told, failure))
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise CheckpointError(f"{call} failed on rank {rank}: {failure}") from cause
    return result, [told for told, _ in outcomes]
