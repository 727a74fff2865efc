"""Connectors in processes of their own. A connector that blocks or dies affects no other connector."""
