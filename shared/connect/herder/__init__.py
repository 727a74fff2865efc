"""Who decides what a worker runs: the herder, standalone or one of a group, and what REST may ask of it."""
