"""Tasks in processes of their own, so that one that blocks or dies takes nothing else with it."""
