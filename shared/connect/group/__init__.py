"""How the workers of a Connect cluster share connectors and tasks: membership, and the leader's assignment."""
