"""Spark's configuration for S3."""

from __future__ import annotations

from penstock.services.spark.spark_session import is_s3, s3_configuration


def test_the_usual_variables_in_hadoops_words() -> None:
    """Region and endpoint come from AWS's variables. A self-hosted server is addressed by path."""
    assert s3_configuration({}) == {}
    own = s3_configuration({"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_DEFAULT_REGION": "us-east-1"})
    assert own == {
        "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
        "spark.hadoop.fs.s3a.endpoint": "http://127.0.0.1:9",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.connection.ssl.enabled": "false",
    }
    both = {
        "AWS_ENDPOINT_URL": "http://a",
        "AWS_ENDPOINT_URL_S3": "https://b",
        "AWS_REGION": "r",
        "AWS_DEFAULT_REGION": "d",
    }
    assert s3_configuration(both)["spark.hadoop.fs.s3a.endpoint"] == "https://b"
    assert s3_configuration(both)["spark.hadoop.fs.s3a.connection.ssl.enabled"] == "true"
    assert s3_configuration(both)["spark.hadoop.fs.s3a.endpoint.region"] == "r"


def test_only_a_lake_on_s3_needs_the_connector() -> None:
    """The connector, half a gigabyte, is not downloaded for a local folder."""
    assert is_s3("s3a://bucket/app")
    assert not is_s3("/lake/app")
    assert not is_s3("gs://bucket/app")
