"""What Spark needs for a lake or files on S3: Hadoop's connector, and the usual AWS_ variables in Hadoop's words.

The connector brings Amazon's whole SDK, half a gigabyte, so it is fetched only where one is there. Credentials need
no word here: Spark itself hands AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN of the driver on, and
without them Hadoop asks the machine's role.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.shared.common.jars import read_jar_set

SCHEME = "s3a://"
# Of the version of pyspark's own hadoop-client: another version of the connector would not load.
S3_JARS = read_jar_set(Path(__file__).with_name("s3_jars.json"))


def is_s3(place: str) -> bool:
    """Whether this folder, as Spark calls it, is on S3."""
    return place.startswith(SCHEME)


def configuration(environ: Mapping[str, str]) -> dict[str, str]:
    """Spark's configuration for S3 from AWS_REGION and AWS_ENDPOINT_URL (or AWS_ENDPOINT_URL_S3, which wins).

    >>> configuration({"AWS_REGION": "eu-west-1"})
    {'spark.hadoop.fs.s3a.endpoint.region': 'eu-west-1'}
    """
    conf = {}
    if region := environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION"):
        conf["spark.hadoop.fs.s3a.endpoint.region"] = region
    if endpoint := environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL"):
        conf["spark.hadoop.fs.s3a.endpoint"] = endpoint
        # A server of one's own seldom has a host name for each bucket.
        conf["spark.hadoop.fs.s3a.path.style.access"] = "true"
        conf["spark.hadoop.fs.s3a.connection.ssl.enabled"] = str(endpoint.startswith("https")).lower()
    return conf
