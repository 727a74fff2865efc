"""Tasks and connectors in processes of their own. One that blocks or dies affects nothing else."""
