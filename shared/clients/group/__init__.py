"""Membership in a group by Kafka's classic protocol: the part that consumers and Connect workers share.

Each kind of member defines what it holds, what members write to each other, and which member assigns. The protocol type
and the offered protocols are sent with every join.
"""
