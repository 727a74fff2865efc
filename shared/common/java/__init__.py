"""The Java that runs Kafka and Spark, and the jars that no Python package contains."""
