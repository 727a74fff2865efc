"""The lake's Delta tables without Spark. This package and the Spark jobs are the only importers of deltalake."""
