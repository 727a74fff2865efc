"""Membership in a group by Kafka's classic protocol: the code that consumers and Connect workers share.

A subclass of `Member` defines what a member owns, the messages between members, and the assignment. Every JoinGroup has
the protocol type and the protocols that the member offers.
"""
