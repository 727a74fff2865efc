"""The transforms and predicates that are part of Penstock, with Kafka Connect's names."""
