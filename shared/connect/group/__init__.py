"""Work sharing between the workers of a Connect cluster: group membership, and the leader's assignment."""
