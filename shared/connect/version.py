"""The release of Kafka Connect whose interfaces and rules this runtime keeps to."""

CONNECT_VERSION = "4.1.1"
