"""The converters that are part of Penstock, with Kafka Connect's names."""
