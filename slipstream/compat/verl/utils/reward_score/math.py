"""verl's module `verl.utils.reward_score.math`, the older name of `math_reward`."""

from slipstream.compat.verl.utils.reward_score.math_reward import (
    compute_score,
    is_equiv,
    last_boxed_only_string,
    remove_boxed,
    strip_string,
)

__all__ = ["compute_score", "is_equiv", "last_boxed_only_string", "remove_boxed", "strip_string"]
