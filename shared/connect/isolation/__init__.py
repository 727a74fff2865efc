"""Connectors in processes of their own, with `penstock.task.isolation=process`.

A connector that blocks or dies there affects no other connector.
"""
