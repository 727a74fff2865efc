# One image for every Penstock service and for Spark: the Spark that runs the compactions is pyspark's own, so master,
# worker and driver always have the same version of Spark, of Python and of the Kafka and Delta connectors.

FROM python:3.12.11-slim-bookworm AS build
WORKDIR /build
COPY requirements.lock ./
COPY deploy/requirements.lock deploy/requirements.lock
# setuptools first: with it in place, what comes as source is built by the locked version.
RUN python -m venv /opt/penstock \
 && awk '/^[^ ]/ { wanted = /^(setuptools|hatchling|packaging|pathspec|pluggy|trove-classifiers)==/ } wanted' requirements.lock > tools.lock \
 && /opt/penstock/bin/pip install --no-cache-dir --no-deps --require-hashes -r tools.lock \
 && /opt/penstock/bin/pip install --no-cache-dir --require-hashes --use-pep517 --no-build-isolation -r deploy/requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY services services
COPY api api
COPY penstock penstock
RUN /opt/penstock/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.12.11-slim-bookworm
RUN apt-get update \
 && apt-get install -y --no-install-recommends openjdk-17-jre-headless procps tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --uid 10001 --create-home --home-dir /home/penstock penstock \
 && install -d -o penstock -g penstock /var/lib/penstock /var/lib/penstock/lake /var/lib/penstock/notable /var/lib/penstock/spark
COPY --from=build /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYSPARK_PYTHON=/opt/penstock/bin/python
USER penstock
WORKDIR /var/lib/penstock
# Spark's Kafka and Delta connectors: fetched now, so that no compaction waits for a download or needs the network.
RUN penstock jars spark --class-archive
# The rules of windows, so that no start compiles them where the processor is the same.
RUN python -m penstock.shared.streams.compile_kernels
EXPOSE 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--"]
CMD ["penstock", "--help"]
