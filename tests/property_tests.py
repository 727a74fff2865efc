"""How many examples a property test draws: one in five in the profile `quick`, the default, and all in the others.

Each run draws other examples, so six runs draw more than a thorough one. The variable HYPOTHESIS_PROFILE names the
profile; `scripts/test --soak` and `scripts/mutate` set it. The profile `mutation` is `thorough` without the search for
a smaller example after a failure, which nobody reads there, and which takes longer than the failure itself.
"""

from __future__ import annotations

import os

from hypothesis import Phase, settings

QUICK, THOROUGH, MUTATION = "quick", "thorough", "mutation"
_EXAMPLES = 100  # of a thorough property test that names no number
_QUICK_EXAMPLES = 20


def register_profiles() -> None:
    """Register the profiles with Hypothesis and load the chosen one. In all of them, an example has no time limit."""
    settings.register_profile(THOROUGH, derandomize=False, deadline=None, max_examples=_EXAMPLES)
    at_first_failure = (Phase.explicit, Phase.reuse, Phase.generate)
    settings.register_profile(MUTATION, settings.get_profile(THOROUGH), phases=at_first_failure)
    settings.register_profile(QUICK, derandomize=False, deadline=None, max_examples=_QUICK_EXAMPLES)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", QUICK))


def examples(thorough: int) -> int:
    """Return the number of examples, in the current profile, of a test that draws `thorough` in a thorough run."""
    return max(1, thorough * settings().max_examples // _EXAMPLES)
