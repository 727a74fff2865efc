"""The converters that are part of Penstock, with the class names of Kafka Connect or Confluent."""
