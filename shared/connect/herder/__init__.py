"""The herder, standalone or one of a group: it decides what a worker runs, and executes REST's requests."""
