"""How many examples a property test draws: all in the profile `thorough`, one in five otherwise.

Each run draws other examples, so six runs draw more than a thorough one. The variable HYPOTHESIS_PROFILE names the
profile; `scripts/test --soak` and `scripts/mutate` set it.
"""

from __future__ import annotations

import os

from hypothesis import settings

QUICK, THOROUGH = "quick", "thorough"
_EXAMPLES = 100  # of a thorough property test that names no number
_QUICK_EXAMPLES = 20


def register_profiles() -> None:
    """Register both profiles with Hypothesis and load the chosen one. In both, an example has no time limit."""
    settings.register_profile(THOROUGH, derandomize=False, deadline=None, max_examples=_EXAMPLES)
    settings.register_profile(QUICK, derandomize=False, deadline=None, max_examples=_QUICK_EXAMPLES)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", QUICK))


def examples(thorough: int) -> int:
    """Return the number of examples, in the current profile, of a test that draws `thorough` in a thorough run."""
    return max(1, thorough * settings().max_examples // _EXAMPLES)
