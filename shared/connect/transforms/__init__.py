"""The transforms and predicates that ship, under the names of Kafka Connect's."""
