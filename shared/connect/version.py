"""The release of Kafka Connect whose interfaces and rules this runtime implements."""

CONNECT_VERSION = "4.1.1"
