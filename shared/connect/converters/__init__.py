"""The converters that ship, under the names of Kafka Connect's."""
