"""A place in a group by Kafka's classic protocol: what consumers and Connect workers have in common.

What a member holds, what members tell each other and who assigns is its own: the protocol type and the protocols that
it offers come with every join.
"""
